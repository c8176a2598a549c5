"""Archives of sessions to test with: odd ones, their bytes, and zips made by hand."""

import hashlib
import io
import json
import random
import zipfile
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone

from lmchat.archive import (
    ArchivePage,
    write_archive,
)
from lmchat.archive.container import MANIFEST
from lmchat.errors import InternalError
from lmchat.store.memory_store import MemoryStore
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Timings, Turn, Usage

WORDS = ("Kyoto", "naïve", "日本語", "😀", 'a "b"', "c:\\d", "tab\there", "two\nlines", "\x00", " ")


class Store(MemoryStore):
    """The part of a store that a transfer uses."""

    def unfinished(self, record):
        return None


def make_record(seed: int, turns: int = 12) -> SessionRecord:
    """A session with branches, cut pasts, failed replies, and odd texts and settings."""
    rng = random.Random(seed)
    created = datetime(2026, 3, 1, 12, 30, 0, 123456, timezone(timedelta(hours=9)))
    record = SessionRecord(
        name=f"talk {seed}",
        owner="local",
        history="append",
        settings={
            "temperature": 0.7,
            "logit_bias": {5: -1.5, 7: float("-inf")},
            "stop_strings": ["END"],
            "top_k": 40,
            "bad_words": [[1, 2], [3]],
        },
        template_variables={"enable_thinking": False, "z": {"b": [1, 2.5, None], "a": "😀"}},
        tags=("work", "日本"),
        pinned=True,
        own_title="A title",
        fingerprint="f" * 32,
        model="org/model",
        overflow="drop",
        created=created,
        last_used=created + timedelta(days=seed),
    )
    replies = [None]
    if rng.random() < 0.5:
        text = rng.choice(WORDS)
        message = {"role": "system", "content": text}
        system = Turn(record.tree.new_id(), None, "system", text, message)
        record, replies = record.changed([system]), [system.id]
    for _ in range(turns):
        parent = rng.choice(replies[-3:])
        before = record.tree.get(parent).length if parent else 0
        prefix_length = max(0, before - rng.choice((0, 0, 1, 30)))
        user = make_turn(rng, record.tree, parent, "user", prefix_length)
        reply = make_reply(rng, record.tree, user)
        replies.append(reply.id)
        record = record.changed([user, reply], leaf=rng.choice([reply.id, record.leaf]))
    return record


def make_turn(rng, tree, parent, role, prefix_length):
    ids = tuple(rng.randrange(151_936) for _ in range(rng.randrange(1, 90)))
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 9)))
    message = {"role": role, "content": text, "tool_calls": [{"b": 1, "a": [True, None]}]}
    length = prefix_length + len(ids)
    return Turn(tree.new_id(), parent, role, text, message, ids, prefix_length, length)


def make_reply(rng, tree, user):
    return replace(
        make_turn(rng, tree, user.id, "assistant", user.length),
        reasoning=rng.choice(("", "Hm. Kyoto.")),
        finish_reason=rng.choice(("stop", "length", "error")),
        stopped=rng.random() < 0.5,
        error=rng.choice((None, InternalError("no memory"))),
        usage=Usage(rng.randrange(9000), rng.randrange(99), 3, 1, 0),
        timings=Timings(rng.random(), rng.random() / 50, 0.1 + rng.random(), 1e-7, 0.0),
        settings={"seed": rng.randrange(1 << 64), "attempt": 2, "logit_bias": {9: -float("inf")}},
    )


def make_pages(record, seed=0, size=300):
    """Pages of two cache groups for every branch's end."""
    rng = random.Random(seed)
    for turn in sorted(record.tree, key=lambda turn: turn.id):
        if record.tree.children(turn.id):
            continue
        ids = record.tree.token_ids(turn.id)
        for start in range(0, len(ids), 64):
            for group in (0, 1):
                yield ArchivePage(
                    turn.id, start, tuple(ids[start : start + 64]), group, "cpu/avx2/1", 0, 2,
                    rng.randbytes(size),
                )  # fmt: skip


def archive_of(record, pages=None) -> bytes:
    file = io.BytesIO()
    write_archive(file, record, pages)
    return file.getvalue()


def facts(record):
    """Returns all fields that an archive preserves."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    for name in ("id", "owner", "revision", "imported"):
        del found[name]
    turns = [
        replace(turn, error=turn.error and (type(turn.error), str(turn.error)))
        for turn in found.pop("tree")
    ]
    return found, turns


def unzip(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rezip(entries, compression=zipfile.ZIP_STORED, sign=True):
    """An archive of these entries, with a manifest that vouches for them."""
    if sign:
        entries = {name: data for name, data in entries.items() if name != MANIFEST}
        found = [
            {"name": n, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
            for n, d in entries.items()
        ]
        manifest = {"format": "lmchat-archive", "version": 1, "files": found}
        entries[MANIFEST] = json.dumps(manifest).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()
