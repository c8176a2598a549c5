"""Texts for remote clients: bounded, and without paths, host names and process ids.

Errors, notices, model names and lists are written for the user of the machine, who needs to know
which file and which process. A server passes them through these functions before it sends them.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TypeVar

from lmchat.errors import PUBLIC, EngineClosed, Error, InternalError, ModelError, StoreError
from lmchat.store.records import Summary
from turbomind.shown import cut

MOST = 500
"""Longest text, in characters."""

MOST_NAME = 200
"""Longest name of a model, in characters."""

_FIXED: tuple[tuple[type[Error], str], ...] = (
    (StoreError, "the server cannot read or write its store of sessions; its log has the reason"),
    (ModelError, "the model cannot do this; the server's log has the reason"),
    (EngineClosed, "the server is closing"),
    (InternalError, "an internal error; the server's log has the reason"),
)
_PROCESS = re.compile(r"\bprocess \d+(?: on '[^']*')?")
_PATH = re.compile(
    r"(?<![\w.:/~-])"  # at the start of a word
    r"(?:~[\w.-]*|\.{1,2}|[A-Za-z]:)?"  # home, relative, or a drive
    r"[/\\][^\s'\"`,;:()]*[^\s'\"`,;:().]"
)
_MODELS = re.compile(r"the model is (.+), and was (.+)$")
_WEIGHTS = re.compile(r"the weights of (.+), or how they are computed, have changed$")


def public_message(error: BaseException) -> str:
    """Returns the text of an error for a remote client.

    Errors that are the caller's keep their text; those of the server's store, model and memory have
    a fixed one, and the text of the error itself belongs into the log.
    """
    own = getattr(error, PUBLIC, None)
    if isinstance(own, str):
        return public_text(own)
    if not isinstance(error, Error):
        return _FIXED[-1][1]
    for kind, text in _FIXED:
        if isinstance(error, kind):
            return text
    return public_text(str(error))


def public_notice(notice: str) -> str:
    """Returns a notice of a reply for a remote client."""
    for pattern in (_MODELS, _WEIGHTS):
        found = pattern.search(notice)
        if found is not None:
            for group in range(found.re.groups, 0, -1):
                start, end = found.span(group)
                notice = notice[:start] + public_model(found[group]) + notice[end:]
            return public_text(notice)
    return public_text(notice)


def public_model(name: str) -> str:
    """Returns the name of a model for a remote client: of a path, the last part."""
    is_path = name.startswith(("/", "~", ".", "\\")) or name[1:3] in (":\\", ":/")
    if is_path or name.count("/") > 1 or "\\" in name:
        name = re.split(r"[/\\]", name.rstrip("/\\"))[-1] or "model"
    return cut(name, MOST_NAME)


def public_busy(busy: str) -> str:
    """Returns `Summary.busy` for a remote client: empty, or "another process"."""
    return "another process" if busy else ""


_Listed = TypeVar("_Listed", bound=Summary)


def public_summary(summary: _Listed) -> _Listed:
    """Returns an entry of a list of sessions for a remote client."""
    return replace(
        summary,
        title=cut(summary.title, MOST),
        model=public_model(summary.model),
        fingerprint="",
        busy=public_busy(summary.busy),
        snippet=cut(summary.snippet, MOST),
    )


def public_text(text: str) -> str:
    """Returns a text with processes and absolute paths replaced, and cut to MOST characters."""
    # A path that is cut is none: the text is shortened first, and once more at its end.
    text = _PROCESS.sub("another process", cut(text, 4 * MOST))
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "/home")
    return cut(_PATH.sub("(path)", text), MOST)
