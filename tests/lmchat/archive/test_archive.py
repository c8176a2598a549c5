"""Archives of sessions: what goes in comes out, and what does not verify changes nothing."""

import io
import json
import os
import random
import struct
import subprocess
import sys
import zipfile
from dataclasses import fields, replace

import pytest
from archives import Store, archive_of, facts, make_pages, make_record, rezip, unzip
from command import ENVIRONMENT

from lmchat import errors
from lmchat.archive import (
    export_session,
    import_session,
    json_text,
    read_archive,
    write_archive,
)
from lmchat.archive.container import MANIFEST, page_name
from lmchat.archive.document import FORMAT, from_document, to_document
from lmchat.archive.schema import Schema, session_schema
from lmchat.errors import InternalError, InvalidRequest
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Timings, Turn, Usage


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


def test_a_session_without_turns_and_half_characters_are_restored(tmp_path):
    record = SessionRecord(name="empty", owner="local", history="template")
    assert facts(read_archive(io.BytesIO(archive_of(record))).record) == facts(record)
    record = record.changed(own_title="half \ud83d of a pair")
    write_archive(tmp_path / "a.zip", record)
    assert facts(read_archive(tmp_path / "a.zip").record) == facts(record)


def test_metadata_goes_in_and_comes_out_and_needs_version_2():
    assert to_document(make_record(0))["version"] == 1  # an earlier lmchat reads it
    record = make_record(0).changed(metadata={"topic": "kernels", "empty": ""})
    document = to_document(record)
    assert document["version"] == 2
    assert from_document(document, "me").metadata == record.metadata
    with pytest.raises(InvalidRequest, match="version is 1, expected 2 or more with metadata"):
        from_document({**document, "version": 1}, "me")
    document["session"]["metadata"] = {"k" * 65: "v"}
    with pytest.raises(
        InvalidRequest, match="expected keys that are strings of 1 to 64 characters"
    ):
        from_document(document, "me")


def test_the_document_has_every_field_of_a_session():
    document = to_document(make_record(0).changed(metadata={"user": "7"}))
    own = {field.name for field in fields(SessionRecord)}
    fleeting = {"id", "owner", "revision", "imported", "notices", "loading"}
    fleeting |= {"unanswered", "unanswered_parts", "keys"}
    assert set(document["session"]) == (own - fleeting - {"tree", "own_title"}) | {"title"}
    stored = {"prefix_length": "keep"}
    turn = {stored.get(field.name, field.name) for field in fields(Turn)}
    assert set(document["turns"][-1]) == turn - {
        "metadata",
        "dropped_before",
    }  # left out where empty
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

    return files("lmchat.archive").joinpath("session.schema.json").read_text(encoding="utf-8")


def test_a_schema_refuses_with_place_value_and_expectation():
    schema = Schema({"properties": {"a": {"items": {"enum": ["b", "c"]}}}})
    schema.check({"a": ["b", "c"]})
    with pytest.raises(InvalidRequest, match=r"^a\[1\] is 5, expected one of 'b', 'c'$"):
        schema.check({"a": ["b", 5]})


def test_long_keys_of_strangers_are_cut_in_messages():
    with pytest.raises(InvalidRequest) as caught:
        Schema({"additionalProperties": {"type": "null"}}).check({"x" * 10_000: 1})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("path", ["leaf", "id", "parent", "keep", "length", "token_ids", "usage",
                                  "seed"])  # fmt: skip
def test_an_integral_float_is_no_integer(path):
    document = to_document(make_record(3, turns=3))
    turn = document["turns"][-1]
    place = {
        "leaf": (document["session"], "leaf"),
        "token_ids": (turn["token_ids"], 0),
        "usage": (turn["usage"], "prompt_tokens"),
        "seed": (turn["settings"], "seed"),
    }.get(path, (turn, path))
    place[0][place[1]] = float(place[0][place[1]] or 1)
    with pytest.raises(InvalidRequest, match="expected integer"):
        from_document(document, "local")


def test_importing_lmchat_does_not_load_the_validator():
    script = "import sys, lmchat, lmchat.archive; print('fastjsonschema' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert found.stdout == "False\n", found.stderr


# --- files and stores -------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    record = make_record(1)
    path = tmp_path / "a.zip"
    write_archive(path, record)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match="path is .*, expected a new name"):
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
    with pytest.raises(InvalidRequest, match="is not a file"):
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
    with pytest.raises(InvalidRequest, match="does not match the manifest"):
        list(archive.pages)


def test_export_and_import_through_a_store(tmp_path):
    store, other = Store(), Store()
    record = make_record(1)
    record = store.add(record)
    done = export_session(store, None, record, tmp_path / "a.zip")
    assert (done.turns, done.pages) == (len(record.tree), 0)
    assert done.bytes == (tmp_path / "a.zip").stat().st_size
    found = import_session(other, None, tmp_path / "a.zip", owner="me")
    assert other.find("me", record.name) is found
    export_session(other, None, found, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_name_that_is_taken_asks_for_another(tmp_path):
    store, record = Store(), make_record(1)
    record = store.add(record)
    export_session(store, None, record, tmp_path / "a.zip")
    with pytest.raises(InvalidRequest, match="name is 'talk 1', expected one that is not taken"):
        import_session(store, None, tmp_path / "a.zip")
    with pytest.raises(InvalidRequest, match="name is"):
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
        store, present = Store(), make_record(77, turns=1)
        present = store.add(present)
        try:
            found = import_session(store, None, path)
        except InvalidRequest:
            assert store.records() == [present]
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
    """A fast subset: run this file as a script for 2,000 mutations."""
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


def test_every_error_is_one_that_is_restored():
    for name in errors.__all__:
        record = make_record(1, turns=1)
        reply = next(turn for turn in record.tree if turn.role == "assistant")
        record = record.changed([replace(reply, error=getattr(errors, name)("x"))])
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


if __name__ == "__main__":  # with tests/support in PYTHONPATH; argument: how many
    import sys
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
        print(*mutation_trials(7, wanted, Path(folder) / "a.zip"))
