"""`lmchat bench serve`: load on an HTTP server, and what its clients see.

Not here: the server (`lmchat.server`), and servers of other engines (`benchmarks`).
"""
