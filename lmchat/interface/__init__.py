"""What an engine and a session are to their users, here and behind a server.

`EngineApi` and `SessionApi` are the bases of `ChatEngine` and `RemoteEngine`, and of `Session` and
`RemoteSession`. What both kinds do in the same way is defined here, once.

Not here: how either kind does the rest (`engine`, `sessions`, `client`), nor asyncio (`aio`).
"""
