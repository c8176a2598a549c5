"""Parts of `training.evaluate`: chats that end with a question, and the counting of answers.

Not here: the chats to train on (`training.grammar`), and figures (`training/results`).
"""
