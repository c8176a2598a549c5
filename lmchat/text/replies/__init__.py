"""The text of replies: their tokens, parts and form.

Not here: generation of the tokens (`lmchat.generation`), and prompts.
"""
