"""How a command ends: exit codes, and errors as a line on stderr and an object on stdout."""

from __future__ import annotations

import io
import os
import sys

from turbomind.errors import Error, InvalidRequest, ModelError, NotFound

FAILED = 1
REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
CLOSED_PIPE = 141  # 128 + SIGPIPE

ONE_QUESTION = """With -p and a pipe, the question is the text of -p, a blank line, and what is
piped in, without the line ends at its end. Nothing is read from a terminal.

--json prints one object: model, session, text, reasoning, token_ids, finish_reason, usage,
timings, logprobs where --set logprobs=K asks for them, and error where there is one. Where no
answer began, it holds nothing but error, with its type and message.

\b
Exit codes:
  0    the question was answered, or cut at --max-new-tokens
  1    the generation failed; what came before the error is printed
  2    the command, the model or the question cannot be used
  130  Ctrl-C; what came before it is printed
  141  the reader of the answer went away
"""
"""The end of the help of `lmchat chat`."""


def exit_code(error: Error) -> int:
    """REFUSED where asking for something else helps, FAILED where asking was right."""
    return REFUSED if isinstance(error, InvalidRequest | NotFound | ModelError) else FAILED


def error_object(error: Error) -> dict[str, str]:
    """What `--json` prints of an error: its class and its words."""
    return {"type": type(error).__name__, "message": str(error)}


def open_missing_files() -> None:
    """Writes to stdout and stderr go nowhere where the caller closed them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process


def replace_undecodable() -> None:
    """What is no text of the locale is read as U+FFFD and written as "?"."""
    for file in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")


def drop_output() -> None:
    """Nothing more can be written to stdout; the interpreter flushes it once again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: object) -> None:
    """A line for the person, on stderr."""
    print(f"lmchat: {text}", file=sys.stderr, flush=True)
