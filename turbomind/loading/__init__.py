"""From a model folder or a hub name to packed weights: configurations, checkpoints, digests.

Not here: the wiring of each model family (`turbomind.models`).
"""
