"""The durable store between processes: leases, forks, kills and power cuts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
from assets import ROOT
from stores import (
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    talk,
)

from lmchat.errors import SessionBusy
from lmchat.store.records import TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore

STRESS = ROOT / "tests" / "stress"
START = "import os, sys\nsys.path[:0] = {path!r}\nimport conftest\n"
PATH = [str(ROOT), str(ROOT / "tests" / "support")]
IMPORTS = """
import time
from stores import assert_same, fields, grow, talk
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.errors import SessionBusy, StoreError
from lmchat.store.protocol import Stale
from lmchat.store.records import Lease, TurnStart
"""


@contextlib.contextmanager
def python(code, *arguments):
    """A process that runs the code, ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(path=PATH) + IMPORTS + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_of(code, *arguments):
    with python(code, *arguments) as process:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return printed.split()


def script(name, *arguments):
    return subprocess.run(
        [sys.executable, str(STRESS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


TAKES_TURNS = """
store = SqliteStore(sys.argv[1])
record = store.find("me", "talk")
done = busy = 0
while done < 15:
    start = TurnStart(record.leaf, 0, 0, {})
    try:
        lease = store.begin(record, start)
    except Stale:
        record = store.refresh(record)
        continue
    except SessionBusy:
        busy += 1
        time.sleep(0.001)
        continue
    store.journal([(lease, [os.getpid()])])
    time.sleep(0.002)
    record = store.finish(lease, *grow(record, f"turn {done} of {os.getpid()}"))
    store.release(lease)
    done += 1
print(os.getpid(), busy)
store.close()
"""


def test_two_processes_take_turns(data_dir):
    store = SqliteStore(data_dir)
    store.add(talk("talk", 0))
    with python(TAKES_TURNS, data_dir) as first, python(TAKES_TURNS, data_dir) as second:
        printed = [process.communicate(timeout=60)[0].split() for process in (first, second)]
        assert first.returncode == second.returncode == 0
    record = store.find("me", "talk")
    path = record.tree.path(record.leaf)
    assert len(path) == len(record.tree) == 60  # no turn is lost, and none stands beside another
    for process, _ in printed:
        mine = [turn.text for turn in path if turn.text.endswith(f"of {process}")]
        assert mine == [f"turn {number} of {process}" for number in range(15)]
    assert store.verify() == []
    store.close()


GENERATES = """
store = SqliteStore(sys.argv[1])
lease = store.begin(store.find("me", "talk"), TurnStart(2, 5, 3, {"seed": 5}))
store.journal([(lease, [1, 2, 3])])
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_the_lease_of_a_killed_process_is_free_at_once(data_dir):
    store = SqliteStore(data_dir)
    record = talk()
    record = store.add(record)
    with python(GENERATES, data_dir) as process:
        pid = int(process.stdout.readline())
        assert pid == process.pid
        with pytest.raises(
            SessionBusy, match=f"session 'talk' is generating in process {pid}: try again"
        ):
            store.begin(record, TurnStart(2, 5, 3, {}))
        with pytest.raises(SessionBusy):
            store.recover(record)
        assert store.unfinished(record) is None
        os.kill(pid, signal.SIGKILL)
        process.wait()
        assert store.unfinished(record).token_ids == (1, 2, 3)
        lease = store.recover(record)
    record = store.finish(lease, *grow(record))
    assert [path.name for path in (data_dir / "owners").iterdir()] == [store._holding.token]
    store.close()


FORKS = """
store = SqliteStore(sys.argv[1])
record = store.find("me", "talk")
lease = store.begin(record, TurnStart(2, 5, 3, {}))
store.journal([(lease, [1])])
def child():
    printed = []
    for act in (lambda: store.journal([(lease, [9])]), lambda: store.begin(record, TurnStart(2, 5, 3, {})),
                lambda: store.finish(lease, record, [])):
        try:
            act()
            printed.append("nothing")
        except Exception as error:
            printed.append(type(error).__name__)
    store.release(lease)
    other = talk("child")
    other = store.add(other)
    mine = store.begin(other, TurnStart(2, 5, 3, {}))
    store.journal([(mine, [7])])
    store.sync()
    printed.append(len(store.records()))
    if sys.argv[2] == "close":
        store.close()
    print(*printed, flush=True)
pid = os.fork()
if pid == 0:
    child()
    if sys.argv[2] == "exit":
        sys.exit(0)  # which frees what the interpreter holds
    os._exit(0)
os.waitpid(pid, 0)
store.journal([(lease, [2])])
record = store.change(record)
record = store.finish(lease, *grow(record))
store.release(lease)
print(len(store.records()), *store.verify())
other = store.find("me", "child")
print(*store.unfinished(other).token_ids)
store.close()
"""  # noqa: E501


@pytest.mark.parametrize("way", ["leave", "exit", "close"])
def test_a_forked_child_is_another_owner(data_dir, way):
    store = SqliteStore(data_dir)
    store.add(talk())
    assert lines_of(FORKS, data_dir, way) == ["Stale", "SessionBusy", "Stale", "2", "2", "7"]
    assert len(store.find("me", "talk").tree) == 4
    assert store.verify() == []
    store.close()


OUTLIVED = """
store = SqliteStore(sys.argv[1])
store.begin(store.find("me", "talk"), TurnStart(2, 5, 3, {}))
pid = os.fork()
if pid == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_child_does_not_hold_its_dead_parents_lease(data_dir):
    store = SqliteStore(data_dir)
    record = talk()
    record = store.add(record)
    with python(OUTLIVED, data_dir) as process:
        child = int(process.stdout.readline())
        try:
            with pytest.raises(SessionBusy):
                store.recover(record)
            process.kill()
            process.wait()
            store.recover(record)
        finally:
            os.kill(child, signal.SIGKILL)
    store.close()


def test_processes_that_make_the_same_data_directory(data_dir):
    code = """
store = SqliteStore(sys.argv[1])
for _ in range(5):
    store.add_numbered(talk(""))
store.close()
"""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(python(code, data_dir)) for _ in range(4)]
        for process in processes:
            process.communicate(timeout=60)
            assert process.returncode == 0
    store = SqliteStore(data_dir)
    assert {s.name for s in store.summaries()} == {f"chat-{n}" for n in range(1, 21)}
    store.close()


# --- a few cases of the stress tests ------------------------------------------------------------


def test_a_killed_store_is_before_or_after_its_step():
    done = script("store_kill.py", "--count", "150", "--seed", "11")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("150 kills, seed 11, ")


needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace, which records writes, is not installed"
)


def power_cut(*arguments):
    done = script("store_power_cut.py", "--seed", "11", *arguments)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    return done


@needs_strace
def test_a_power_cut_loses_no_synced_write():
    done = power_cut("--states", "200")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "200 states, seed 11: 0 failures\n"


@needs_strace
@pytest.mark.parametrize("broken", [("--synchronous", "NORMAL"), ("--sync-with", "empty")])
def test_power_cuts_find_a_store_that_does_not_sync(broken):
    """Without the syncs of changes; with a sync that is an empty transaction."""
    done = power_cut("--states", "1000", "--until-first", *broken)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "found none of the states" in done.stderr
