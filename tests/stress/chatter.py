"""A process that chats until it is killed, and reports everything that a user could have seen.

It writes lines of JSON into a pipe: ["found", name, session] for each session when the data
directory is opened, then ["looked"]. For each random verb follow ["begins", verb, name, other],
["shows", text], ["is", name, state], ["gone", name] and ["done"].
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmchat.engine as engine_module
import lmchat.store.sqlite.sqlite_store
import turbomind.engine.plan as plan_module
from lmchat.bundled import FOLDER
from lmchat.generation.state import State as State_
from lmchat.text.model_text import ModelText
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind import _C
from turbomind.engine.pages import PageStore

VOCAB = 4096
SESSIONS = ("a", "b", "c")
QUOTA = "2MiB"  # of pages on disk, so that some are evicted
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 70, "seed": 5, "temperature": 0.9, "stop_token_ids": [*range(3, VOCAB, 64)],
}  # fmt: skip

State = dict[str, Any]  # {"rest": digest, "leaf": id, "tokens": count, "turns": {id: digest}}
Write = Callable[[list[Any]], None]


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def state_of(session: Any) -> State:
    """Returns what a kill must not change in a session, in types that JSON preserves."""
    record = session._record
    turns = {
        str(t.id): digest((t.parent, t.role, t.text, t.token_ids, t.prefix_length, t.finish_reason))
        for t in record.tree
    }
    rest = digest((record.pinned, sorted(record.settings.items())))
    tokens = 0 if record.leaf is None else record.tree.get(record.leaf).length
    return {"rest": rest, "leaf": record.leaf, "tokens": tokens, "turns": turns}


def replies_of(session: Any) -> list[dict[str, Any]]:
    """Returns the text of each reply with its prompt, for `ScriptedRule.wrong`."""
    tree = session._record.tree
    replies = []
    for turn in tree:
        if turn.role == "assistant":
            prompt = tree.token_ids(turn.id)[: turn.prefix_length]
            replies.append(
                {"text": turn.text, "prompt": prompt, "ids": turn.token_ids,
                 "settings": dict(turn.settings), "ended": turn.finish_reason,
                 "loaded": turn.usage.loaded_tokens}
            )  # fmt: skip
    return replies


def opened(data_dir: Path, **options: Any) -> Any:
    """Opens a chat engine on the directory. Its pool is too small for all sessions together."""
    options = {"cache_pages": 40, "max_batch_size": 4, "disk_quota": QUOTA, **options}
    return engine_module.ChatEngine(None, store=data_dir, threads=1, **options)


def warm_up() -> None:
    """Loads once what every child needs, and puts the scripted model in place of the real one."""
    text = ModelText(Tokenizer.from_folder(FOLDER), ChatTemplate.from_folder(FOLDER))
    engine_module.read_text = lambda _info: text
    plan_module.load = lambda *_args, **_options: _C.test_scripted_model(VOCAB, 2048, 1, 150)
    assert lmchat.store.sqlite.sqlite_store  # the engine would load it in every child
    gc.freeze()  # a collection in a child would copy what it shares with its parent


def chat(data_dir: Path, seed: int, out: int) -> None:
    """Reports what the last kill left, then chats until it is killed."""
    chatter = Chatter(data_dir, seed, out)
    chatter.look()
    chatter.go_on()
    while True:
        chatter.step()


def look(data_dir: Path, _seed: int, out: int) -> None:
    """Reports all sessions, then closes the engine in order."""
    chatter = Chatter(data_dir, 0, out)
    chatter.look()
    chatter.engine.core.check_invariants()
    chatter.engine.close()
    chatter.write(["closed"])


class Chatter:
    """Runs random verbs on a few sessions. A user could have seen every line it writes."""

    def __init__(self, data_dir: Path, seed: int, out: int) -> None:
        self.data_dir, self.rng, self.out = data_dir, random.Random(seed), out
        self.engine = opened(data_dir)
        self.verbs = [
            self.send, self.send, self.send, self.edit, self.retry, self.continue_, self.undo,
            self.switch, self.fork, self.set, self.pin, self.close, self.delete, self.reopen,
            self.compact, self.compact, self.compact,
        ]  # fmt: skip

    def write(self, line: list[Any]) -> None:
        os.write(self.out, (json.dumps(line) + "\n").encode())

    def look(self) -> None:
        """Opens all sessions, which recovers what a kill left, and reports their states."""
        for info in self.engine.sessions():
            session = self.engine.session(info.name)
            found = {"state": state_of(session), "replies": replies_of(session)}
            self.write(["found", info.name, found])
        self.write(["looked"])

    def go_on(self) -> None:
        """Continues the interrupted replies."""
        for info in self.engine.sessions():
            session = self.engine.session(info.name)
            if session.interrupted:
                self.step(info.name, self.continue_)

    def step(self, name: str | None = None, verb: Callable[[Any], None] | None = None) -> None:
        """Runs one verb: a random one unless it is given."""
        name, verb = name or self.rng.choice(SESSIONS), verb or self.rng.choice(self.verbs)
        other = self.rng.choice(SESSIONS)
        self.other = other if verb == self.fork and other != name else None
        with contextlib.suppress(lmchat.NotFound, lmchat.InvalidRequest):
            session = self.engine.session(name)
            self.write(["is", name, state_of(session)])
            self.write(["begins", verb.__name__, name, self.other])
            verb(session)
            if session.state is not State_.CLOSED:
                self.write(["is", name, state_of(session)])
        self.write(["done"])

    # --- verbs -------------------------------------------------------------------------------

    def _show(self, start: Callable[[], Any]) -> None:
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
            return session.undo()
        text = self._words()
        return self._show(lambda: session.stream(text, **SETTINGS))

    def edit(self, session: Any) -> None:
        users = [t for t in session.turns if t.role == "user"]
        if users:
            turn, text = self.rng.randrange(len(users)), self._words()
            self._show(lambda: session.stream_edit(turn, text, **SETTINGS))

    def retry(self, session: Any) -> None:
        self._show(lambda: session.stream_retry(**SETTINGS))

    def continue_(self, session: Any) -> None:
        if session.length < 1500:
            self._show(lambda: session.stream_continue(max_new_tokens=40))

    def undo(self, session: Any) -> None:
        session.undo()

    def switch(self, session: Any) -> None:
        turn = self.rng.randrange(max(1, len(session.turns) // 2))
        session.switch(turn, self.rng.randrange(len(session.branches(turn)) or 1))

    def fork(self, session: Any) -> None:
        if self.other is not None:
            with contextlib.suppress(lmchat.NotFound):
                self.engine.delete(self.other)
                self.write(["gone", self.other])
            self.write(["is", self.other, state_of(session.fork(self.other))])

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

    def compact(self, _session: Any) -> None:
        """Evicts a few pages and compacts segments without an owner, as `sessions gc` does."""
        with PageStore(self.data_dir / "pages", QUOTA) as store:
            keys = [key for key, _ in store.pages()]
            store.remove(self.rng.sample(keys, len(keys) // 8))
            store.maintain()
        self.engine.core.refresh_pages()

    def reopen(self, _session: Any) -> None:
        """Closes the engine in order and opens it again, which is slow."""
        if self.rng.random() < 0.2:
            self.engine.close()
            self.engine = opened(self.data_dir)
