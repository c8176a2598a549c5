"""Archives of sessions: what goes in comes out, and what does not verify changes nothing."""

import hashlib
import io
import json
import os
import random
import struct
import zipfile
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone

import pytest

from lmchat import errors
from lmchat.archive import (
    ArchivePage,
    export_session,
    import_session,
    json_text,
    read_archive,
    write_archive,
)
from lmchat.archive.container import MANIFEST, SESSION, page_name
from lmchat.archive.document import FORMAT, from_document, to_document
from lmchat.archive.schema import Schema, session_schema
from lmchat.errors import InternalError, InvalidRequest
from lmchat.memory_store import MemoryStore
from lmchat.store import SessionRecord
from lmchat.turns import Timings, Turn, Usage

WORDS = ("Kyoto", "naïve", "日本語", "😀", 'a "b"', "c:\\d", "tab\there", "two\nlines", "\x00", " ")


class Store(MemoryStore):
    """The part of a store that a transfer uses."""

    def unfinished(self, record):
        return None


def make_record(seed: int, turns: int = 12) -> SessionRecord:
    """A session with branches, cut pasts, failed replies, and odd texts and settings."""
    rng = random.Random(seed)
    record = SessionRecord(name=f"talk {seed}", owner="local", history="keep")
    record.settings = {"temperature": 0.7, "logit_bias": {5: -1.5, 7: float("-inf")}}
    record.settings |= {"stop_strings": ["END"], "top_k": 40, "bad_words": [[1, 2], [3]]}
    record.template_variables = {"enable_thinking": False, "z": {"b": [1, 2.5, None], "a": "😀"}}
    record.tags, record.pinned, record.own_title = ("work", "日本"), True, "A title"
    record.fingerprint, record.model, record.overflow = "f" * 32, "org/model", "drop"
    record.created = datetime(2026, 3, 1, 12, 30, 0, 123456, timezone(timedelta(hours=9)))
    record.last_used = record.created + timedelta(days=seed)
    tree, replies = record.tree, [None]
    if rng.random() < 0.5:
        text = rng.choice(WORDS)
        message = {"role": "system", "content": text}
        replies = [tree.add(Turn(tree.new_id(), None, "system", text, message)).id]
    for _ in range(turns):
        parent = rng.choice(replies[-3:])
        before = tree.get(parent).length if parent else 0
        keep = max(0, before - rng.choice((0, 0, 1, 30)))
        user = make_turn(rng, tree, parent, "user", keep)
        replies.append(make_reply(rng, tree, tree.add(user)).id)
        record.leaf = rng.choice([replies[-1], record.leaf])
    return record


def make_turn(rng, tree, parent, role, keep):
    ids = tuple(rng.randrange(151_936) for _ in range(rng.randrange(1, 90)))
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 9)))
    message = {"role": role, "content": text, "tool_calls": [{"b": 1, "a": [True, None]}]}
    length = keep + len(ids)
    return Turn(tree.new_id(), parent, role, text, message, ids, keep, length)


def make_reply(rng, tree, user):
    turn = replace(
        make_turn(rng, tree, user.id, "assistant", user.length),
        reasoning=rng.choice(("", "Hm. Kyoto.")),
        finish_reason=rng.choice(("stop", "length", "error")),
        stopped=rng.random() < 0.5,
        error=rng.choice((None, InternalError("no memory"))),
        usage=Usage(rng.randrange(9000), rng.randrange(99), 3, 1, 0),
        timings=Timings(rng.random(), rng.random() / 50, 0.1 + rng.random(), 1e-7, 0.0),
        settings={"seed": rng.randrange(1 << 64), "attempt": 2, "logit_bias": {9: -float("inf")}},
    )
    return tree.add(turn)


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
    """Everything that an archive promises to keep."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    for name in ("id", "owner", "revision", "imported"):
        del found[name]
    turns = [
        replace(turn, error=turn.error and (type(turn.error), str(turn.error)))
        for turn in found.pop("tree")
    ]
    return found, turns


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_in_comes_out(seed):
    record = make_record(seed)
    data = archive_of(record, make_pages(record))
    archive = read_archive(io.BytesIO(data), owner="else")
    assert facts(archive.record) == facts(record)
    assert archive.record.id != record.id
    assert archive.record.owner == "else"
    assert list(archive.pages) == list(make_pages(record))
    assert archive_of(archive.record, archive.pages) == data
    tree = archive.record.tree
    for turn in tree:
        assert [t.id for t in tree.children(turn.id)] == [
            t.id for t in record.tree.children(turn.id)
        ]
    assert tree.new_id() > max(turn.id for turn in record.tree)


def test_equal_sessions_are_equal_bytes():
    assert archive_of(make_record(3)) == archive_of(make_record(3)) != archive_of(make_record(4))


def test_a_session_without_turns_and_half_characters_come_back(tmp_path):
    record = SessionRecord(name="empty", owner="local", history="template")
    assert facts(read_archive(io.BytesIO(archive_of(record))).record) == facts(record)
    record.own_title = "half \ud83d of a pair"
    write_archive(tmp_path / "a.zip", record)
    assert facts(read_archive(tmp_path / "a.zip").record) == facts(record)


def test_the_document_has_every_field_of_a_session():
    document = to_document(make_record(0))
    own = {field.name for field in fields(SessionRecord)}
    fleeting = {"id", "owner", "revision", "imported", "unanswered", "notices"}
    assert set(document["session"]) == (own - fleeting - {"tree", "own_title"}) | {"title"}
    assert set(document["turns"][-1]) == {field.name for field in fields(Turn)}
    assert set(document["turns"][-1]["usage"]) == {field.name for field in fields(Usage)}
    assert set(document["turns"][-1]["timings"]) == {field.name for field in fields(Timings)}


def test_the_schema_is_what_others_take_it_for():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(open_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    rng = random.Random(5)
    for seed in range(60):
        document = to_document(make_record(seed, turns=2))
        assert not list(validator.iter_errors(document))
        damage_json(rng, document)
        ours = True
        try:
            session_schema().check(document)
        except InvalidRequest:
            ours = False
        assert ours == validator.is_valid(document), document


def open_schema() -> str:
    from importlib.resources import files

    return files("lmchat").joinpath("session.schema.json").read_text(encoding="utf-8")


def test_a_schema_with_an_unknown_keyword_is_refused():
    with pytest.raises(InvalidRequest, match="oneOf"):
        Schema({"properties": {"a": {"oneOf": []}}})


# --- what is refused --------------------------------------------------------------------------


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


def with_document(change, record=None):
    record = record or make_record(1)
    entries = unzip(archive_of(record))
    document = json.loads(entries[SESSION])
    change(document)
    entries[SESSION] = json.dumps(document).encode()
    return rezip(entries)


def put(*path):
    *way, name, value = path

    def change(document):
        for step in way:
            document = document[step]
        document[name] = value

    return change


def remove(*path):
    *way, name = path

    def change(document):
        for step in way:
            document = document[step]
        del document[name]

    return change


DOCUMENTS = [
    (put("version", 2), "version is 2, expected at most 1: a newer lmchat"),
    (put("version", 0), "version is 0"),
    (put("version", True), "version is True"),
    (put("format", "other"), "no archive of a session"),
    (put("more", 1), "it has 'more'"),
    (remove("turns"), "turns is missing"),
    (put("turns", {}), "turns is an object, expected array"),
    (put("session", "name", ""), "session.name is '', expected at least 1"),
    (put("session", "name", "a\nb"), "session name is"),
    (put("session", "name", "\ud800"), "session name is"),
    (put("session", "name", "x" * 201), "expected at most 200"),
    (put("session", "leaf", 999), "leaf is 999"),
    (put("session", "leaf", 1.0), "session.leaf is 1.0, expected integer or null"),
    (put("session", "pinned", 1), "session.pinned is 1, expected boolean"),
    (put("session", "history", "drop"), "session.history is 'drop', expected one of"),
    (put("session", "created", "yesterday"), "session.created is 'yesterday'"),
    (put("session", "created", "2026-13-01T00:00:00.000000+00:00"), "created is"),
    (put("session", "created", "9999-12-01T00:00:00.000000+00:00"), "created is"),
    (put("session", "created", "2026-12-01T00:00:00.000000+00:00\n"), "created is"),
    (put("session", "settings", {"temperature": -1}), "temperature is -1.0, expected"),
    (put("session", "settings", {"sede": 1}), "setting"),
    (put("session", "settings", {"logit_bias": {"x": 1}}), "logit_bias has keys"),
    (put("session", "settings", {"logit_bias": {"1": "x"}}), "logit_bias.1 is 'x'"),
    (put("session", "settings", {"logit_bias": {"1": 0, "01": 1}}), "twice"),
    (put("session", "template_variables", [1]), "template_variables is a list"),
    (put("turns", 0, "id", 0), r"turns\[0\].id is 0, expected at least 1"),
    (put("turns", 1, "id", 1), "turn 1 follows turn 1"),
    (put("turns", 0, "id", 1 << 40), "expected at most 2147483647"),
    (put("turns", 0, "parent", 2), "turn 1 has the parent 2, expected a turn before it"),
    (put("turns", 0, "parent", 1), "turn 1 has the parent 1, expected a turn before it"),
    (put("turns", 1, "parent", 77), "turn 2 has the parent 77"),
    (put("turns", 1, "parent", None), "turn 2 keeps|is a reply to none"),
    (put("turns", 1, "role", "user"), "turn 2 has error, but is no reply"),
    (put("turns", 1, "keep", 1 << 20), "turn 2 keeps 1048576 tokens of"),
    (put("turns", 1, "keep", -1), "keep is -1, expected at least 0"),
    (put("turns", 1, "length", 7), "turn 2 has the length 7, expected"),
    (put("turns", 1, "token_ids", [1, -2]), r"token_ids\[1\] is -2, expected at least 0"),
    (put("turns", 1, "token_ids", [1, 1 << 31]), r"token_ids\[1\] is 2147483648"),
    (put("turns", 1, "token_ids", [1, True]), r"token_ids\[1\] is True, expected integer"),
    (put("turns", 1, "token_ids", [1, "2"]), r"token_ids\[1\] is '2', expected integer"),
    (put("turns", 1, "settings", "attempt", "x"), "settings.attempt is 'x', expected integer"),
    (put("turns", 1, "settings", "seed", 1 << 64), "settings.seed is"),
    (put("turns", 1, "usage", "prompt_tokens", -1), "usage.prompt_tokens is -1"),
    (put("turns", 1, "usage", "xyz", 1), "usage of turn 2 has 'xyz'"),
    (put("turns", 1, "timings", "ttft", float("nan")), "NaN is no JSON"),
    (put("turns", 1, "timings", "ttft", float("inf")), "Infinity is no JSON"),
    (put("turns", 1, "error", {"type": "SystemExit", "message": ""}), "'SystemExit'"),
    (put("turns", 1, "error", {"type": "__name__", "message": ""}), "'__name__'"),
    (remove("turns", 1, "usage"), "turn 2 has no usage"),
    (put("turns", 1, "text", None), "text is None, expected string"),
    (put("turns", 1, "message", "x"), "message is 'x', expected object"),
]


@pytest.mark.parametrize(("change", "message"), DOCUMENTS)
def test_a_document_that_is_wrong_is_refused(change, message):
    record = make_record(2, turns=2)
    assert record.tree.get(1).role == "user"
    with pytest.raises(InvalidRequest, match=message):
        read_archive(io.BytesIO(with_document(change, record)))


def with_text(change):
    entries = unzip(archive_of(make_record(1)))
    entries[SESSION] = change(entries[SESSION])
    return rezip(entries)


DEEP = b'{"format": "lmchat-session", "version": 1, "turns": ' + b"[" * 200_000
TEXTS = [
    (lambda t: b"", "not valid JSON"),
    (lambda t: b"\xff" + t, "not valid JSON"),
    (lambda t: b"\xef\xbb\xbf" + t, "not valid JSON"),
    (lambda t: t[:-1], "not valid JSON"),
    (lambda t: t.replace(b'"pinned":', b'"pinned":true,"pinned":'), "a key stands twice"),
    (lambda t: t.replace(b'"leaf":', b'"leaf":1e999,"x":'), "out of range"),
    (lambda t: t.replace(b'"leaf":', b'"x":1' + b"0" * 5000 + b',"leaf":'), "5001 digits"),
    (lambda t: DEEP, "nested too deeply"),
    (lambda t: DEEP[:100] + b"[" * 70 + b"]" * 200, "nested too deeply|not valid JSON"),
    (lambda t: t.replace(b'"a":"', b'"a":' + b'{"a":' * 70 + b"1" + b"}" * 70 + b',"c":"'), "nest"),
    (lambda t: b"[1]", "no archive of a session"),
    (lambda t: b"null", "no archive of a session"),
]


@pytest.mark.parametrize(("change", "message"), TEXTS)
def test_a_text_that_is_no_good_json_is_refused(change, message):
    with pytest.raises(InvalidRequest, match=message):
        read_archive(io.BytesIO(with_text(change)))


def sparse_bomb():
    entry = zipfile.ZipInfo(SESSION)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(entry, b" " * (20 << 20), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def lying_about_its_size():
    """Says that it unpacks to little, and unpacks to much."""
    data = bytearray(rezip(unzip(archive_of(make_record(1))), zipfile.ZIP_DEFLATED))
    for at in (data.find(b"PK\1\2") + 24, 22):
        struct.pack_into("<I", data, at, 100)
    return bytes(data)


def overlapping():
    """Two entries of the directory point to the same data."""
    data = bytearray(archive_of(make_record(1), make_pages(make_record(1))))
    first, second = (data.rindex(page_name(i).encode()) - 46 for i in (0, 1))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    return bytes(data)


def with_entry(name, data=b"x", **more):
    def make():
        return rezip({**unzip(archive_of(make_record(1))), name: data}, **more)

    return make


def twice():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(SESSION, "1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(SESSION, "2")
    return file.getvalue()


def encrypted():
    data = bytearray(archive_of(make_record(1)))
    at = data.index(b"PK\1\2")
    data[6] |= 1
    data[at + 8] |= 1
    return bytes(data)


def long_directory():
    data = bytearray(archive_of(make_record(1)))
    struct.pack_into("<I", data, len(data) - 10, 1 << 30)
    return bytes(data)


ZIPS = {
    "empty": (lambda: b"", "does not end as a zip"),
    "no zip": (lambda: b"x" * 1000, "does not end as a zip"),
    "cut": (lambda: archive_of(make_record(1))[:-5], "does not end as a zip"),
    "tail": (lambda: archive_of(make_record(1)) + b"x", "does not end as a zip"),
    "bomb": (sparse_bomb, "unpacks to 20,971,520 bytes"),
    "lies": (lying_about_its_size, "cannot be read|has 100 bytes|is not what"),
    "overlap": (overlapping, "overlap"),
    "traversal": (with_entry("../../x"), r"an entry '../../x'"),
    "absolute": (with_entry("/etc/x"), "an entry '/etc/x'"),
    "folder": (with_entry("pages/"), "an entry 'pages/'"),
    "backslash": (with_entry("pages\\00000000.page"), "an entry"),
    "unicode digits": (with_entry("pages/0000000٣.page"), "an entry"),
    "gap": (with_entry(page_name(7)), "not those of the manifest"),
    "unsigned": (with_entry(page_name(0), sign=False), "not those of the manifest"),
    "twice": (twice, "stands in it twice"),
    "encrypted": (encrypted, "encrypted"),
    "lzma": (with_entry(SESSION, compression=zipfile.ZIP_LZMA), "packed in a way"),
    "long directory": (long_directory, "its list of entries has 1,073,741,824 bytes"),
    "no session": (lambda: rezip({}), "not those of the manifest"),
    "no manifest": (lambda: rezip({SESSION: b"{}"}, sign=False), "has no manifest.json"),
    "new": (
        lambda: rezip({SESSION: b"{}", MANIFEST: b'{"version": 2}'}, sign=False),
        "version is 2, expected 1: a newer",
    ),
}


@pytest.mark.parametrize("name", ZIPS)
def test_another_zip_is_refused(name, tmp_path):
    make, message = ZIPS[name]
    path = tmp_path / "a.zip"
    path.write_bytes(make())
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_archive(path)
    assert str(caught.value).startswith(str(path))


def test_limits_hold_before_anything_is_unpacked(monkeypatch):
    from lmchat.archive import container

    record = make_record(1)
    data = archive_of(record, make_pages(record))
    monkeypatch.setattr(container, "MAX_JSON", 500)
    with pytest.raises(InvalidRequest, match="expected at most 500"):
        read_archive(io.BytesIO(data))
    with pytest.raises(InvalidRequest, match="expected at most 500"):
        archive_of(record)
    monkeypatch.undo()
    monkeypatch.setattr(container, "MAX_PAGES", 2)
    with pytest.raises(InvalidRequest, match="more than 2 pages"):
        archive_of(record, make_pages(record))


def test_a_packed_archive_is_read_too():
    record = make_record(1)
    packed = rezip(unzip(archive_of(record)), zipfile.ZIP_DEFLATED)
    assert facts(read_archive(io.BytesIO(packed)).record) == facts(record)


def test_a_changed_entry_is_refused_though_its_zip_is_good():
    record = make_record(1)
    entries = unzip(archive_of(record, make_pages(record)))
    for name in (SESSION, page_name(3)):
        changed = {**entries, name: entries[name].replace(b"1", b"2", 1)}
        with pytest.raises(InvalidRequest, match=f"{name} is not what the manifest says"):
            read_archive(io.BytesIO(rezip(changed, sign=False)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turn": 999}, "it is of turn 999"),
        ({"start": 32}, "amid a page"),
        ({"start": 64 * 500, "token_ids": (1,)}, "has other tokens"),
        ({"token_ids": (1, 2, 3)}, "has other tokens"),
        ({"token_ids": ()}, "holds nothing"),
        ({"token_ids": tuple(range(65))}, "has 65 entries"),
        ({"heads": -1}, "heads is -1|heads"),
        ({"payload": b""}, "does not begin with a line"),
        ({"numerics": "x" * 2000}, "numerics"),
        ({"group": -1}, "group is -1|follows"),
    ],
)
def test_a_page_that_is_not_the_sessions_is_refused(changes, message):
    record = make_record(1)
    pages = list(make_pages(record))
    entries = unzip(archive_of(record, pages))
    entries[page_name(0)] = replace(pages[0], **changes).to_bytes()
    with pytest.raises(InvalidRequest, match=message):
        read_archive(io.BytesIO(rezip(entries)))


def test_pages_out_of_order_or_twice_are_refused():
    record = make_record(1)
    pages = list(make_pages(record))
    for wrong in ([pages[1], pages[0]], [pages[0], pages[0]]):
        entries = unzip(archive_of(record, pages[:2]))
        for number, page in enumerate(wrong):
            entries[page_name(number)] = page.to_bytes()
        with pytest.raises(InvalidRequest, match="expected ascending"):
            read_archive(io.BytesIO(rezip(entries)))
        with pytest.raises(InvalidRequest, match="expected ascending"):
            archive_of(record, wrong)


def test_what_could_not_come_back_is_not_written(tmp_path):
    record = make_record(1)
    for name, value in (("nan", float("nan")), ("object", object()), ("keys", {1: 2})):
        record.template_variables = {"x": [value]}
        with pytest.raises(InvalidRequest, match="template_variables.x"):
            write_archive(tmp_path / f"{name}.zip", record)
    assert list(tmp_path.iterdir()) == []


def test_token_ids_beyond_the_vocabulary_are_refused():
    record = make_record(1)
    data = archive_of(record)
    most = max(max(turn.token_ids, default=0) for turn in record.tree)
    read_archive(io.BytesIO(data), vocab_size=most + 1)
    with pytest.raises(InvalidRequest, match=f"token id {most}, expected less than {most}"):
        read_archive(io.BytesIO(data), vocab_size=most)


# --- files and stores -------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    record = make_record(1)
    path = tmp_path / "a.zip"
    write_archive(path, record)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match="exists, expected a new name"):
        write_archive(path, make_record(2))

    def failing():
        yield next(iter(make_pages(record)))
        raise InternalError("the store went away")

    with pytest.raises(InternalError):
        write_archive(path, record, failing(), force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.zip"]
    write_archive(path, make_record(2), force=True)
    assert path.read_bytes() == archive_of(make_record(2))
    with pytest.raises(InvalidRequest, match="cannot be written: No such file"):
        write_archive(tmp_path / "no" / "a.zip", record)
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_archive(tmp_path / "b.zip")
    with pytest.raises(InvalidRequest, match="is no file"):
        read_archive(tmp_path)


def test_pages_that_change_between_two_looks_are_refused(tmp_path):
    record = make_record(1)
    path = tmp_path / "a.zip"
    write_archive(path, record, make_pages(record))
    archive = read_archive(path)
    write_archive(path, record, make_pages(record, seed=9), force=True)
    entries = unzip(path.read_bytes())
    entries[page_name(0)] = entries[page_name(0)][:-1] + b"x"
    path.write_bytes(rezip(entries, sign=False))
    with pytest.raises(InvalidRequest, match="is not what the manifest says"):
        list(archive.pages)


def test_export_and_import_through_a_store(tmp_path):
    store, other = Store(), Store()
    record = make_record(1)
    store.add(record)
    done = export_session(store, None, record, tmp_path / "a.zip")
    assert (done.turns, done.pages) == (len(record.tree), 0)
    assert done.bytes == (tmp_path / "a.zip").stat().st_size
    found = import_session(other, None, tmp_path / "a.zip", owner="me")
    assert other.find("me", record.name) is found
    export_session(other, None, found, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_name_that_is_taken_asks_for_another(tmp_path):
    store, record = Store(), make_record(1)
    store.add(record)
    export_session(store, None, record, tmp_path / "a.zip")
    with pytest.raises(InvalidRequest, match="'talk 1' is taken, expected another one"):
        import_session(store, None, tmp_path / "a.zip")
    with pytest.raises(InvalidRequest, match="session name is"):
        import_session(store, None, tmp_path / "a.zip", name=" x")
    found = import_session(store, None, tmp_path / "a.zip", name="second")
    assert (found.name, found.id != record.id) == ("second", True)
    assert store.records() == [record, found] or store.records() == [found, record]
    assert facts(record) == facts(make_record(1))


def damage(rng: random.Random, data: bytes) -> bytes:
    """One to three mutations of bytes."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 200)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 50))
        elif kind == 4:
            other = rng.randrange(len(changed))
            changed[at : at + 40] = changed[other : other + 40]
        else:
            at = min(at, len(changed) - 4) if len(changed) > 4 else 0
            changed[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0xFFFF, 0xFFFFFFFF)))
        if not changed:
            break
    return bytes(changed)


def damage_json(rng: random.Random, document) -> None:
    """One value somewhere becomes another, or goes, or moves."""
    odd = (None, -1, 0, 1 << 31, 1.5, True, "", "x", "system", [], {}, [[]], {"a": 1}, "\ud800")
    places = [document]
    while rng.random() < 0.8:
        below = places[-1].values() if isinstance(places[-1], dict) else places[-1]
        below = [child for child in below if isinstance(child, dict | list) and child]
        if not below:
            break
        places.append(rng.choice(below))
    place = places[-1]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = rng.choice(keys)
    kind = rng.randrange(4)
    if kind == 0:
        del place[key]
    elif kind == 1:
        place[rng.choice(keys)] = place[key]
    else:
        place[key] = rng.choice(odd)


def mutate(rng, data):
    if rng.random() < 0.5:
        return damage(rng, data)
    entries = unzip(data)
    name = rng.choice(list(entries))
    if name.endswith(".json"):
        document = json.loads(entries[name])
        damage_json(rng, document)
        entries[name] = json.dumps(document).encode()
    else:
        entries[name] = damage(rng, entries[name])
    return rezip(entries, sign=name != MANIFEST)


def mutation_trials(seed: int, count: int, path) -> tuple[int, int]:
    """Imports damaged archives; returns how many were refused and how many were taken."""
    rng = random.Random(seed)
    record = make_record(seed, turns=4)
    data = archive_of(record, make_pages(record, size=40))
    refused = taken = 0
    for _ in range(count):
        path.write_bytes(mutate(rng, data))
        store, keeper = Store(), make_record(77, turns=1)
        store.add(keeper)
        try:
            found = import_session(store, None, path)
        except InvalidRequest:
            assert store.records() == [keeper]
            refused += 1
            continue
        taken += 1
        again = archive_of(found)
        # What was taken is whole: it can be written and read, and is the same then.
        assert facts(read_archive(io.BytesIO(again)).record) == facts(found)
        for turn in found.tree:
            assert len(found.tree.token_ids(turn.id)) == turn.length
    return refused, taken


def test_damaged_archives_are_refused_or_whole(tmp_path):
    """A fast subset; `python tests/test_archive.py` makes 2,000 trials or as many as told."""
    refused, taken = mutation_trials(1, 150, tmp_path / "a.zip")
    assert refused > 100
    assert taken > 0


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_are_refused_or_equal(seed):
    record = make_record(seed, turns=3)
    data = archive_of(record, make_pages(record, size=40))
    rng = random.Random(seed)
    try:
        found = read_archive(io.BytesIO(damage(rng, data)))
        pages = list(found.pages)
    except InvalidRequest:
        return
    assert facts(found.record) == facts(record)
    assert pages == list(make_pages(record, size=40))


def test_every_error_is_one_that_comes_back():
    for name in errors.__all__:
        record = make_record(1, turns=1)
        reply = record.tree.get(record.tree._last_id)
        record.tree.replace(replace(reply, error=getattr(errors, name)("x")))
        document = json_text.load("x", json_text.dump("x", to_document(record)))
        error = from_document(document, "me").tree.get(reply.id).error
        assert (type(error), str(error)) == (getattr(errors, name), "x")
    assert document["format"] == FORMAT


def test_a_damaged_deflate_stream_is_refused():
    packed = rezip(unzip(archive_of(make_record(1))), zipfile.ZIP_DEFLATED)
    rng = random.Random(0)
    for _ in range(50):
        changed = bytearray(packed)
        changed[rng.randrange(60, 2000)] ^= 1 << rng.randrange(8)
        with pytest.raises(InvalidRequest, match="session.json"):
            read_archive(io.BytesIO(changed))


if __name__ == "__main__":
    import sys
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
        print(*mutation_trials(7, wanted, Path(folder) / "a.zip"))
