"""HTTP below the dialects: connections, processes, keys, bodies and event streams.

Not here: routes and what requests mean (the dialects), errors, metrics.
"""
