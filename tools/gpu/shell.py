"""Other programs: found, run with a time limit, killed with their children."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TAIL = 4000  # characters of a program's output in a record


_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Done:
    """Result of a program. `status` is "ok", "failed", "timed out" or "not available"."""

    status: str
    seconds: float
    output: str  # stdout and stderr together
    code: int | None = None

    @property
    def ok(self) -> bool:
        """True if the program ended with 0 in its time."""
        return self.status == "ok"

    @property
    def tail(self) -> str:
        """The end of the output."""
        return self.output[-TAIL:]

    @property
    def last_line(self) -> str:
        """The last line of the output; the error of a Python program that failed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""


def toolkit_folders() -> list[Path]:
    """Lists folders that may hold a CUDA toolkit, those of environment variables first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(name) for name in named if name]
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(Path(nvcc).resolve().parents[1])
    return [*folders, Path("/usr/local/cuda")]


def search_path() -> str:
    """Returns PATH followed by this Python's programs and the toolkit's."""
    more = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    for folder in toolkit_folders():
        more += [str(folder / "bin"), str(folder / "compute-sanitizer")]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *dict.fromkeys(more)])


def find_program(name: str) -> str | None:
    """Returns the path of a program, or None."""
    return shutil.which(name, path=search_path())


def run(
    command: Sequence[str | Path],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
) -> Done:
    """Runs a program for at most `seconds`; never raises for its errors.

    Its output goes to `log`, or nowhere but the result. When the time is over, it and all that it
    started are killed.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if log is None:
            out = stack.enter_context(tempfile.TemporaryFile())
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log.open("w+b"))
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": search_path(), **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            return Done("not available", 0.0, f"{command[0]}: {error}")
        _running.add(process)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            _ask_to_end(process)
        finally:
            _kill(process)  # also its children that still run
        out.seek(0)
        text = out.read().decode(errors="replace")
    passed = time.monotonic() - start
    if code is None:
        return Done("timed out", passed, text)
    return Done("ok" if code == 0 else "failed", passed, text, code)


def end_with_children_on_sigterm() -> None:
    """Makes SIGTERM also end programs that `run` started in their own process groups."""

    def end(*_: object) -> NoReturn:
        for process in list(_running):
            _ask_to_end(process)  # so that it ends its own children too
            _kill_group(process)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _kill(process: subprocess.Popen[bytes]) -> None:
    _kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    _running.discard(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with its session, which holds only its own children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
