"""Terminal input, Markdown, tables, and a live part that is repainted in place.

Not here: what a command draws: sessions (`cli.sessions`), replies (`cli.chat`), measurements
(`cli.bench`).
"""
