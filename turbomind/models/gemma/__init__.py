"""The Gemma families, one file of wiring each.

Not here: what all families share (`turbomind.models.base`).
"""
