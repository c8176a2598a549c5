"""Engines and sessions behind `lmchat serve`, with the names of `ChatEngine` and `Session`.

    engine = lmchat.connect("http://127.0.0.1:23333")
    print(engine.session("trip").send("Plan a day in Kyoto.").text)

- `http`: requests, and errors of the server as errors of `lmchat`.
- `values`: JSON objects as the value types of `lmchat`.
- `generation`: one running reply, whose stream attaches again after a lost connection.
- `session`, `engine`: the sessions and the engine.

httpx is imported by this package only.

Not here: the routes that it calls (`lmchat.server`), and engines in this process.
"""
