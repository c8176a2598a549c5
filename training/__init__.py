"""Trains memo, the chat model that ships with the project: its grammar, tokenizer and weights."""
