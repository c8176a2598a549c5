"""The zip container of an archive, with limits: files come from strangers.

Not here: the contents of `session.json` (`document`) and of pages (`pages`).
"""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, Any

from lmchat.archive import json_text
from lmchat.archive.pages import MAX_PAGE
from lmchat.archive.schema import Schema, wrong
from lmchat.errors import InvalidRequest

SESSION, MANIFEST = "session.json", "manifest.json"
MAX_JSON = 32 << 20  # bytes of session.json and of manifest.json: 4 million tokens
MAX_PAGES = 200_000  # entries below pages/
MAX_RATIO = 100  # of a compressed entry; ours are not
_PAGE = re.compile(r"pages/([0-9]{8})\.page\Z")
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date of zip
_END, _END64 = 22, 56  # bytes of the records at the end, without a comment
_LOCATOR = 20
_MAX_DIRECTORY = 128 * MAX_PAGES  # bytes; ours have 65 per entry
_FORMAT = "lmchat-archive"
_SCHEMA = Schema(
    {
        "type": "object",
        "required": ["format", "version", "files"],
        "additionalProperties": False,
        "properties": {
            "format": {"const": _FORMAT},
            "version": {"const": 1},
            "files": {
                "type": "array",
                "maxItems": MAX_PAGES + 1,
                "items": {
                    "type": "object",
                    "required": ["name", "bytes", "sha256"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string", "maxLength": 100},
                        "bytes": {"type": "integer", "minimum": 0, "maximum": MAX_PAGE},
                        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                    },
                },
            },
        },
    }
)


def write(file: IO[bytes], session: bytes, pages: Iterable[bytes]) -> int:
    """Writes the container and returns its number of pages.

    Raises InvalidRequest where a limit is exceeded.
    """
    files: list[dict[str, Any]] = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _put(archive, files, SESSION, session, MAX_JSON)
        for number, page in enumerate(pages):
            if number == MAX_PAGES:
                raise InvalidRequest(f"the session has more than {MAX_PAGES:,} pages")
            _put(archive, files, page_name(number), page, MAX_PAGE)
        manifest = {"format": _FORMAT, "version": 1, "files": files}
        _put(archive, [], MANIFEST, json_text.dump(MANIFEST, manifest), MAX_JSON)
    return len(files) - 1


def page_name(number: int) -> str:
    """Returns the name of the entry of page `number`, from 0."""
    return f"pages/{number:08}.page"


class Container:
    """A container that is read. `read()` returns only bytes that match the manifest.

    Raises InvalidRequest for another zip, and, before unpacking, for one that exceeds a limit.
    """

    def __init__(self, file: IO[bytes]) -> None:
        _check_directory(file)
        try:
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
        except _BAD as error:
            raise InvalidRequest(f"it is not a valid zip: {error}") from None
        self._infos = {info.filename: info for info in infos}
        if len(self._infos) != len(infos):
            raise InvalidRequest("it has two entries of one name")
        for info in infos:
            _check_entry(info)
        _check_overlap(infos, self._zip.start_dir)
        self.page_count = sum(name.startswith("pages/") for name in self._infos)
        self._digests = self._manifest()

    def read(self, name: str) -> bytes:
        """Returns the contents of an entry. Raises InvalidRequest where they are damaged."""
        data = self._read(name)
        if (len(data), hashlib.sha256(data).hexdigest()) != self._digests[name]:
            raise InvalidRequest(f"{name} does not match the manifest")
        return data

    def _read(self, name: str) -> bytes:
        info = self._infos.get(name)
        if info is None:
            raise InvalidRequest(f"it has no {name}: it is not an archive of a session")
        try:
            with self._zip.open(info) as entry:
                data = entry.read(info.file_size + 1)
        except _BAD as error:
            raise InvalidRequest(f"{name} cannot be read: {error}") from None
        if len(data) != info.file_size:
            raise InvalidRequest(f"{name} has {len(data)} bytes, expected {info.file_size}")
        return data

    def _manifest(self) -> dict[str, tuple[int, str]]:
        found = json_text.load(MANIFEST, self._read(MANIFEST), floats=False)
        _check_version(found)
        _SCHEMA.check(found)
        names = [file["name"] for file in found["files"]]
        expected = [SESSION, *(page_name(number) for number in range(self.page_count))]
        if names != expected or set(self._infos) != {*expected, MANIFEST}:
            raise InvalidRequest("its entries are not those of the manifest")
        return {file["name"]: (file["bytes"], file["sha256"]) for file in found["files"]}


def _check_version(manifest: Any) -> None:
    version = manifest.get("version", 1) if isinstance(manifest, dict) else 1
    if type(version) is not int:  # the schema takes True for 1
        raise wrong("version", version, "1")
    if version > 1:
        raise InvalidRequest(f"its version is {version}, expected 1: a newer lmchat wrote it")


# Errors that zipfile raises for a damaged file.
_BAD = (
    zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, ValueError, LookupError,
    OverflowError, OSError,
)  # fmt: skip


def _put(
    archive: zipfile.ZipFile, files: list[dict[str, Any]], name: str, data: bytes, most: int
) -> None:
    if len(data) > most:
        raise InvalidRequest(f"{name} has {len(data):,} bytes, expected at most {most:,}")
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # Unix, wherever it is written
    info.external_attr = 0o600 << 16
    archive.writestr(info, data)
    digest = hashlib.sha256(data).hexdigest()
    files.append({"name": name, "bytes": len(data), "sha256": digest})


def _check_directory(file: IO[bytes]) -> None:
    """Refuses a list of entries that is too long, before it is read."""
    size = file.seek(0, 2)
    end = _at(file, size - _END, _END)
    if not end.startswith(b"PK\5\6") or end[-2:] != b"\0\0":
        raise InvalidRequest("it does not end as a zip without a comment")
    (length,) = struct.unpack_from("<I", end, 12)
    if length == 0xFFFFFFFF:
        end64 = _at(file, size - _END - _LOCATOR - _END64, _END64)
        if not end64.startswith(b"PK\6\6"):
            raise InvalidRequest("it does not end as a zip")
        (length,) = struct.unpack_from("<Q", end64, 40)
    if length > _MAX_DIRECTORY:
        raise InvalidRequest(f"its list of entries has {length:,} bytes, expected less")
    file.seek(0)


def _at(file: IO[bytes], start: int, count: int) -> bytes:
    if start < 0:
        return b""
    file.seek(start)
    return file.read(count)


def _check_entry(info: zipfile.ZipInfo) -> None:
    name = info.filename
    if name not in (SESSION, MANIFEST) and not _PAGE.match(name):
        raise InvalidRequest(
            f"it has an entry {name[:100]!r}, expected only {SESSION}, {MANIFEST} and pages/"
        )
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidRequest(f"{name} is encrypted or packed in a way that is not read here")
    most = MAX_PAGE if _PAGE.match(name) else MAX_JSON
    if info.file_size > most:
        raise InvalidRequest(f"{name} has {info.file_size:,} bytes, expected at most {most:,}")
    if info.file_size > MAX_RATIO * info.compress_size + 1024:
        raise InvalidRequest(
            f"{name} unpacks to {info.file_size:,} bytes from {info.compress_size:,}, expected at "
            f"most {MAX_RATIO} times as many"
        )


def _check_overlap(infos: list[zipfile.ZipInfo], end: int) -> None:
    """Refuses overlapping entries, by which a small file unpacks to a large one."""
    places = sorted((info.header_offset, info.compress_size) for info in infos)
    ends = [start for start, _ in places[1:]] + [end]
    for (start, size), after in zip(places, ends, strict=True):
        if start < 0 or start + 30 + size > after:
            raise InvalidRequest("its entries overlap")
