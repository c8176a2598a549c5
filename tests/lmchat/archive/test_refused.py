"""Invalid archives are refused with an error that names the defect."""

import io
import json
import struct
import zipfile
from dataclasses import replace

import pytest
from archives import archive_of, facts, make_pages, make_record, rezip, unzip

from lmchat.archive import (
    read_archive,
    write_archive,
)
from lmchat.archive.container import MANIFEST, SESSION, page_name
from lmchat.errors import InvalidRequest


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
    (put("version", 4), "version is 4, expected at most 3: a newer lmchat"),
    (put("version", 0), "version is 0"),
    (put("version", True), "version is True"),
    (put("format", "other"), "not an archive of a session"),
    (put("more", 1), "it has 'more'"),
    (remove("turns"), "turns is missing"),
    (put("turns", {}), "turns is an object, expected array"),
    (put("session", "name", ""), "session.name is '', expected at least 1"),
    (put("session", "name", "a\nb"), "name is"),
    (put("session", "name", "\ud800"), "name is"),
    (put("session", "name", "x" * 201), "expected at most 200"),
    (put("session", "leaf", 999), "leaf is 999"),
    (put("session", "leaf", 1.0), "session.leaf is 1.0, expected integer or null"),
    (put("session", "pinned", 1), "session.pinned is 1, expected boolean"),
    (put("session", "history", "drop"), "session.history is 'drop', expected one of"),
    (put("session", "created", "yesterday"), "session.created is 'yesterday'"),
    (put("session", "created", "2026-13-01T00:00:00.000000+00:00"), "created is"),
    (put("session", "created", "9999-12-01T00:00:00.000000+00:00"), "created is"),
    (put("session", "created", "2026-12-01T00:00:00.000000+00:00\n"), "created is"),
    (put("session", "settings", {"temperature": -1}), "temperature is -1, expected"),
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
    (put("turns", 1, "role", "user"), "turn 2 has error, but is not a reply"),
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
    (put("turns", 1, "timings", "ttft", float("nan")), "NaN is not JSON"),
    (put("turns", 1, "timings", "ttft", float("inf")), "Infinity is not JSON"),
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
    (lambda t: t.replace(b'"pinned":', b'"pinned":true,"pinned":'), "a key is repeated"),
    (lambda t: t.replace(b'"leaf":', b'"leaf":1e999,"x":'), "out of range"),
    (lambda t: t.replace(b'"leaf":', b'"x":1' + b"0" * 5000 + b',"leaf":'), "5001 digits"),
    (lambda t: DEEP, "nested too deeply"),
    (lambda t: DEEP[:100] + b"[" * 70 + b"]" * 200, "nested too deeply|not valid JSON"),
    (lambda t: t.replace(b'"a":"', b'"a":' + b'{"a":' * 70 + b"1" + b"}" * 70 + b',"c":"'), "nest"),
    (lambda t: b"[1]", "not an archive of a session"),
    (lambda t: b"null", "not an archive of a session"),
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
    """The declared unpacked size is small, the real one large."""
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
    "twice": (twice, "two entries of one name"),
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
        with pytest.raises(InvalidRequest, match=f"{name} does not match the manifest"):
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
        ({"payload": b""}, "does not start with a line"),
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
        record = record.changed(template_variables={"x": [value]})
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
