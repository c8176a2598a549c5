"""Terminal input, Markdown, tables, and a live part that is repainted in place."""
