"""Damages data directories and checks how engine and sessions react.

    python -m tests.stress.data_directory_mutations --count 5000 --seed 1

Each case copies a small data directory with three sessions. A killed process left one of them in
the middle of a reply. The copy is damaged (`data_directory_damage.py`) before or after an engine
opens it. The engine opens every session and sends a message; its model checks every page that it
reads. Each result is the one before the damage or a clear error, every token follows the model's
rule, and undamaged sessions stay usable. The next engine finds everything that was acknowledged.
Each engine runs in a process of its own, forked from a warm parent, which neither dies nor hangs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / "support")]
from scripted_rule import ScriptedRule  # noqa: E402

from lmchat import errors  # noqa: E402
from tests.stress import chatter, data_directory_damage  # noqa: E402
from tests.stress.chatter import SESSIONS, SETTINGS, State, replies_of, state_of  # noqa: E402
from tests.stress.session_kill import EOS, forked, read_until  # noqa: E402

PATIENCE = 40.0  # seconds for a process; SQLite waits 10 for others
SHORT = {**SETTINGS, "max_new_tokens": 12}
CLEAR = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {"InternalError"}
Write = Callable[..., None]
Lines = list[list[Any]]


# --- in a process of its own ----------------------------------------------------------------------


def in_process(act: Callable[[Write], None]) -> tuple[Lines, int]:
    """Returns what `act` wrote and the exit status of its process."""

    def work(out: int) -> None:
        def write(*line: Any) -> None:
            os.write(out, (json.dumps(line) + "\n").encode())

        logging.disable()  # for example a lease that cannot be released
        try:
            act(write)
            write("ended")
        except Exception as error:
            write("broke", f"{type(error).__name__}: {error}")

    with forked(work) as (pid, reading):
        output = read_until(reading, time.monotonic() + PATIENCE)
        os.kill(pid, signal.SIGKILL)  # it has ended, unless it hangs
        _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line[-1:] == b"\n"]
    if lines and lines[-1] == ["ended"]:
        return lines[:-1], 0
    return lines, status


def begin(data_dir: Path, write: Write) -> None:
    """Runs two engines on one directory, which leaves pages in two segments, all closed."""
    engines = [chatter.opened(data_dir), chatter.opened(data_dir)]
    for number, name in enumerate(SESSIONS):
        session = engines[number % 2].session(name)
        for text in ("the quiet river " * 20, f"boat {name} " * 30):
            session.send(text, **SETTINGS)
            write("is", name, state_of(session))
    for engine in engines:
        engine.close()


def go_on(data_dir: Path, write: Write) -> None:
    """Adds a turn to each session and kills the process in the last one's next reply."""
    engine = chatter.opened(data_dir)
    for name in SESSIONS:
        session = engine.session(name)
        session.send(f"and the lamp of {name} " * 10, **SETTINGS)
        write("is", name, state_of(session))
    engine.core.flush_pages()
    for shown, _ in enumerate(session.stream("on the last boat", **{**SETTINGS, "seed": 12})):
        if shown == 5:
            write("ended")
            os.kill(os.getpid(), signal.SIGKILL)


def visit(data_dir: Path, write: Write, damage: Callable[[], None], live: bool, send: bool) -> None:
    """Opens all sessions, reports and sends, then closes."""
    if not live:
        damage()
    try:
        engine = chatter.opened(data_dir)
    except (errors.Error, OSError) as error:
        return write("error", "open", "", type(error).__name__, str(error))
    if live:
        damage()
    for name in names_in(engine, write):
        visit_session(engine, name, write, send)
    if not send:
        write("verified", engine._runtime.store.verify())
    engine.core.check_invariants()
    engine.close()
    return None


def names_in(engine: Any, write: Write) -> list[str]:
    try:
        listed = {info.name for info in engine.sessions(owner="local")}
    except errors.Error as error:
        write("error", "list", "", type(error).__name__, str(error))
        return []
    return [name for name in SESSIONS if name in listed]


def visit_session(engine: Any, name: str, write: Write, send: bool) -> None:
    try:
        session = engine.session(name)
        if any("is dropped" in notice for notice in session.notices):
            write("dropped", name)
        write("found", name, state_of(session), replies_of(session))
        if not send:
            return None
        before = engine.core.stats().tokens_prefilled
        reply = session.send("and then?", **SHORT)
        computed = engine.core.stats().tokens_prefilled - before
    except errors.Error as error:
        return write("error", "use", name, type(error).__name__, str(error))
    if reply.error is not None:
        return write("error", "reply", name, type(reply.error).__name__, str(reply.error))
    usage, made = reply.usage, replies_of(session)[-1:]
    if computed != usage.prompt_tokens - usage.cached_tokens:
        write("broke", f"{computed} tokens were computed, the reply reports {usage}")
    return write("sent", name, state_of(session), usage.cached_tokens, usage.foreign_tokens, made)


# --- the directories to damage -------------------------------------------------------------------


@dataclass
class Template:
    """A data directory, its sessions, and all turns (id, digest) they ever had."""

    data_dir: Path
    states: dict[str, State] = field(default_factory=dict)
    turns: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # tokens of a reply, if nothing is damaged

    def learn(self, scratch: Path, output: Lines) -> None:
        """Reads the template from the processes that made it and one that visits a copy."""
        data_dir = scratch / "copy"
        shutil.copytree(self.data_dir, data_dir)
        lines, status = in_process(lambda write: visit(data_dir, write, lambda: None, False, True))
        assert status == 0, f"a visit of an undamaged directory: {lines}"
        for kind, name, state, *values in [*output, *lines]:
            assert kind in ("is", "found", "sent"), f"an undamaged directory: {kind} {name} {state}"
            self.turns.setdefault(name, set()).update(state["turns"].items())
            if kind == "found":
                self.states.setdefault(name, state)
            if kind == "sent":
                self.cached[name] = values[0]
        shutil.rmtree(data_dir)


def make_templates(scratch: Path) -> list[Template]:
    """Returns a directory that a killed process left and one that was closed."""
    killed, closed = Template(scratch / "killed"), Template(scratch / "closed")
    output = []
    for act in (begin, go_on):
        lines, status = in_process(lambda write, act=act: act(killed.data_dir, write))  # type: ignore
        assert status == 0, lines
        output += lines
    shutil.copytree(killed.data_dir, closed.data_dir)
    lines, _ = in_process(lambda write: visit(closed.data_dir, write, lambda: None, False, False))
    assert not (closed.data_dir / "sessions.db-wal").exists(), lines
    for template in (killed, closed):
        template.learn(scratch, output)
    return [killed, closed]


def content(path: Path) -> bytes | None:
    """Returns the content of a file, or None without one."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


# --- one case ------------------------------------------------------------------------------------


class DamageCase:
    """Damages a copy of a template and judges what follows."""

    def __init__(self, template: Template, kind: str, name: str, live: bool) -> None:
        self.template, self.kind, self.live = template, kind, live
        self.problems: list[str] = []
        self.outcome = "as it was"
        self._act = data_directory_damage.KINDS[kind][name]
        self._meant: str | None = None  # the session whose row is damaged
        self._emptied = False  # whether there is no database
        self._sent: dict[str, State] = {}  # acknowledged
        self._dropped: set[str] = set()  # whose unfinished reply, output to be damaged
        self._seen: set[str] = set()  # sessions that this process reported

    def run(self, data_dir: Path, rule: ScriptedRule, rng: random.Random) -> None:
        shutil.copytree(self.template.data_dir, data_dir)
        for path in (data_dir, *data_dir.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        seed = rng.getrandbits(32)

        def damage() -> None:
            self._meant = self._act(data_dir, random.Random(seed))

        in_child = self.kind in data_directory_damage.LIVE
        if not in_child:
            damage()
        database = data_dir / "sessions.db"
        before, log = content(database), content(data_dir / "sessions.db-wal")
        self._emptied = not database.exists()
        act = damage if in_child else lambda: None
        lines, status = in_process(lambda write: visit(data_dir, write, act, self.live, True))
        refused = any(line[:2] == ["error", "open"] for line in lines)
        if refused and not in_child and not log and content(database) != before:  # else it goes in
            self.problems.append("the database was refused, and is another one now")
        self._judge(lines, status, rule)
        data_directory_damage.healed(data_dir)
        if self.kind == "place":
            self.kind = "healed"
        lines, status = in_process(lambda write: visit(data_dir, write, lambda: None, False, False))
        self._judge(lines, status, rule)
        self._judge_missing(lines)

    def _judge(self, lines: Lines, status: int, rule: ScriptedRule) -> None:
        self._seen = set()
        if status != 0:
            output = [line[:2] for line in lines[-2:]]
            self.problems.append(f"the process ended with status {status}, after {output}")
        for kind, *values in lines:
            if kind == "broke":
                self.problems.append(values[0])
            elif kind == "error":
                self._judge_error(*values)
            elif kind == "dropped":
                self._dropped.add(values[0])
            elif kind == "found":
                self._judge_state(*values, rule=rule)
            elif kind == "sent":
                self._judge_sent(*values, rule=rule)

    def _judge_error(self, where: str, name: str, kind: str, text: str) -> None:
        """Checks that an error is clear and concerns the damaged session."""
        self.outcome = f"{where}: {kind}"
        self._seen.update([name] if name else SESSIONS)
        here = name in ("", self._meant) if self.kind == "rows" else True
        clear = kind in CLEAR or "too many files are open" in text
        if not clear or self.kind in ("pages", "healed") or not here:
            self.problems.append(f"{where} {name}: {kind}: {text}")

    def _judge_state(
        self, name: str, state: State, replies: list[dict[str, Any]], rule: ScriptedRule
    ) -> None:
        self._seen.add(name)
        self._judge_replies(name, replies, rule)
        turns = state["turns"].items()
        if self.kind == "log" and name not in self._sent:
            new = [i for i, turn in turns if (i, turn) not in self.template.turns[name]]
            if len(new) > (name == SESSIONS[-1]):  # whose unfinished reply may be shorter
                self.problems.append(f"session {name}: turns {new} are from nowhere")
            if state != self.template.states[name]:
                self.outcome = "as it was before"
            return
        expected = self._sent.get(name, self.template.states[name])
        there = [*expected["turns"].items()]
        if name in self._dropped and name == self._meant and name not in self._sent:
            there = there[:-2]  # without the question and what there was of its reply
        lost = [i for i, turn in there if state["turns"].get(i) != turn]
        more = len(turns) - len(there) + len(lost)
        if lost or more not in ((0, 2) if name not in self._sent else (0,)):
            self.problems.append(f"session {name}: turns {lost} are lost or changed, {more} new")

    def _judge_sent(
        self, name: str, state: State, cached: int, foreign: int, replies: Any, rule: ScriptedRule
    ) -> None:
        self._sent[name] = state
        self._judge_replies(name, replies, rule)
        if foreign:
            self.outcome = "used, and output so"
        elif cached < self.template.cached[name]:
            self.outcome = "computed again"

    def _judge_replies(self, name: str, replies: Any, rule: ScriptedRule) -> None:
        for reply in replies:
            wrong = rule.wrong(reply["prompt"], reply["ids"], reply["settings"])
            if wrong is not None:
                self.problems.append(f"session {name}, a reply: {wrong}")

    def _judge_missing(self, lines: Lines) -> None:
        """Checks a missing session: its file was removed, or `verify()` reports why."""
        missing = set(SESSIONS) - self._seen
        if not missing:
            return
        self.outcome = "not listed"
        wrong = [problem for kind, *values in lines if kind == "verified" for problem in values[0]]
        if not wrong and not self._emptied and missing != {self._meant}:
            self.problems.append(f"sessions {sorted(missing)} are gone, and no message reports it")


class StressRun:
    """Runs cases of all kinds in turn and collects their `failures`."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self.failures: list[str] = []
        self.outcomes: dict[str, Counter[str]] = {
            kind: Counter() for kind in data_directory_damage.KINDS
        }
        self._seed, self._scratch = seed, scratch
        self._rule = ScriptedRule(chatter.VOCAB, EOS)
        self._templates = make_templates(scratch)

    def run(self, numbers: range, only: str | None = None) -> None:
        for number in numbers:
            self.run_one(number, only)

    def run_one(self, number: int, only: str | None = None) -> None:
        rng = random.Random(f"{self._seed} {number}")
        kind = rng.choices([*data_directory_damage.KINDS], weights=[35, 25, 10, 10, 20])[0]
        name = rng.choice([*data_directory_damage.KINDS[kind]])
        if only is not None:
            kind, name = next(
                (k, only) for k, acts in data_directory_damage.KINDS.items() if only in acts
            )
        live = kind in data_directory_damage.LIVE and rng.random() < 0.5
        case = DamageCase(rng.choice(self._templates), kind, name, live)
        data_dir = self._scratch / f"data {number}"
        case.run(data_dir, self._rule, rng)
        shutil.rmtree(data_dir)
        self.outcomes[kind][case.outcome] += 1
        when = ", live" if live else ""
        self.failures += [f"case {number}, {name}{when}: {p}" for p in case.problems]


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="cases")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the name of one damage")
    options = parser.parse_args()
    chatter.warm_up()
    scratch, begun = Path(tempfile.mkdtemp(prefix="data-mutations-")), time.monotonic()
    scratch.chmod(0o755)  # for the user whom `read_only` switches to
    cases = StressRun(options.seed, scratch)
    for number in range(options.first, options.first + options.count):
        failures = len(cases.failures)
        cases.run_one(number, options.only)
        print(*cases.failures[failures:], sep="\n", end="\n" * (len(cases.failures) > failures))
    shutil.rmtree(scratch)
    for kind, outcomes in cases.outcomes.items():
        print(f"{kind}: {dict(outcomes.most_common())}")
    print(
        f"data_directory_mutations: N {options.count}, seed {options.seed}, "
        f"failures {len(cases.failures)}, "
        f"95 % bound {3 / options.count:.2g}; {time.monotonic() - begun:.0f} s"
    )
    return bool(cases.failures)


if __name__ == "__main__":
    sys.exit(main())
