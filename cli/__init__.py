"""The `lmchat` command; installs as `lmchat.cli`.

Each command is a folder or a file; `terminal` draws for all of them.

Not here: sessions, archives, the server and deployments (`lmchat`), and the chat page (`webui`).
"""
