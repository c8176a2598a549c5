"""Trains memo, the chat model that ships with the project: its grammar, tokenizer and weights.

Not here: the weights that ship (`lmchat/memo`), and what runs them (`turbomind`).
"""
