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
from lmchat.errors import Error, InvalidRequest, with_public
from lmchat.public_text import public_message
from lmchat.store.records import LOCAL_OWNER, SessionRecord
from turbomind.params import wrong

File = str | os.PathLike[str] | IO[bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class Pages:
    """The pages of an archive. Iteration reads and verifies them one by one."""

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
    """The contents of an archive: a session with a new id, in no store, and its pages."""

    record: SessionRecord
    pages: Pages


def write_archive(
    file: File,
    record: SessionRecord,
    pages: Iterable[ArchivePage] | None = None,
    *,
    force: bool = False,
) -> int:
    """Writes an archive.

    A path is written as a temporary file in its folder, for its owner only, and then renamed.

    Args:
        file: a path, or an open binary file.
        record: the session.
        pages: its pages, in the order of `PlaceCheck`.
        force: replace a file that exists.

    Returns:
        How many pages were written.

    Raises:
        InvalidRequest: the file exists or cannot be written, or the session could not be read
            back.
    """
    data = json_text.dump(SESSION, to_document(record))
    from_document(json_text.load(SESSION, data), record.owner)  # what is written can be read back
    entries = _entries(record, pages or ())
    if not isinstance(file, str | os.PathLike):
        return write_zip(file, data, entries)
    return replacing(
        Path(os.path.expanduser(file)), force, lambda file: write_zip(file, data, entries)
    )


def read_archive(file: File, *, owner: str = LOCAL_OWNER, vocab_size: int | None = None) -> Archive:
    """Reads an archive and verifies structure, limits, digests, the tree, and each page's place.

    The pages are read again when they are iterated.

    Args:
        file: a path, or an open binary file.
        owner: owner of the session that is returned.
        vocab_size: size of the vocabulary that token ids must be in; None: not checked.

    Raises:
        InvalidRequest: the archive is damaged, too large, or of a newer version.
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
    path = Path(os.path.expanduser(file))
    try:
        if path.exists() and not path.is_file():
            error = InvalidRequest(f"{path} is not a file, expected an archive of a session")
            raise with_public(error, "it is not a file, expected an archive of a session")
        with path.open("rb") as opened:
            yield opened
    except OSError as error:
        why = os.strerror(error.errno or 0)
        refused = InvalidRequest(f"{path} cannot be read: {why}")
        raise with_public(refused, f"the archive cannot be read: {why}") from error


@contextlib.contextmanager
def _named(what: object) -> Iterator[None]:
    """Prefixes errors inside with the name of the file."""
    try:
        yield
    except InvalidRequest as error:
        name = os.fspath(what) if isinstance(what, str | os.PathLike) else "archive"
        public = f"the archive: {public_message(error)}"
        raise with_public(InvalidRequest(f"{name}: {error}"), public) from None


def replacing(path: Path, force: bool, write: Callable[[IO[bytes]], T]) -> T:
    """Writes a file atomically: `write` fills a temporary file, which is synced and renamed.

    Raises InvalidRequest where the file exists (without `force`) or cannot be written.
    """
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
        why = os.strerror(error.errno or 0)
        refused = InvalidRequest(f"{path} cannot be written: {why}")
        raise with_public(refused, f"the archive cannot be written: {why}") from error


def _take_name(name: str, path: Path, force: bool) -> None:
    if not force:
        try:
            os.link(name, path)  # fails where `path` was created meanwhile
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
    error = wrong("path", str(path), "a new name, or force to replace what exists")
    return with_public(error, "the archive exists, expected a new name, or force to replace it")
