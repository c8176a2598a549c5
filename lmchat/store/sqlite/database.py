"""The SQLite file of the store: connections, transactions, durability.

SQLite in WAL mode. Acknowledged changes run with synchronous=FULL, which syncs the log at each
commit. The journal runs with synchronous=NORMAL: a commit is a write to the log, which survives the
death of the process, and `sync()` makes the log survive a power cut. A background thread
checkpoints once the log has grown, and soon after a deletion; no transaction does.

On a full disk pages of KV are removed for a transaction (`with_room()`), and where there are none,
the reserve file for a deletion (`deleting()`).

Not here: its errors as sentences (`error_texts`), SQL of the tables (`tables`, `journal`, `search`,
`prefix_table`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from lmchat.errors import InvalidRequest, StoreClosed, StoreError
from lmchat.store.data_directory import private_file
from lmchat.store.sqlite import schema, search_index
from lmchat.store.sqlite.checkpointer import Checkpointer
from lmchat.store.sqlite.error_texts import explained, lacks_folder
from lmchat.store.sqlite.reserve_file import ReserveFile
from lmchat.store.sqlite.room import FIRST_BYTES, FULL, Room

BUSY_SECONDS = 10.0
"""Longest wait of a transaction for one of another process."""

_LOG_LIMIT = 1 << 20  # size that the log's file shrinks to after a checkpoint
_IDLE_READERS = 4
_NO_ROOM = ("disk I/O", "full", "unable to open", "readonly")
"""Parts of SQLite's messages where it cannot write a log."""
_TRUNCATE_SECONDS = 0.1  # longest wait of that checkpoint, during which no transaction begins
_HEADER_BYTES = 100  # of a file of SQLite


Result = TypeVar("Result")
_Place = tuple[int, int]  # device and inode of a file


class _Writer(NamedTuple):
    """A connection that writes, and its log."""

    connection: sqlite3.Connection
    log: _Place | None


class _Forked(Protocol):
    def abandon(self) -> None: ...


_open: weakref.WeakSet[_Forked] = weakref.WeakSet()


class Database:
    """One SQLite file and this process's connections to it.

    Any thread may use it. A forked child opens its own connections.

    Args:
        path: the file; it is created or migrated if needed.

    Raises:
        StoreError: the file cannot be opened, is damaged, or is of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.needed_pages: Callable[[], Iterable[bytes]] = tuple
        """Returns the keys of pages that a full disk does not take."""
        self._reserve = ReserveFile(path.with_name(path.name + "-spare"))
        self._room = Room(path.parent)
        self._file: _Place | None = None
        self._reset()
        _check_left(path)
        self._unwritable: sqlite3.OperationalError | None = (
            None  # the error, where the file can only be read
        )
        private_file(path)
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                private_file(beside)
        try:
            self.with_room(self._open)
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, sqlite3.OperationalError):
                raise
            with self.explained():
                self._readers.append(self._opened_to_read(cause))
        self._file = _place(path)
        if self._unwritable is None:
            self._reserve.allocate()

    def _open(self) -> None:
        with self.explained():
            self._readers.append(self._opened())

    def _opened(self) -> sqlite3.Connection:
        """Opens a connection, and migrates the file to the newest version if it can be written."""
        connection = self._connect()
        try:
            if self._unwritable is None:
                self._use_log(connection)
                schema.migrate(connection)
            else:
                schema.check_readable(connection)
        except StoreError as error:
            connection.close()
            raise StoreError(f"the store {self.path}: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _opened_to_read(self, error: sqlite3.OperationalError) -> sqlite3.Connection:
        """Opens a connection to a file that can only be read.

        On a full or read-only disk SQLite cannot create the index of its log. Without a log the
        file holds everything, and can be read as immutable.
        """
        whole = self.path.stat().st_size and not self._log_bytes()
        whole = whole and not self.path.with_name(self.path.name + "-journal").exists()
        if not whole or not _lacks_room(error):
            raise error
        self._unwritable = error
        try:
            return self._opened()
        except sqlite3.Error:
            raise error from None

    # --- a full disk ------------------------------------------------------------------------------

    def with_room(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, a transaction; on a full disk again, each time after pages of KV were
        removed, until it succeeds or none is left that may leave.

        Args:
            work: changes nothing when it raises StoreError.
        """
        size, again = FIRST_BYTES, True
        while True:
            seen = self._room.made
            try:
                return work()
            except StoreError as error:
                if not _lacks_room(error.__cause__):
                    raise
                if self._room.make(size, seen, self.needed_pages):
                    size *= 2
                elif again and "full" in str(error.__cause__):  # another program has made room
                    again = False
                else:
                    raise

    def deleting(self, work: Callable[[], None]) -> None:
        """Runs `work`, a transaction that deletes, as `with_room()` does; if that does not suffice,
        again without the reserve file. What is left of the deleted is removed soon."""
        try:
            self.with_room(work)
        except StoreError as error:
            if not _lacks_room(error.__cause__) or not self._release_reserve():
                raise
            try:
                work()
            finally:
                with contextlib.suppress(StoreError):
                    self.checkpoint("TRUNCATE")  # frees the room of the log
                self._reserve.allocate(from_the_last=True)
        self.deleted()

    def _release_reserve(self) -> bool:
        """Removes the reserve file, and reopens a store that could only be read.

        Returns:
            Whether there is room now.
        """
        if not self._reserve.release():
            return False
        self._reopen()
        if self._unwritable is not None:
            self._reserve.allocate(from_the_last=True)
        return self._unwritable is None

    def _reopen(self) -> None:
        """Opens a store that could only be read for writing, if that is possible now."""
        with self._writing:
            why, self._unwritable = self._unwritable, None
            if why is None:
                return
            try:
                fresh = self._opened()
            except (sqlite3.Error, StoreError):
                self._unwritable = why
                return
            self._close_readers()
            self._readers.append(fresh)

    def _close_readers(self) -> None:
        """Closes the idle readers."""
        with contextlib.suppress(IndexError):
            while True:
                self._readers.pop().close()

    # --- connections -----------------------------------------------------------------------------

    def _reset(self) -> None:
        self._closed = False
        self._writing = (
            threading.Lock()
        )  # of this process: SQLite would make threads sleep and poll
        self._durable_turn = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._writers: dict[bool, _Writer] = {}
        self._checkpointer = Checkpointer(self.checkpoint, self._forget)

    @property
    def can_write(self) -> bool:
        """Returns whether the file can be written: there is room and permission for a log."""
        return self._unwritable is None

    # --- transactions ------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection in a read transaction: a snapshot of the file."""
        with self.explained():
            self._check_open()
            unwritable = self._unwritable
            try:
                connection = self._readers.pop()
            except IndexError:
                connection = self._connect()
            try:
                connection.execute("BEGIN")
                yield connection
            except BaseException:
                # The error's traceback holds an interrupted query, which would pin the next
                # reader to this snapshot.
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
                raise
            self._return_reader(connection, unwritable)

    def _return_reader(self, connection: sqlite3.Connection, unwritable: Exception | None) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            return
        # A read-only connection treats the file as immutable.
        outdated = unwritable is not self._unwritable
        if self._closed or outdated or len(self._readers) >= _IDLE_READERS:
            connection.close()
        else:
            self._readers.append(connection)

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Yields a connection in a write transaction, which is committed, or rolled back on errors.

        Args:
            durable: whether the commit survives a power cut too, not only the process.
        """
        if self._unwritable is not None:
            self._reopen()
        # The journal waits for at most two of the others, however many of them queue here.
        in_turn = self._durable_turn if durable else contextlib.nullcontext()
        with self.explained(), in_turn, self._writing:
            self._check_open()
            if self._unwritable is not None:
                raise sqlite3.OperationalError(str(self._unwritable))
            writer = self._writers.get(durable)
            if writer is None:
                writer = self._writers[durable] = _Writer(self._connect(durable), None)
            connection = writer.connection
            try:
                connection.execute("BEGIN IMMEDIATE")
                if writer.log is None:
                    log = self._known_log() or _place(self._log())
                    self._writers[durable] = _Writer(connection, log)
                yield connection
                self._check_place()
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection, durable)
                raise
        if durable:
            self._wrote()

    def _roll_back(self, connection: sqlite3.Connection, durable: bool) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            del self._writers[durable]
            connection.close()

    def _known_log(self) -> _Place | None:
        """Returns the place of the log, which stays while a connection that has used it is open."""
        return next((w.log for w in list(self._writers.values()) if w.log is not None), None)

    def _check_place(self) -> None:
        """Raises StoreError if the file, or its log, was removed or replaced: what is written now
        would be lost with the old one. A file that was moved away and back is the same."""
        for path, known in ((self.path, self._file), (self._log(), self._known_log())):
            if known is not None and _place(path) not in (known, _UNKNOWN):
                raise StoreError(
                    f"the store {path} was removed or replaced while this process had it open: "
                    "nothing was changed. Put it back, or start again to use what is there now"
                )

    def _connect(self, durable: bool = True) -> sqlite3.Connection:
        self._check_place()
        # One thread at a time uses a connection, not always the same one.
        mode = "mode=rw" if self._unwritable is None else "mode=ro&immutable=1"
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?{mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.text_factory = bytes  # texts with lone surrogates are read by the codec
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA temp_store = MEMORY")  # no folder of the system is needed
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_LIMIT}")
            connection.execute(
                "PRAGMA secure_delete = ON"
            )  # rows of deleted sessions are overwritten
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_log(self, connection: sqlite3.Connection) -> None:
        """Switches to WAL mode, which waits for readers of other processes."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != b"wal":
            raise StoreError(
                f"the file system has no write-ahead log (SQLite says {mode.decode()!r}): set "
                "LMCHAT_HOME to a folder on a local disk"
            )

    # --- durability --------------------------------------------------------------------------

    def sync(self) -> None:
        """Makes all commits survive a power cut.

        It syncs the log's file itself and waits for no transaction: SQLite would sync nothing for
        an empty transaction, even with synchronous=FULL. SQLite holds no locks on that file, so
        closing it loses none.
        """
        self._check_open()
        self._check_place()
        log = self._log()
        try:
            fd = os.open(log, os.O_RDWR)
        except FileNotFoundError:
            return  # nothing was written since the last checkpoint
        except OSError as error:
            raise StoreError(f"cannot sync {log}: {error.strerror or error}") from error
        try:
            _sync(fd)
        except OSError as error:
            raise StoreError(f"cannot sync {log}: {error.strerror or error}") from error
        finally:
            os.close(fd)
        self._checkpointer.written(self._log_bytes())

    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _log_bytes(self) -> int:
        try:
            return self._log().stat().st_size
        except OSError:
            return 0

    def _wrote(self) -> None:
        """What follows a durable commit."""
        self._reserve.allocate()
        self._checkpointer.written(self._log_bytes())

    def checkpoint(self, mode: str = "PASSIVE") -> bool:
        """Copies the log into the file, as far as no reader needs the old state.

        Args:
            mode: "PASSIVE" waits for no other connection; "TRUNCATE" waits, and empties the log.

        Returns:
            Whether all of the log was copied, and for "TRUNCATE" that it is empty now.
        """
        return self.with_room(lambda: self._checkpoint(mode, BUSY_SECONDS))

    def _checkpoint(self, mode: str, timeout: float) -> bool:
        with self.explained():
            self._check_open()
            connection = self._connect()
            try:
                connection.execute(f"PRAGMA busy_timeout = {timeout * 1000:.0f}")
                found = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            finally:
                connection.close()
        return found is not None and not found[0] and found[1] == found[2]

    def deleted(self, *, here: bool = True) -> None:
        """Removes what deletions have left in the search index and in the log, soon.

        Args:
            here: this process has deleted, so it does that at the latest when it closes the file.
        """
        self._checkpointer.deleted(here=here)

    def _forget(self) -> bool:
        """Removes what deletions have left. Returns whether nothing is left."""
        while self._forget_words():
            pass
        self._checkpoint("PASSIVE", BUSY_SECONDS)  # leaves little for the next, which excludes all
        with self._writing:
            return self._checkpoint("TRUNCATE", _TRUNCATE_SECONDS)

    def _forget_words(self) -> bool:
        """Does a piece of the removal of deleted words from the search index.

        Returns:
            Whether there is more to do.
        """
        with self.writing(durable=False) as connection:
            return search_index.forget(connection)

    # --- life --------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the connections. The last one to the file checkpoints it. Idempotent."""
        self._checkpointer.close()
        with self._writing:
            self._closed = True
            for connection in self._connections():
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
            self._writers.clear()
            self._readers.clear()

    def abandon(self) -> None:
        """Abandons the connections in a forked child, without closing them.

        They and their locks are the parent's; closing them here could release its locks.
        """
        for connection in self._connections():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        closed = self._closed
        self._reset()
        self._closed = closed

    def _connections(self) -> list[sqlite3.Connection]:
        return [*(writer.connection for writer in self._writers.values()), *self._readers]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the store {self.path} is closed")

    # --- errors ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises SQLite's errors as StoreError, values that no column holds as InvalidRequest."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explained(error, self.path, BUSY_SECONDS) from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"a value cannot be stored: {error}") from error


def _check_left(path: Path) -> None:
    """Raises StoreError for a damaged file that SQLite would treat as a new one.

    These are an empty file beside pages of sessions, a truncated one, and a missing one whose log
    is left; SQLite would delete that log.
    """
    log = path.with_name(path.name + "-wal")
    try:
        size = path.stat().st_size if path.exists() else None
        has_log = log.exists() and log.stat().st_size > 0
        has_pages = size == 0 and any((path.parent / "pages").glob("*.idx"))
    except OSError:
        return  # opening it reports why
    if has_log and not size:
        raise StoreError(
            f"the store {path} is missing or empty, though its log {log.name} is there: put the "
            "file back, or move the log to a safe place to begin with no sessions"
        )
    if has_pages or (size is not None and 0 < size < _HEADER_BYTES):
        raise StoreError(
            f"the store {path}: the file is damaged: it has {size} bytes. Put a backup in its "
            "place, or remove it to begin with no sessions"
        )


_UNKNOWN = (-1, -1)  # the place of a file that the system does not report


def _place(path: Path) -> _Place | None:
    """Returns the place of a file, None where there is none."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN
    return facts.st_dev, facts.st_ino


def _lacks_room(error: BaseException | None) -> bool:
    """Returns whether the error means, or may mean, a lack of room."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if not isinstance(error, sqlite3.Error) or lacks_folder(error):
        return False
    return any(words in str(error) for words in _NO_ROOM)


def _sync(fd: int) -> None:
    os.fdatasync(fd)


def after_fork(store: _Forked) -> None:
    """Registers `store.abandon()` to be called in forked children."""
    _open.add(store)


def _after_fork() -> None:
    for store in list(_open):
        store.abandon()


os.register_at_fork(after_in_child=_after_fork)
