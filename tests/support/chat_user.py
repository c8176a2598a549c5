"""A user of a chat in a terminal."""

from __future__ import annotations

from terminal import Terminal


class ChatUser:
    """Types at a chat and waits for its output.

    Args:
        terminal: The terminal of the chat.
        prompt: Text before the cursor when the chat waits for input.
    """

    def __init__(self, terminal: Terminal, prompt: str = "> ") -> None:
        self.terminal = terminal
        self.prompt = prompt

    def type(self, line: str, *expected: str, prompt: str | None = None) -> str:
        """Sends a line and returns the output until the next prompt.

        Args:
            line: The line.
            expected: Texts that the output must contain.
            prompt: The next prompt; None: the same as before.
        """
        terminal = self.terminal
        terminal.wait_prompt(self.prompt)
        before = len(terminal.everything)
        terminal.type(line)
        terminal.key("enter")
        self.prompt = prompt or self.prompt
        terminal.wait(lambda: all(text in terminal.everything[before:] for text in expected))
        terminal.wait_prompt(self.prompt)
        return terminal.everything[before:]

    def begin(self, line: str) -> str:
        """Sends a line and returns the start of its reply once it is on the screen."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.type(line)
        self.terminal.key("enter")
        self.terminal.wait(lambda: len(self.output_of(line)) > 20)
        return self.output_of(line)

    def output_of(self, line: str) -> str:
        """Returns the text after the last such line; empty before it was sent."""
        _, sent, output = self.terminal.everything.rpartition(f"{self.prompt}{line}\n")
        return output if sent else ""

    def leave(self) -> None:
        """Leaves with Ctrl-D and checks that the terminal is restored."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.key("ctrl-d")
        assert self.terminal.wait_end() == 0
        assert self.terminal.settings == self.terminal.settings_before
        assert not self.terminal.cursor_hidden
