"""What the dialects share: checks of requests that do not depend on their form.

Not here: what belongs to HTTP rather than to a request's meaning (`lmchat.server.http`), errors.
"""
