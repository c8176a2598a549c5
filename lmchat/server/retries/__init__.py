"""Requests that a client repeats: each is stored once, whatever broke in between.

A request with an `Idempotency-Key` names itself. Without one, a request that is equal to the one
which the last turn of its session answers takes that turn over, if its client or its process has
gone before the client had the reply. Dialects describe a request as a `Door`; here is what finds
its turn, and who waits for it.

Not here: routes, and how a turn is stored (`lmchat.sessions`).
"""
