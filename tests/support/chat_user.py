"""A person at a chat in a terminal."""

from __future__ import annotations

from terminal import Terminal


class ChatUser:
    """Types at a chat and waits for what it says. `prompt` is what stands before the cursor when
    it is the person's turn."""

    def __init__(self, terminal: Terminal, prompt: str = "> ") -> None:
        self.terminal = terminal
        self.prompt = prompt

    def type(self, line: str, *expected: str, prompt: str | None = None) -> str:
        """Sends a line from the prompt; returns what the chat wrote until the next one."""
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
        """Sends a line and waits until some of its reply is on the screen; returns that."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.type(line)
        self.terminal.key("enter")
        self.terminal.wait(lambda: len(self.said(line)) > 20)
        return self.said(line)

    def said(self, line: str) -> str:
        """What stands behind the last such line that was sent; empty before it was."""
        _, sent, said = self.terminal.everything.rpartition(f"{self.prompt}{line}\n")
        return said if sent else ""

    def leave(self) -> None:
        """Ctrl-D at the prompt; the terminal must be as it was."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.key("ctrl-d")
        assert self.terminal.wait_end() == 0
        assert self.terminal.settings == self.terminal.settings_before
        assert not self.terminal.cursor_hidden
