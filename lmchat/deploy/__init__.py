"""A deployment: several `lmchat serve` processes (replicas) behind HAProxy.

- `placement`: the cores, GPUs and memory of each replica.
- `launcher`: starts the replicas and the proxy, reports on them and ends them.
- `process`: one child process, which is started again when it ends.
- `liveness`: whether a process does anything, and waits that end.
- `proxy`: HAProxy's program and configuration.
- `printed`: files for other supervisors.
- `registry`: the one deployment of a data directory, and requests to its launcher.
- `replica`: what a replica has from its launcher.

Not here: what replicas share and how a session moves between them (`lmchat.store`), the command
line, and the page's paths, which the caller hands in.
"""
