"""Reads keys as terminals send them: every spelling of Enter with a modifier, and no unknown one.

prompt_toolkit takes some of these spellings for Enter, and inserts what it does not know as text.
"""

from __future__ import annotations

import re

from prompt_toolkit.input import Input
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.input.vt100_parser import Vt100Parser

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-Z\\-~]")  # ECMA-48, but for Linux' "ESC [ ["
_BEGINNING = re.compile(r"\x1b(\[[0-?]*[ -/]*)?")
_CURSOR = re.compile(r"\x1b\[\d+;\d+R")  # the terminal's answer to a question for its cursor
_ENTER = re.compile(r"\x1b\[(?:(?:13|57414)(?:;(\d+)(?::\d+)?)?u|27;(\d+);13~)")
"""Enter as CSI u (also the keypad's) and as xterm's modifyOtherKeys have it."""

_MODIFIERS = 0b1111  # of the number less one: shift, alt, control, super; not the locks
_NEW_LINE = "\x1b\r"  # Alt-Enter


class KeyParser(Vt100Parser):
    """Feeds prompt_toolkit's parser with the sequences that it knows."""

    _held = ""  # the beginning of a sequence

    def reset(self, request: bool = False) -> None:
        """Forgets what was fed."""
        self._held = ""
        super().reset(request)

    def feed(self, data: str) -> None:
        """Takes the next characters from the terminal."""
        data, self._held = self._held + data, ""
        while data:
            at = data.find("\x1b")
            if self._in_bracketed_paste or at < 0:
                super().feed(data)
                return
            super().feed(data[:at])
            data = data[at:]
            if found := _SEQUENCE.match(data):
                super().feed(_as_known(found[0]))
                data = data[found.end() :]
            elif _BEGINNING.fullmatch(data):
                self._held = data
                return
            else:
                super().feed(data[0])
                data = data[1:]

    def flush(self) -> None:
        """Takes what is held as it is: no more of it comes."""
        held, self._held = self._held, ""
        super().feed(held)
        super().flush()


def with_key_parser(keys: Input) -> Input:
    """Makes the input of a terminal read keys with `KeyParser`."""
    if isinstance(keys, Vt100Input):
        keys.vt100_parser = KeyParser(keys.vt100_parser.feed_key_callback)
    return keys


def _as_known(sequence: str) -> str:
    """Returns the sequence that means the same and has a meaning here; "" if there is none."""
    if enter := _ENTER.fullmatch(sequence):
        modifiers = int(enter[1] or enter[2] or "1") - 1
        return _NEW_LINE if modifiers & _MODIFIERS else "\r"
    return sequence if sequence in ANSI_SEQUENCES or _CURSOR.fullmatch(sequence) else ""
