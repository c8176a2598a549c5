"""Records a chat with memo, the model that ships, and writes it as an animated SVG.

`make recording` runs `python tools/recording/record.py docs/images/chat.svg`: it starts the real
`lmchat chat` from a shell in a pseudo-terminal, types the lines of `scenes` and reads the screen
after each step. The chat computes on `cuda_emulated`, which runs the CUDA kernels on the CPU: memo
generates the same tokens there, but slowly enough to stop a reply with Ctrl-C. The frames have
fixed times, and the measured times are removed from the status lines, so that equal replies give
an equal file.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recording.pty_screen import PtyScreen
from recording.svg import Frame, Span, spans, write_svg

ROOT = Path(__file__).resolve().parents[2]
COLUMNS, ROWS = 88, 24
DEVICE = "cuda_emulated"
TITLE = "lmchat in a terminal: a session that is edited, stopped, continued, killed and resumed"
SHELL_PROMPT, CHAT_PROMPT = "$ ", "> "
TYPED = 3  # characters that are typed between two frames
SPOKEN = 3  # words of a reply that are shown between two frames
TYPING, SPEAKING, PAUSE, READING, END = 0.12, 0.14, 0.7, 1.8, 5.0
"""Seconds that a frame is shown: while typing, in a reply, before Enter, after a step, the last."""
STORY_STOP = "fell over"
"""Words of the story after which Ctrl-C is pressed."""
IDLE = 2.0
"""Seconds for the chat to write the KV cache of a turn to disk before it is killed."""
_TIMES = re.compile(r" · TTFT [\d.,]+ m?s| · TTFT <1 ms| · [\d.,]+ tok/s")


class Recorder:
    """Types at a shell with `lmchat` on its path, and collects frames.

    Args:
        screen: The pseudo-terminal of the shell.
        folder: The folder with the chat's data and its process id.
    """

    def __init__(self, screen: PtyScreen, folder: Path) -> None:
        self.screen = screen
        self.frames: list[Frame] = []
        self.caption = ""
        self._folder = folder

    def start(self, line: str) -> None:
        """Types a command line at the shell and waits for the chat's prompt."""
        self.type(SHELL_PROMPT, line)
        self.screen.write("\r")
        self._wait_prompt(CHAT_PROMPT)
        self._add(READING)

    def ask(self, line: str, *, whole: int = 0, shown: int = 0) -> None:
        """Sends a line to the chat and records its reply.

        Args:
            line: The message or command.
            whole: Characters of it that are typed at once.
            shown: Words of the reply that are on the screen from the start.
        """
        self.type(CHAT_PROMPT, line, whole)
        self.screen.write("\r")
        self._wait_reply(line)
        self._add_reply(line, shown)

    def ask_and_stop(self, line: str, after: str) -> int:
        """Sends a message and presses Ctrl-C once the reply has the words `after`.

        Returns:
            The number of words of the stopped reply.
        """
        self.type(CHAT_PROMPT, line)
        self.screen.write("\r")
        self.screen.wait(lambda: after in self._after(line), f"{after!r} in the reply")
        self.screen.write("\x03")
        self._wait_reply(line)
        return self._add_reply(line, 0)

    def kill(self) -> None:
        """Kills the chat's process with SIGKILL, as `kill -9` does, and waits for the shell."""
        time.sleep(IDLE)
        os.kill(int((self._folder / "pid").read_text()), signal.SIGKILL)
        self._wait_prompt(SHELL_PROMPT)
        self._add(READING)

    def type(self, prompt: str, line: str, whole: int = 0) -> None:
        """Types a line at a prompt, with a frame every few characters."""
        self._wait_prompt(prompt)
        at = 0
        while at < len(line):
            end = min(len(line), max(whole, at + TYPED))
            self.screen.write(line[at:end])
            typed = (prompt + line[:end]).rstrip()
            self.screen.wait(lambda typed=typed: self._line() == typed, repr(typed))  # type: ignore[misc]
            self.screen.settle()
            self._add(TYPING)
            at = end
        self._add(PAUSE)

    # --- frames ----------------------------------------------------------------------------------

    def _add(self, seconds: float) -> None:
        self.frames.append(Frame(self._rows(), self.screen.cursor, self.caption, seconds))

    def _add_reply(self, line: str, shown: int) -> int:
        """Adds frames in which the reply on the screen appears word by word; returns its words."""
        rows, first = self._rows(), self._row_of(line) + 1
        last = next(i for i in range(first, len(rows)) if _is_notice(_text(rows[i])))
        words = sum(len(_text(row).split()) for row in rows[first:last])
        for count in range(shown, words, SPOKEN):
            partial = [*rows[:first], *_first_words(rows[first:last], count)]
            self.frames.append(Frame(_padded(partial), None, self.caption, SPEAKING))
        self._add(READING)
        return words

    def _rows(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            _without_times(spans(line, self.screen.styles(row)))
            for row, line in enumerate(self.screen.lines)
        )

    # --- the screen ------------------------------------------------------------------------------

    def _line(self) -> str:
        return self.screen.lines[self.screen.cursor[0]]

    def _wait_prompt(self, prompt: str) -> None:
        self.screen.wait(
            lambda: self._line() == prompt.rstrip() and self.screen.cursor[1] == len(prompt),
            f"the prompt {prompt!r}",
        )
        self.screen.settle()

    def _wait_reply(self, line: str) -> None:
        self.screen.wait(lambda: " new + " in self._after(line), "the end of the reply")
        self._wait_prompt(CHAT_PROMPT)

    def _row_of(self, line: str) -> int:
        """Returns the last row that shows the line as it was sent, -1 before that."""
        sent = CHAT_PROMPT + line
        return max((i for i, text in enumerate(self.screen.lines) if text == sent), default=-1)

    def _after(self, line: str) -> str:
        row = self._row_of(line)
        return "" if row < 0 else " ".join(self.screen.lines[row + 1 :])


def scenes(recorder: Recorder) -> None:
    """Types the dialogue of the recording."""
    recorder.caption = "a session remembers"
    recorder.start("lmchat chat")
    recorder.ask("My dog is called Max.")
    recorder.caption = "/edit replaces an earlier question; the old branch stays"
    recorder.ask("/edit 1 My dog is called Bruno.", whole=len("/edit 1 "))
    recorder.ask("What is my dog called?")
    recorder.caption = "Ctrl-C stops a reply; its text stays"
    words = recorder.ask_and_stop("Tell me a story about my dog.", STORY_STOP)
    recorder.caption = "/continue goes on with the same tokens"
    recorder.ask("/continue", whole=len("/continue"), shown=words)
    recorder.caption = "kill -9 from another terminal"
    recorder.kill()
    recorder.caption = "--continue resumes the session from disk"
    recorder.start("lmchat chat --continue")
    recorder.ask("What is my dog called?")
    recorder.frames.append(recorder.frames.pop().lasting(END))


def record(play: Callable[[Recorder], None] = scenes, device: str = DEVICE) -> list[Frame]:
    """Runs the chat and returns the frames of what `play` does with it.

    Args:
        play: Types at the recorder.
        device: The device that the chat computes on.
    """
    with tempfile.TemporaryDirectory(prefix="lmchat-recording-") as name:
        folder = Path(name)
        with _shell(folder, device) as screen:
            recorder = Recorder(screen, folder)
            play(recorder)
            return recorder.frames


@contextmanager
def _shell(folder: Path, device: str) -> Iterator[PtyScreen]:
    """A shell with a fresh data directory and a `lmchat` that writes its process id."""
    code = "import conftest; from lmchat.cli.main import main; main()"
    command = folder / "lmchat"
    command.write_text(
        f"#!/bin/sh\necho $$ > {shlex.quote(str(folder / 'pid'))}\n"
        f"exec {shlex.quote(sys.executable)} -c '{code}' \"$@\" --device {device}\n"
    )
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "LMCHAT_HOME": str(folder / "data"),
        "TERM": "xterm-256color",
        "PS1": SHELL_PROMPT,
        "BASH_SILENCE_DEPRECATION_WARNING": "1",
    }
    for unwanted in ("COLUMNS", "LINES", "NO_COLOR", "PROMPT_COMMAND"):
        environment.pop(unwanted, None)
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with PtyScreen(shell, columns=COLUMNS, rows=ROWS, env=environment) as screen:
        yield screen


def _text(row: tuple[Span, ...]) -> str:
    return " ".join(text for _column, text, _style in row)


def _is_notice(text: str) -> bool:
    return text.startswith("stopped") or " new + " in text


def _without_times(row: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple((column, _TIMES.sub("", text), style) for column, text, style in row)


def _first_words(rows: tuple[tuple[Span, ...], ...], count: int) -> list[tuple[Span, ...]]:
    """Returns the rows with their first `count` words in all."""
    found = []
    for row in rows:
        shown: list[Span] = []
        for column, text, style in row:
            words = text.split(" ")[: max(0, count)]
            count -= len(text.split(" "))
            if words:
                shown.append((column, " ".join(words), style))
        found.append(tuple(shown))
    return found


def _padded(rows: list[tuple[Span, ...]]) -> tuple[tuple[Span, ...], ...]:
    return (*rows, *[()] * (ROWS - len(rows)))


def main() -> None:
    """Writes the recording to the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="the SVG file to write")
    file: Path = parser.parse_args().file
    svg = write_svg(record(), COLUMNS, ROWS, TITLE)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(svg, encoding="utf-8")
    print(f"{file}: {len(svg):,} bytes")


if __name__ == "__main__":
    main()
