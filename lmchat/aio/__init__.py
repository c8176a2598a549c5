"""The session API for asyncio, with the names of the blocking one.

Nothing here blocks the loop's thread. Properties read what is in memory, in constant time and
without a lock. All else is awaited: calls that wait for the engine or the store, or that read all
turns, run in a thread of the engine's executor.

Not here: what sessions and engines do (`lmchat.sessions`, `lmchat.engine`).
"""
