"""Kills a process with SIGKILL in the middle of a chat, and looks whether anything seen is lost.

    python tests/trials/session_kill.py --trials 10000 --seed 1
    python tests/trials/session_kill.py --trials 500 --seed 1 --real

Everything is real (store, journal, engine, page files, session code) but the arithmetic: the tokens
come from a model that checks every page it reads. A child, forked from a warm parent, chats,
edits, forks, undoes, stops and closes; it tells the parent through a pipe what it begins, what it
shows and what was acknowledged. After the kill another child opens the same home: every session
must be as it was before or after the step under way, with all text that was shown, and every reply
must be what the model says to its prompt. With --real each child is a fresh process with the model
that ships.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import conftest  # noqa: E402, F401 - maps cli/ where nothing is installed
import lmchat.engine as engine_module  # noqa: E402
import turbomind.engine as core_module  # noqa: E402
from lmchat.bundled import FOLDER  # noqa: E402
from lmchat.state import State as State_  # noqa: E402
from lmchat.text.template import ChatTemplate  # noqa: E402
from lmchat.text.tokenizer import Tokenizer  # noqa: E402
from turbomind import _C  # noqa: E402
from turbomind.params import SAMPLING  # noqa: E402

TRIALS_PER_HOME = 25
LONGEST = 0.12  # seconds from the child's first step to the kill
LONGEST_REAL = 0.4
SESSIONS = ("a", "b", "c")
SETTINGS: dict[str, Any] = {"max_new_tokens": 70, "seed": 5, "temperature": 0.9}
VOCAB = 4096

State = dict[str, Any]  # {"rest": of the session, "leaf": id, "turns": {id: of the turn}}, digests
World = dict[str, State]  # by session name


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def state_of(session: Any) -> State:
    """All of a session that must not change by a kill; as JSON gives it back."""
    record = session._record
    turns = {
        str(t.id): digest((t.parent, t.role, t.text, t.token_ids, t.keep, t.finish_reason))
        for t in record.tree
    }
    rest = digest((record.pinned, sorted(record.settings.items())))
    return {"rest": rest, "leaf": record.leaf, "turns": turns}


def opened(home: Path) -> Any:
    """A chat engine on the home; its pool is smaller than what the sessions have together."""
    options = {"threads": 1, "cache_pages": 40, "max_batch_size": 4, "disk_quota": "64MiB"}
    return engine_module.ChatEngine(None, store=home, **options)


def warm_up() -> None:
    """What every child needs, loaded once; the model without arithmetic in the real one's place."""
    tokenizer, template = Tokenizer.from_folder(FOLDER), ChatTemplate.from_folder(FOLDER)
    engine_module.Tokenizer.from_folder = staticmethod(lambda _folder: tokenizer)  # type: ignore
    engine_module.ChatTemplate.from_folder = staticmethod(lambda _folder: template)  # type: ignore
    core_module.load = lambda *_args, **_options: _C.test_scripted_model(VOCAB, 2048, 1, 150)


# --- the child that is killed -------------------------------------------------------------------


class Chatter:
    """Random verbs on a few sessions; every line it writes is something a user could have seen."""

    def __init__(self, engine: Any, rng: random.Random, write: Callable[[list[Any]], None]) -> None:
        self.engine, self.rng, self.write = engine, rng, write
        self.steps = 0

    def run(self) -> None:
        """Until it is killed."""
        verbs = [
            self.send, self.send, self.send, self.edit, self.retry, self.continue_, self.undo,
            self.switch, self.fork, self.set, self.pin, self.close, self.delete, self.collect,
        ]  # fmt: skip
        while True:
            name = self.rng.choice(SESSIONS)
            verb = self.rng.choice(verbs)
            with contextlib.suppress(engine_module.NotFound, engine_module.InvalidRequest):
                session = self.engine.session(name)
                self.write(["is", name, state_of(session)])
                self.write(["begins", verb.__name__, name])
                verb(session)
                if session.state is not State_.CLOSED:
                    self.write(["is", name, state_of(session)])
            self.write(["done"])

    def _show(self, session: Any, start: Callable[[], Any]) -> None:
        with start() as stream:
            limit = self.rng.choice((3, 30, 1000))
            for count, part in enumerate(stream):
                self.write(["shows", part])
                if count == limit:
                    break

    def _words(self) -> str:
        words = (
            "the lamp by the quiet river keeps its light until the last boat has come home".split()
        )
        return " ".join(self.rng.choices(words, k=self.rng.choice((2, 10, 60))))

    def send(self, session: Any) -> None:
        if session.length > 1200:
            session.undo()
            self.write(["is", session.name, state_of(session)])
        text = self._words()
        self._show(session, lambda: session.stream(text, **SETTINGS))

    def edit(self, session: Any) -> None:
        users = [t for t in session.turns if t.role == "user"]
        if users:
            turn, text = self.rng.randrange(len(users)), self._words()
            self._show(session, lambda: session.edit(turn, text, stream=True, **SETTINGS))

    def retry(self, session: Any) -> None:
        self._show(session, lambda: session.retry(stream=True))

    def continue_(self, session: Any) -> None:
        if session.length < 1500:
            self._show(session, lambda: session.continue_(stream=True, max_new_tokens=40))

    def undo(self, session: Any) -> None:
        session.undo()

    def switch(self, session: Any) -> None:
        turn = self.rng.randrange(max(1, len(session.turns) // 2))
        session.switch(turn, self.rng.randrange(len(session.branches(turn)) or 1))

    def fork(self, session: Any) -> None:
        name = self.rng.choice(SESSIONS)
        if name != session.name:
            with contextlib.suppress(engine_module.NotFound):
                self.engine.delete(name)
            self.write(["gone", name])
            self.write(["is", name, state_of(session.fork(name))])

    def set(self, session: Any) -> None:
        session.set(top_k=self.rng.randrange(1, 50))

    def pin(self, session: Any) -> None:
        session.pin(self.rng.random() < 0.5)

    def close(self, session: Any) -> None:
        session.close()

    def delete(self, session: Any) -> None:
        if self.rng.random() < 0.2:
            session.delete()
            self.write(["gone", session.name])

    def collect(self, _session: Any) -> None:
        """Compaction of the page files."""
        if self.engine.core.stats().pages_total:
            self.engine.core.refresh_pages()


def chat(home: Path, seed: int, out: int) -> None:
    """The child: chats until it is killed."""

    def write(line: list[Any]) -> None:
        os.write(out, (json.dumps(line) + "\n").encode())

    engine = opened(home)
    for name in SESSIONS:  # what the last kill left is mended here
        with contextlib.suppress(engine_module.NotFound):
            write(["is", name, state_of(engine.session(name))])
    write(["ready"])
    Chatter(engine, random.Random(seed), write).run()


# --- the child that looks -----------------------------------------------------------------------


def look(home: Path, out: int) -> None:
    """Opens all sessions and says what they are, and whether each reply is what the model says."""
    with opened(home) as engine:
        found: dict[str, Any] = {}
        for info in engine.sessions():
            session = engine.session(info.name)
            turns = [t for t in session._record.tree if t.role == "assistant"]
            found[info.name] = {
                "state": state_of(session),
                "replies": [t.text for t in turns],
                "wrong": [problem for t in turns for problem in wrong_tokens(engine, session, t)],
            }
            last = session.turns[-1] if session.turns else None
            if last is not None and last.finish_reason == "interrupted":
                session.continue_(max_new_tokens=10)
                found[info.name]["wrong"] += wrong_tokens(engine, session, session.turns[-1])
            found[info.name]["after"] = state_of(session)
        engine.core.check_invariants()
    os.write(out, (json.dumps(found) + "\n").encode())


def wrong_tokens(engine: Any, session: Any, turn: Any) -> list[str]:
    """Compares the last reply of each branch with a request of its own that uses no kept pages."""
    tree = session._record.tree
    ids = tree.token_ids(turn.id)
    prompt, reply = ids[: turn.keep], ids[turn.keep :]
    if not reply or (random.random() < 0.7 and turn.finish_reason != "interrupted"):
        return []
    left = ("max_new_tokens", "min_new_tokens")
    params = {k: v for k, v in turn.settings.items() if k in SAMPLING and k not in left}
    salt = f"fresh {turn.id}"  # no page is shared with anybody
    wanted = engine.core.generate(prompt, max_new_tokens=len(reply), salt=salt, **params)
    expected = list(wanted.token_ids)
    if wanted.finish_reason == "stop" and len(expected) < len(reply):
        expected.pop()  # continue_ went on behind this stop token, which it took off
        reply = reply[: len(expected)]
    if expected == list(reply):
        return []
    where = f"{session.name} turn {turn.id}"
    return [f"{where}: {list(reply)[:8]}..., expected {expected[:8]}..."]


# --- the parent ---------------------------------------------------------------------------------


@contextlib.contextmanager
def child(work: Callable[[int], None], command: list[str], real: bool) -> Iterator[tuple[int, int]]:
    """(its pid, the pipe it writes to)."""
    reading, writing = os.pipe()
    if real:
        os.set_inheritable(writing, True)
        process = subprocess.Popen([*command, "--out", str(writing)], close_fds=False)
        pid = process.pid
    else:
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                work(writing)
            except BaseException as error:
                os.write(writing, (json.dumps(["error", repr(error)]) + "\n").encode())
            os._exit(0)
    os.close(writing)
    try:
        yield pid, reading
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def read_until(reading: int, deadline: float, until: bytes | None = None) -> bytes:
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        more = os.read(reading, 1 << 16)
        if not more:
            break
        data += more
        if until is not None and until in data:
            break
    return data


def drain(reading: int) -> bytes:
    data = b""
    while more := os.read(reading, 1 << 16):
        data += more
    return data


class Trials:
    """Kills and looks; `failures` tell what was lost."""

    def __init__(self, seed: int, real: bool) -> None:
        self.rng = random.Random(seed)
        self.real = real
        self.seed = seed
        self.failures: list[str] = []
        self.under_way: dict[str, int] = {}

    def run(self, count: int) -> None:
        home = Path(tempfile.mkdtemp(prefix="kill-"))
        known: World = {}
        for trial in range(count):
            if trial % TRIALS_PER_HOME == 0:
                shutil.rmtree(home, ignore_errors=True)
                home.mkdir()
                known = {}
            known = self._trial(home, trial, known)
        shutil.rmtree(home, ignore_errors=True)

    def _command(self, home: Path, what: str, seed: int) -> list[str]:
        return [sys.executable, __file__, "--child", what, "--home", str(home), "--seed", str(seed)]

    def _trial(self, home: Path, trial: int, known: World) -> World:
        seed = self.rng.randrange(1 << 30)
        wait = self.rng.random() ** 2 * (LONGEST_REAL if self.real else LONGEST)
        with child(
            lambda out: chat(home, seed, out), self._command(home, "chat", seed), self.real
        ) as (pid, reading):
            data = read_until(reading, time.monotonic() + 60, b'["ready"]\n')
            data += read_until(reading, time.monotonic() + wait)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            data += drain(reading)
        lines = [
            json.loads(line)
            for line in data.decode().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        with child(lambda out: look(home, out), self._command(home, "look", 0), self.real) as (
            _pid,
            reading,
        ):
            seen = read_until(reading, time.monotonic() + 60, b"\n")
        try:
            found = json.loads(seen)
        except ValueError:
            found = ["error", "no answer"]
        if not isinstance(found, dict):
            self.failures.append(f"trial {trial} (seed {seed}): cannot be opened: {found}")
            return {}
        for problem in judged(lines, found, known):
            self.failures.append(f"trial {trial} (seed {seed}): {problem}")
        verb = last_step(lines)[0]
        self.under_way[verb] = self.under_way.get(verb, 0) + 1
        return {name: state["after"] for name, state in found.items()}


def last_step(lines: list[Any]) -> tuple[str, str, str, World]:
    """(the verb under way, its session, the text it has shown, what was acknowledged before)."""
    verb, name, shown = "none", "", ""
    states: World = {}
    for kind, *values in lines:
        if kind == "is":
            states[values[0]] = values[1]
        elif kind == "begins":
            verb, name, shown = values[0], values[1], ""
        elif kind == "shows":
            shown += values[0]
        elif kind == "gone":
            states.pop(values[0], None)
        elif kind == "done":
            verb, name, shown = "none", "", ""
    return verb, name, shown, states


def judged(lines: list[Any], found: dict[str, Any], known: World) -> list[str]:
    """What is not as it must be."""
    problems = [f"the child: {values}" for kind, *values in lines if kind == "error"]
    verb, name, shown, states = last_step(lines)
    gone = {values[0] for kind, *values in lines if kind == "gone"}
    before = {**{k: v for k, v in known.items() if k not in gone}, **states}
    for other, state in before.items():
        if other not in found:
            if verb not in ("delete", "fork"):  # which deletes its target first
                problems.append(f"session {other} is gone")
        elif other != name:
            if found[other]["state"] != state and verb != "fork":
                problems.append(f"session {other} is not as it was acknowledged")
        else:
            problems += changed(verb, name, state, found[name]["state"])
    for state in found.values():
        problems += state["wrong"]
    if shown and name not in found:
        problems.append(f"{verb} on {name}: the session is gone with what it has shown")
    elif shown and not any(shown in text for text in found[name]["replies"]):
        problems.append(f"{verb} on {name}: shown text is missing: {shown!r}")
    return problems


def changed(verb: str, name: str, old: State, new: State) -> list[str]:
    """What a verb that was cut off must not have done to its session."""
    if verb in ("undo", "switch", "none", "close"):
        same = new["turns"] == old["turns"] and new["rest"] == old["rest"]
        return [] if same else [f"{verb}: session {name} is not as it was acknowledged"]
    grown = {str(old["leaf"])} if verb == "continue_" else set()
    lost = [i for i, turn in old["turns"].items() if i not in grown and new["turns"].get(i) != turn]
    problems = [f"{verb} on {name}: turn {i} is lost or changed" for i in lost]
    more = len(new["turns"]) - len(old["turns"])
    if more not in (0, 1, 2):
        problems.append(f"{verb} on {name}: {more} turns came")
    return problems


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="fresh processes, the model that ships")
    parser.add_argument("--child", choices=("chat", "look"), help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "chat":
        chat(options.home, options.seed, options.out)
        return
    if options.child == "look":
        look(options.home, options.out)
        return
    if not options.real:
        warm_up()
        assert threading.active_count() == 1, "a parent with threads cannot fork"
    trials, begun = Trials(options.seed, options.real), time.monotonic()
    trials.run(options.trials)
    for failure in trials.failures[:20]:
        print(failure)
    print(
        f"{options.trials} kills, seed {options.seed}: {len(trials.failures)} failures"
        + (f", so below {3 / options.trials:.1e} each (95 %)" if not trials.failures else "")
        + f"; under way: {dict(sorted(trials.under_way.items()))}; "
        f"{time.monotonic() - begun:.0f} s"
    )
    sys.exit(bool(trials.failures))


if __name__ == "__main__":
    main()
