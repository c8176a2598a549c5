"""Loading: finds models, reads checkpoints, computes digests and packs weights.

Not here: how a config is read and the wiring of each model family (`turbomind.models`).
"""
