"""Conversations without a session: messages that a client sends again and again.

Nothing is stored. The replies that this process produced and the engine handles of recent
conversations are kept in memory, within bounds, so that a request which extends or branches from an
earlier one computes only its new tokens.

Not here: the prompt of the messages (`lmchat.text.conversation`).
"""
