"""From a model folder or a hub name to packed weights: hub, checkpoints, digests, loader.

Not here: how a config is read and the wiring of each model family (`turbomind.models`).
"""
