"""The KV cache of sessions: engine handles that hold it, and its pages in lower tiers.

Not here: the KV cache itself, which belongs to the engine (`turbomind`).
"""
