"""Sessions: their verbs, the planning of a turn, its execution, and recovery after a crash.

Not here: how tokens are generated (`lmchat.generation`), where sessions are persisted
(`lmchat.store`) and which engine handles hold their KV (`lmchat.kv`).
"""
