"""GGUF: the file, its fields as a model's configuration, its tensors' names and types of blocks.

Not here: weights of other files (`turbomind.files`, `turbomind.quant`), and the tokenizer that a
GGUF file carries (`lmchat.text.formats`).
"""
