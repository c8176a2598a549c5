"""`lmchat sessions`: lists, searches and changes stored sessions without opening a model."""
