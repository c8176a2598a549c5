"""`lmchat serve`: options of the HTTP server, and its process.

Not here: the server (`lmchat.server`), and what a replica has from its launcher
(`lmchat.deploy.replica`).
"""
