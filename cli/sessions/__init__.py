"""`lmchat sessions`: lists, searches and changes stored sessions without opening a model.

Not here: the store (`lmchat.store`), the format of archives (`lmchat.archive`), and the chat
(`cli.chat`).
"""
