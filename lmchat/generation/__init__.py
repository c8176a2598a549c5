"""One generation: its settings, its admission to the engine, its events and its reply.

Not here: which prompt a session generates from (`lmchat.sessions`).
"""
