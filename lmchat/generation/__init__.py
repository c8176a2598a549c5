"""One generation: its settings, its admission to the engine, its events and its reply.

Not here: the prompt from which a session generates (`lmchat.sessions`).
"""
