"""The terminal: input, Markdown, and a live region that is painted again in place."""
