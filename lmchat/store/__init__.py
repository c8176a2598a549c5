"""Where sessions are persisted: the records, the protocol of a store, and the stores themselves.

Not here: the KV cache, which a store never holds (`lmchat.kv`), and archives (`lmchat.archive`).
"""
