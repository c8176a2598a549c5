"""Persistence of sessions: the records, the protocol of a store, and the stores themselves.

Not here: the KV cache, which is in no store (`lmchat.kv`), and archives (`lmchat.archive`).
"""
