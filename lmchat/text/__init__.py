"""Text and token ids: tokenizers, chat templates, prompts, and parsing of replies.

Not here: the transcript itself (`lmchat.store.turns`) and generation (`lmchat.generation`).
"""
