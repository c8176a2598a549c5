"""Writes the files of this folder: `python tests/data/compatibility/make.py FOLDER`.

Run it with the lmchat whose formats are to be recorded, from the root of its checkout. The newest
lmchat cannot do that for older formats, so what is committed here is never made again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

os.environ["TURBOMIND_ISA"] = "portable"  # every machine computes the same bits
ROOT = Path.cwd()
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from chat_models import chat_model  # noqa: E402

import lmchat  # noqa: E402

MODEL = Path("/tmp/lmchat-compatibility/tiny")  # sessions hold this path as their model's name
OPTIONS = {"threads": 1, "cache_memory": "32MiB"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {0: -100.0, 2: -100.0}}
LONG = {**GREEDY, "max_new_tokens": 500}
SESSIONS = ("journey", "reworded", "trip", "side")
SEARCHES = ("kyoto", "zwei", "temple*", "nothing")
MEMO = ("Hello!", "What is your name?", "Tell me about the sea.")


def main() -> None:
    """Writes all files into the folder that is named on the command line."""
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(MODEL.parent, ignore_errors=True)
    chat_model(MODEL)
    with tempfile.TemporaryDirectory() as path:
        data = Path(path) / "data"
        make_sessions(data)
        kill_a_reply(data)
        pack(out / "data-directory.tar.xz", data)
        facts = observe(data, Path(path), out)
    (MODEL / "model.safetensors").unlink()
    pack(out / "model.tar.xz", MODEL)
    write(out / "expected.json", facts)
    write(out / "memo.json", memo())


def make_sessions(data: Path) -> None:
    """Finished sessions with branches, a system prompt, tags, and each rule for history."""
    with lmchat.ChatEngine(MODEL, store=data, **OPTIONS) as engine:
        chat = engine.session("journey", system="Be brief.", settings=GREEDY, history="append")
        chat.send("Plan a day in Kyoto, and one with children in Nara.")
        chat.send("Two", temperature=1.1, top_k=40, seed=7)
        chat.edit(1, "Zwei")
        chat.retry()
        chat.set_tags(["travel", "日本"])
        chat.title = "A trip to Kyoto"
        chat.pin()
        chat.set_overflow("drop")
        chat.set(presence_penalty=0.25)
        chat.set_variables(loud=True)
        chat.fork("side", at=1).send("naïve café 😀")
        other = engine.session("reworded", history="template", settings=GREEDY)
        other.send("Which temple?")
        other.send("And then?")
        other.undo()


def kill_a_reply(data: Path) -> None:
    """A process dies in the middle of a reply: its journal and its lease stay."""
    script = ROOT / "tests" / "support" / "killed_chat.py"
    arguments = [str(MODEL), str(data), json.dumps(LONG), "20", "One", "Tell me"]
    found = subprocess.run(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == -9, found


def observe(data: Path, folder: Path, out: Path) -> dict[str, Any]:
    """Returns what this lmchat reads from copies of the data directory, and its archives."""
    facts: dict[str, Any] = {"sessions": {}, "searches": {}, "next": {}}
    copy = Path(shutil.copytree(data, folder / "copy"))
    with lmchat.ChatEngine(MODEL, store=copy, **OPTIONS) as engine:
        for word in SEARCHES:
            facts["searches"][word] = sorted(i.name for i in engine.sessions(search=word))
        for name in SESSIONS:
            chat = engine.session(name)
            facts["sessions"][name] = session_facts(chat)
            pages = name in ("journey", "trip")
            chat.export(out / f"{name}.lmchat", pages=pages)
    for name in SESSIONS:
        copy = Path(shutil.copytree(data, folder / f"copy-{name}"))
        with lmchat.ChatEngine(MODEL, store=copy, **OPTIONS) as engine:
            reply = engine.session(name).send("And now?", **GREEDY)
            facts["next"][name] = reply_facts(reply)
    return facts


def session_facts(chat: Any) -> dict[str, Any]:
    """Everything a session shows, as JSON."""
    users = sum(turn.role == "user" for turn in chat.turns)
    return {
        "title": chat.title,
        "system": chat.system,
        "settings": {k: str(v) for k, v in sorted(chat.settings.items())},
        "template_variables": chat.template_variables,
        "tags": list(chat.tags),
        "pinned": chat.pinned,
        "overflow": chat.overflow,
        "history": {"append": "keep"}.get(chat.history, chat.history),
        "notices": list(chat.notices),
        "token_ids": list(chat.token_ids),
        "turns": [[t.id, t.parent, t.role, t.text, t.finish_reason] for t in chat.turns],
        "branches": [len(chat.branches(turn)) for turn in range(users + 1)],
    }


def reply_facts(reply: Any) -> dict[str, Any]:
    """Returns the usage of a turn that loads stored pages."""
    return {
        "token_ids": list(reply.token_ids),
        "notices": list(reply.notices),
        "prompt_tokens": reply.usage.prompt_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "loaded_tokens": reply.usage.loaded_tokens,
        "foreign_tokens": reply.usage.foreign_tokens,
    }


def memo() -> dict[str, Any]:
    """Greedy replies of the model that ships."""
    with lmchat.ChatEngine(store="memory", dtype="float32", threads=1) as engine:
        chat = engine.session()
        replies = [chat.send(text, temperature=0.0, max_new_tokens=40) for text in MEMO]
        return {"messages": list(MEMO), "replies": [list(reply.token_ids) for reply in replies]}


def pack(path: Path, folder: Path) -> None:
    """Packs the contents of a folder; owners and times are not recorded."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(path, "w:xz", preset=9) as archive:
        for child in sorted(folder.iterdir()):
            archive.add(child, child.name, filter=plain)


def write(path: Path, value: object) -> None:
    """Writes JSON that a reader can compare."""
    text = json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
