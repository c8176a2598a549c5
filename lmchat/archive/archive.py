"""Archives as files: written whole or not at all, read only when all of it verifies."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from lmchat.archive import json_text
from lmchat.archive.container import SESSION, Container, page_name
from lmchat.archive.container import write as write_zip
from lmchat.archive.document import check_vocabulary, from_document, to_document
from lmchat.archive.pages import ArchivePage, PlaceCheck
from lmchat.errors import Error, InvalidRequest
from lmchat.store.records import SessionRecord

File = str | os.PathLike[str] | IO[bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class Pages:
    """The pages of an archive, read one by one as they are asked for, and verified again."""

    file: File
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[ArchivePage]:
        if self.count:
            with _opened(self.file) as file, _named(self.file):
                container = Container(file)
                for number in range(self.count):
                    yield ArchivePage.from_bytes(container.read(page_name(number)))


@dataclass(frozen=True)
class Archive:
    """What was read: a session with an id of its own, in no store, and its pages."""

    record: SessionRecord
    pages: Pages


def write_archive(
    file: File,
    record: SessionRecord,
    pages: Iterable[ArchivePage] | None = None,
    *,
    force: bool = False,
) -> int:
    """Writes a session, and `pages` in the order of `PlaceCheck`; returns how many there were.

    A path is written beside itself and then takes its name, readable by its owner only. Raises
    InvalidRequest for a file that exists (without `force`), one that cannot be written, and a
    session that could not be read back.
    """
    data = json_text.dump(SESSION, to_document(record))
    from_document(json_text.load(SESSION, data), record.owner)  # what comes out goes in again
    entries = _entries(record, pages or ())
    if not isinstance(file, str | os.PathLike):
        return write_zip(file, data, entries)
    return replacing(Path(file).expanduser(), force, lambda file: write_zip(file, data, entries))


def read_archive(file: File, *, owner: str = "local", vocab_size: int | None = None) -> Archive:
    """Reads a session and verifies everything: structure, limits, digests, the tree, each page's
    place. Token ids are compared with the vocabulary where its size is given.

    The file stays unread after that until the pages are asked for. Raises InvalidRequest that says
    what is wrong with it.
    """
    with _opened(file) as opened, _named(file):
        container = Container(opened)
        record = from_document(json_text.load(SESSION, container.read(SESSION)), owner)
        if vocab_size is not None:
            check_vocabulary(record, vocab_size)
        places = PlaceCheck(record)
        for number in range(container.page_count):
            name = page_name(number)
            with _named(name):
                places.check(ArchivePage.from_bytes(container.read(name)))
        return Archive(record, Pages(file, container.page_count))


def _entries(record: SessionRecord, pages: Iterable[ArchivePage]) -> Iterator[bytes]:
    places = PlaceCheck(record)
    for page in pages:
        places.check(page)
        yield page.to_bytes()


@contextlib.contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    if not isinstance(file, str | os.PathLike):
        yield file
        return
    path = Path(file).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{path} is no file, expected an archive of a session")
        with path.open("rb") as opened:
            yield opened
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error


@contextlib.contextmanager
def _named(what: object) -> Iterator[None]:
    """Errors inside begin with the name of the file that they are about."""
    try:
        yield
    except InvalidRequest as error:
        name = os.fspath(what) if isinstance(what, str | os.PathLike) else "archive"
        raise InvalidRequest(f"{name}: {error}") from None


def replacing(path: Path, force: bool, write: Callable[[IO[bytes]], T]) -> T:
    """Has `write` fill a file that takes its name once it is whole; else all is as it was.
    InvalidRequest for one that exists (without `force`) and one that cannot be written."""
    if not force and path.exists():
        raise _exists(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                result = write(file)
                file.flush()
                os.fsync(file.fileno())
            _take_name(name, path, force)
            return result
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written: {os.strerror(error.errno or 0)}"
        ) from error


def _take_name(name: str, path: Path, force: bool) -> None:
    if not force:
        try:
            os.link(name, path)  # fails where `path` has come up since
            return
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:  # a file system without links
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if path.exists():
                raise _exists(path) from None
    os.replace(name, path)


def _exists(path: Path) -> Error:
    return InvalidRequest(f"{path} exists, expected a new name, or force to replace it")
