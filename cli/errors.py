"""Exit codes, error output, and handling of closed or undecodable standard streams."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO

from turbomind.errors import Error, InvalidRequest, ModelError, NotFound
from turbomind.shown import printable

FAILED = 1
REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
CLOSED_PIPE = 141  # 128 + SIGPIPE

ONE_QUESTION = """With -p and piped input, the question is the text of -p, a blank line and
the input without its trailing line ends. Nothing is read from a terminal.

--json prints one object: model, session (null: not stored), text, reasoning,
token_ids, finish_reason, usage, timings, logprobs with --set logprobs=K, and error if
there is one. If no answer was started, the object contains only error, with its type
and message.

\b
Exit codes:
  0    the question was answered, or cut at --max-new-tokens
  1    the generation failed; the text before the error is printed
  2    the command, the model or the question is invalid
  130  Ctrl-C; the text before it is printed
  141  the reader of stdout closed the pipe
"""
"""Last part of the help of `lmchat chat`."""


def exit_code(error: Error) -> int:
    """Returns the exit code: REFUSED for an invalid request, FAILED for a failure."""
    return REFUSED if isinstance(error, InvalidRequest | NotFound | ModelError) else FAILED


def error_object(error: Error) -> dict[str, str]:
    """Returns an error as `--json` prints it: its class and its message."""
    return {"type": type(error).__name__, "message": str(error)}


def explained(error: OSError) -> str:
    """Returns the text of a system's error; without a file's name it may be the current folder's.

    A relative path, and packages that ask for that folder, fail where it was removed.
    """
    try:
        os.getcwd()
    except OSError as cause:
        if error.filename is None and error.errno == cause.errno:
            return f"the current folder was removed ({error}): start in one that exists"
    return str(error)


def open_missing_files() -> None:
    """Opens the null device as stdout or stderr where the parent process closed them.

    The descriptors are opened too: a file that got number 2 would have the messages of libraries
    and of child processes written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process


def replace_undecodable() -> None:
    """Makes the standard streams read invalid bytes as U+FFFD and write "?" for them."""
    for file in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")


def drop_output(file: TextIO | None = None) -> None:
    """Redirects a closed stdout to the null device, since the interpreter flushes it at exit.

    Args:
        file: another stream than stdout.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())


def note(text: object) -> None:
    """Prints a line for the user on stderr.

    What a file, a template or a server has put into a message does not reach the terminal as an
    escape sequence. A line that cannot be written is dropped. That of a replica is one of its log.
    """
    from lmchat.server.logs import NAME, LineFormatter

    lines = [printable(line) for line in str(text).expandtabs().split("\n")]
    line = "lmchat: " + "\n".join(lines)
    if NAME in os.environ:
        record = {"levelno": logging.ERROR, "levelname": "ERROR", "msg": str(text)}
        line = LineFormatter().format(logging.makeLogRecord(record))
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        drop_output(sys.stderr)
