"""Formats of tokenizers beside `tokenizer.json`: SentencePiece models and GGUF metadata.

Not here: what a tokenizer does (`lmchat.text.tokenizer`).
"""
