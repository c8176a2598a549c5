"""`lmchat chat`: the interactive chat, its commands, and one answer at a time in scripts."""
