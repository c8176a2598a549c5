"""The file of the store: connections, transactions, durability, and what its errors mean.

SQLite in WAL mode. Acknowledged changes run with synchronous=FULL, which syncs the log at each
commit. The journal runs with synchronous=NORMAL: a commit is a write to the log, which the death of
the process cannot take back, and `sync()` makes the log durable. Nothing checkpoints on the way of
a transaction: a thread does, once the log has grown.

Deleting writes too. A file beside the store, of no use but its size, is given up for that where the
disk is full (`deleting()`), so that there is a way back from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from lmchat.errors import InvalidRequest, StoreError
from lmchat.store.data_directory import private_file
from lmchat.store.sqlite import schema
from lmchat.store.sqlite.reserve_file import Spare, free_bytes
from turbomind.descriptors import is_exhausted

BUSY_SECONDS = 10.0
"""How long a transaction waits for one of another process."""

_LOG_BYTES = 4 << 20  # from here on the log is copied into the file
_LOG_STEP = 1 << 20  # and tried again after this much more, where a reader kept it from ending
_LOG_KEPT = 1 << 20  # what the log's file shrinks to, so that its size says how much is in it
_IDLE_READERS = 4
_NO_ROOM = ("disk I/O", "full", "unable to open", "readonly")
"""What SQLite says where it can write no log."""
_LEAST_FREE = 64 << 10  # bytes: the index of a log alone has 32 KiB
_FILES = 4  # that a connection may open: file, log, its index, and the folder to sync it
_HEADER_BYTES = 100  # of a file of SQLite


class _Forked(Protocol):
    def abandon(self) -> None: ...


_open: weakref.WeakSet[_Forked] = weakref.WeakSet()


class Database:
    """One file and this process's connections to it. Any thread; a forked child has its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spare = Spare(path.with_name(path.name + "-spare"))
        self._reset()
        _check_left(path)
        self._unwritable: sqlite3.OperationalError | None = None  # why it can only be read
        private_file(path)
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                private_file(beside)
        with self.explained():
            try:
                self._readers.append(self._opened())
            except sqlite3.OperationalError as error:
                self._readers.append(self._opened_to_read(error))
        if self._unwritable is None:
            self._spare.set_aside()

    def _opened(self) -> sqlite3.Connection:
        """A connection to the file, at its newest version where it can be written."""
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
        """Where the disk is full, or nothing can be written, SQLite cannot make the index of its
        log. What is in the file is all when there is no log, and then it can be read."""
        whole = self.path.stat().st_size and not self._log_bytes()
        whole = whole and not self.path.with_name(self.path.name + "-journal").exists()
        if not whole or not _lacks_room(error):
            raise error
        self._unwritable = error
        try:
            return self._opened()
        except sqlite3.Error:
            raise error from None

    # --- room for deletions --------------------------------------------------------------------

    def deleting(self, work: Callable[[], None]) -> None:
        """Does `work`, a transaction that deletes: where the disk is full once more, in the room
        that is set aside for this."""
        try:
            work()
            return
        except StoreError as error:
            if not _lacks_room(error.__cause__) or not self._give_up_spare():
                raise
        try:
            work()
        finally:
            with contextlib.suppress(StoreError):
                self.checkpoint("TRUNCATE")  # what the log took is free again
            self._spare.set_aside(from_the_last=True)

    def _give_up_spare(self) -> bool:
        """Whether there was one, and now there is room. A store that could only be read is opened
        anew."""
        if not self._spare.give_up():
            return False
        with self._writing:
            why, self._unwritable = self._unwritable, None
            if why is not None:
                try:
                    fresh = self._opened()
                except (sqlite3.Error, StoreError):
                    self._unwritable = why
                    self._spare.set_aside(from_the_last=True)
                    return False
                self._close_readers()
                self._readers.append(fresh)
        return True

    def _close_readers(self) -> None:
        """Those that nobody uses now."""
        with contextlib.suppress(IndexError):
            while True:
                self._readers.pop().close()

    # --- connections -----------------------------------------------------------------------------

    def _reset(self) -> None:
        self._closed = False
        self._writing = threading.Lock()  # of this process: SQLite would let threads wait asleep
        self._readers: list[sqlite3.Connection] = []
        self._writers: dict[bool, sqlite3.Connection] = {}
        self._checkpoint: threading.Thread | None = None
        self._checkpoint_at = _LOG_BYTES

    @property
    def can_write(self) -> bool:
        """Whether there was room for a log, and leave to make one, when it was opened."""
        return self._unwritable is None

    # --- transactions ------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the file, whatever others write meanwhile."""
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
                # A query that was cut off lives as long as the error's traceback, and would keep
                # whoever reads next at this state of the file.
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
                raise
            self._give_back(connection, unwritable)

    def _give_back(self, connection: sqlite3.Connection, unwritable: Exception | None) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            return
        # A connection to a store that can only be read takes the file for one that never changes.
        outdated = unwritable is not self._unwritable
        if self._closed or outdated or len(self._readers) >= _IDLE_READERS:
            connection.close()
        else:
            self._readers.append(connection)

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction: all or nothing. When it ends it outlives the process, and the machine if
        `durable`."""
        with self.explained(), self._writing:
            self._check_open()
            if self._unwritable is not None:
                raise sqlite3.OperationalError(str(self._unwritable))
            connection = self._writers.get(durable)
            if connection is None:
                connection = self._writers[durable] = self._connect(durable)
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection, durable)
                raise
        if durable:
            self._consider_checkpoint()

    def _roll_back(self, connection: sqlite3.Connection, durable: bool) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            del self._writers[durable]
            connection.close()

    def _connect(self, durable: bool = True) -> sqlite3.Connection:
        # A connection is used by one thread at a time, not always by the same.
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
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_KEPT}")
            connection.execute(
                "PRAGMA secure_delete = ON"
            )  # rows of deleted sessions are overwritten
            if sys.platform == "darwin":
                connection.execute("PRAGMA fullfsync = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_log(self, connection: sqlite3.Connection) -> None:
        """Turns WAL on, which nobody else must be reading for."""
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
        """All that was committed outlives the machine when this returns.

        It syncs the log's file, waiting for no transaction: an empty transaction would write
        nothing, and then SQLite syncs nothing, also with synchronous=FULL. SQLite has no locks on
        that file that closing it could lose.
        """
        self._check_open()
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
        self._consider_checkpoint()

    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _log_bytes(self) -> int:
        try:
            return self._log().stat().st_size
        except OSError:
            return 0

    def _consider_checkpoint(self) -> None:
        size = self._log_bytes()
        if size < _LOG_BYTES:
            self._checkpoint_at = _LOG_BYTES
        elif size >= self._checkpoint_at and self._checkpoint is None and not self._closed:
            self._checkpoint_at = size + _LOG_STEP
            thread = threading.Thread(target=self._run_checkpoint, name="lmchat-checkpoint")
            thread.daemon = True
            self._checkpoint = thread
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or there are too many: the log stays
                self._checkpoint = None

    def _run_checkpoint(self) -> None:
        try:
            self.checkpoint()
        except StoreError:
            pass  # the log stays and is read; the next transaction says what is wrong
        finally:
            self._checkpoint = None

    def checkpoint(self, mode: str = "PASSIVE") -> None:
        """Copies the log into the file, as far as no reader needs the old state. Others read and
        write meanwhile; with "TRUNCATE" the log is emptied too, once nobody does."""
        with self.explained():
            self._check_open()
            connection = self._connect()
            try:
                connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            finally:
                connection.close()

    # --- life --------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the connections; the last one to the file copies the log into it. Idempotent."""
        thread = self._checkpoint
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._writing:
            self._closed = True
            for connection in (*self._writers.values(), *self._readers):
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
            self._writers.clear()
            self._readers.clear()

    def abandon(self) -> None:
        """In a forked child: the connections and their locks are the parent's. Even closing them
        here could harm it, so they are never freed."""
        for connection in (*self._writers.values(), *self._readers):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        closed = self._closed
        self._reset()
        self._closed = closed

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.path} is closed")

    # --- errors ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """SQLite's errors as StoreError, also one that cannot be read since damaged text stands in
        it; values that no column holds as InvalidRequest."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"the store {self.path}: {_explain(error, self.path)}") from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"a value cannot be kept: {error}") from error


def _check_left(path: Path) -> None:
    """StoreError for a file that SQLite would take for a new one, though it was not: an empty one
    beside pages of sessions, one that is cut short, and one that is gone with its log left, which
    SQLite would delete."""
    log = path.with_name(path.name + "-wal")
    try:
        size = path.stat().st_size if path.exists() else None
        has_log = log.exists() and log.stat().st_size > 0
        has_pages = size == 0 and any((path.parent / "pages").glob("*.idx"))
    except OSError:
        return  # who opens it says why
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


def _explain(error: sqlite3.Error | UnicodeDecodeError, path: Path) -> str:
    said = str(error)
    unreadable = isinstance(error, UnicodeDecodeError) or "UTF-8" in said
    if unreadable or "malformed" in said or "not a database" in said:
        return (
            f"the file is damaged ({said}). Nothing of it was deleted: copy it, with "
            f"{path.name}-wal, to a safe place, then put a backup in its place, or recover what is "
            "readable with `sqlite3 FILE .recover`, or move it away to begin with no sessions"
        )
    if "full" in said:
        return f"the disk is full ({said}): nothing was changed"
    if "unable to open" in said and is_exhausted(_FILES):
        return os.strerror(errno.EMFILE)
    locked_up = "unable to open" in said and path.exists() and not os.access(path, os.W_OK)
    if "readonly" in said or "read-only" in said or locked_up:
        return f"it cannot be written ({said}): nothing was changed"
    if "locked" in said:
        return f"another process has written for more than {BUSY_SECONDS:.0f} s ({said})"
    if "disk I/O" in said and _is_full(path):
        return f"the disk is full ({said}): nothing was changed"
    if "disk I/O" in said:
        return f"the disk refused to read or write ({said}): nothing was changed"
    if "unable to open" in said:
        return f"it cannot be opened ({said}): are file and folder there, and yours to write?"
    if "fts5" in said:
        return f"this Python's SQLite has no full-text search ({said})"
    return said


def _is_full(path: Path) -> bool:
    """Whether no log would fit there; SQLite does not always tell."""
    try:
        return free_bytes(path.parent) < _LEAST_FREE
    except OSError:
        return False


def _lacks_room(error: BaseException | None) -> bool:
    """Whether SQLite says so, or may mean it."""
    said = str(error)
    return isinstance(error, sqlite3.Error) and any(words in said for words in _NO_ROOM)


def _sync(fd: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync leaves it in the drive's memory there
    else:
        os.fdatasync(fd)


def after_fork(store: _Forked) -> None:
    """Calls `store.abandon()` in every child that is forked from here on."""
    _open.add(store)


def _after_fork() -> None:
    for store in list(_open):
        store.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
