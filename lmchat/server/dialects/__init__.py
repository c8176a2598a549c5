"""What the dialects share.

`sampling` and `messages` map fields of requests to settings and messages of the engine, `limits`
checks them, `models` names the model, and `results` maps replies to usage, metrics, finish reasons
and log-probabilities.

Not here: what belongs to HTTP rather than to a request's meaning (`lmchat.server.http`), errors.
"""
