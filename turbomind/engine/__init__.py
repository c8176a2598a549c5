"""The engine: requests of token ids, handles on sequences, streams of events, KV pages and tiers.

Not here: what an engine is configured with and may use (`turbomind.config`), how a model gets into
it (`turbomind.loading`).
"""
