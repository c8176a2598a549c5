"""The SQLite file of the store: connections, transactions, durability, and its errors as sentences.

SQLite in WAL mode. Acknowledged changes run with synchronous=FULL, which syncs the log at each
commit. The journal runs with synchronous=NORMAL: a commit is a write to the log, which survives the
death of the process, and `sync()` makes the log survive a power cut. A background thread
checkpoints once the log has grown; no transaction does.

A deletion writes to the log too. On a full disk the reserve file is removed for it (`deleting()`).

Not here: SQL of the tables (`tables`, `journal`, `search`, `prefix_table`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from lmchat.errors import InvalidRequest, StoreError
from lmchat.store.data_directory import private_file
from lmchat.store.sqlite import schema
from lmchat.store.sqlite.reserve_file import ReserveFile, free_bytes
from turbomind.descriptors import is_exhausted

BUSY_SECONDS = 10.0
"""Longest wait of a transaction for one of another process."""

_LOG_BYTES = 4 << 20  # size of the log that starts a checkpoint
_LOG_STEP = 1 << 20  # growth until the next attempt, where a reader prevented its end
_LOG_LIMIT = 1 << 20  # size that the log's file shrinks to after a checkpoint
_IDLE_READERS = 4
_NO_ROOM = ("disk I/O", "full", "unable to open", "readonly")
"""Parts of SQLite's messages where it cannot write a log."""
_LEAST_FREE = 64 << 10  # bytes: the index of a log alone has 32 KiB
_FILES = 4  # that a connection may open: file, log, its index, and the folder to sync it
_HEADER_BYTES = 100  # of a file of SQLite


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
        self._reserve = ReserveFile(path.with_name(path.name + "-spare"))
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
        with self.explained():
            try:
                self._readers.append(self._opened())
            except sqlite3.OperationalError as error:
                self._readers.append(self._opened_to_read(error))
        if self._unwritable is None:
            self._reserve.allocate()

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

    # --- deletions on a full disk -----------------------------------------------------------------

    def deleting(self, work: Callable[[], None]) -> None:
        """Runs `work`, a transaction that deletes; on a full disk, again without the reserve
        file."""
        try:
            work()
            return
        except StoreError as error:
            if not _lacks_room(error.__cause__) or not self._release_reserve():
                raise
        try:
            work()
        finally:
            with contextlib.suppress(StoreError):
                self.checkpoint("TRUNCATE")  # frees the room of the log
            self._reserve.allocate(from_the_last=True)

    def _release_reserve(self) -> bool:
        """Removes the reserve file, and reopens a store that could only be read.

        Returns:
            Whether there is room now.
        """
        if not self._reserve.release():
            return False
        with self._writing:
            why, self._unwritable = self._unwritable, None
            if why is not None:
                try:
                    fresh = self._opened()
                except (sqlite3.Error, StoreError):
                    self._unwritable = why
                    self._reserve.allocate(from_the_last=True)
                    return False
                self._close_readers()
                self._readers.append(fresh)
        return True

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
        self._writers: dict[bool, sqlite3.Connection] = {}
        self._checkpoint: threading.Thread | None = None
        self._checkpoint_at = _LOG_BYTES

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
        # The journal waits for at most two of the others, however many of them queue here.
        in_turn = self._durable_turn if durable else contextlib.nullcontext()
        with self.explained(), in_turn, self._writing:
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
            except RuntimeError:  # at interpreter exit, or with too many threads: the log stays
                self._checkpoint = None

    def _run_checkpoint(self) -> None:
        try:
            self.checkpoint()
        except StoreError:
            pass  # the log stays readable; the next transaction reports the error
        finally:
            self._checkpoint = None

    def checkpoint(self, mode: str = "PASSIVE") -> None:
        """Copies the log into the file, as far as no reader needs the old state.

        Args:
            mode: "PASSIVE" waits for no other connection; "TRUNCATE" waits, and empties the log.
        """
        with self.explained():
            self._check_open()
            connection = self._connect()
            try:
                connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            finally:
                connection.close()

    # --- life --------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the connections. The last one to the file checkpoints it. Idempotent."""
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
        """Abandons the connections in a forked child, without closing them.

        They and their locks are the parent's; closing them here could release its locks.
        """
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
        """Raises SQLite's errors as StoreError, values that no column holds as InvalidRequest."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"the store {self.path}: {_explain(error, self.path)}") from error
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


def _explain(error: sqlite3.Error | UnicodeDecodeError, path: Path) -> str:
    message = str(error)
    unreadable = isinstance(error, UnicodeDecodeError) or "UTF-8" in message
    if unreadable or "malformed" in message or "not a database" in message:
        return (
            f"the file is damaged ({message}). Nothing of it was deleted: copy it, with "
            f"{path.name}-wal, to a safe place, then put a backup in its place, or recover what is "
            "readable with `sqlite3 FILE .recover`, or move it away to begin with no sessions"
        )
    if "full" in message:
        return f"the disk is full ({message}): nothing was changed"
    if "unable to open" in message and is_exhausted(_FILES):
        return os.strerror(errno.EMFILE)
    locked_up = "unable to open" in message and path.exists() and not os.access(path, os.W_OK)
    if "readonly" in message or "read-only" in message or locked_up:
        return f"it cannot be written ({message}): nothing was changed"
    if "locked" in message:
        return f"another process has written for more than {BUSY_SECONDS:.0f} s ({message})"
    if "disk I/O" in message and _is_full(path):
        return f"the disk is full ({message}): nothing was changed"
    if "disk I/O" in message:
        return f"the disk refused to read or write ({message}): nothing was changed"
    if "unable to open" in message:
        return f"it cannot be opened ({message}): are file and folder there, and yours to write?"
    if "fts5" in message:
        return f"this Python's SQLite has no full-text search ({message})"
    return message


def _is_full(path: Path) -> bool:
    """Returns whether the disk has no room for a log; SQLite does not always report that."""
    try:
        return free_bytes(path.parent) < _LEAST_FREE
    except OSError:
        return False


def _lacks_room(error: BaseException | None) -> bool:
    """Returns whether SQLite's message means, or may mean, a lack of room."""
    message = str(error)
    return isinstance(error, sqlite3.Error) and any(words in message for words in _NO_ROOM)


def _sync(fd: int) -> None:
    os.fdatasync(fd)


def after_fork(store: _Forked) -> None:
    """Registers `store.abandon()` to be called in forked children."""
    _open.add(store)


def _after_fork() -> None:
    for store in list(_open):
        store.abandon()


os.register_at_fork(after_in_child=_after_fork)
