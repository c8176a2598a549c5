"""Sessions over HTTP: `/v1/sessions`.

A session is the same object here as in the terminal and in Python. The streams of turns and of
`events` have one form, which `stream` documents.

Not here: the verbs themselves (`lmchat.sessions`), and OpenAI's conversations
(`lmchat.server.responses`).
"""

from lmchat.server.sessions import archives, engine, records, turns, verbs

routers = (
    records.router,
    archives.router,
    turns.router,
    verbs.router,
    engine.router,
)

__all__ = ["routers"]
