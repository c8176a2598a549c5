"""HTTP below the dialects: connections, processes, keys, bodies and event streams.

Not here: routes and what requests mean (the dialects), errors, metrics, and what the configuration
checks (`lmchat.server.origins`, `lmchat.server.root_path`).
"""
