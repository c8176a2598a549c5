"""`lmchat chat`: the interactive chat, its commands, and one answer at a time in scripts.

Not here: drawing and reading keys (`cli.terminal`), lists of stored sessions (`cli.sessions`), and
what the verbs do (`lmchat.sessions`).
"""
