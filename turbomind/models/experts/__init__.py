"""The families with experts, one file of wiring each.

Not here: Gemma 4, which has models with experts (`turbomind.models.gemma`).
"""
