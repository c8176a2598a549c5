"""A chat in a process of its own, to be killed: `killed_chat.py MODEL HOME SETTINGS SHOWN TEXT...`

Each text is sent in turn; SETTINGS (JSON) are those of the last one, whose text is written as it
comes, one JSON string a line; after SHOWN pieces the process kills itself (-1: somebody else does).
The texts before are "sent" when they are acknowledged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import lmchat

SETTINGS = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {0: -100.0, 2: -100.0}}


def main() -> None:
    """Until it is killed, or the last reply has ended."""
    model, home, settings, shown, *texts = sys.argv[1:]
    options = {"threads": 1, "cache_memory": "32MiB"}
    with lmchat.ChatEngine(model, store=home, **options) as engine:
        chat = engine.session("trip")
        for text in texts[:-1]:
            chat.send(text, **SETTINGS)
            print('"sent"', flush=True)
        generation = chat.start_send(texts[-1], **json.loads(settings))
        left, one = [int(shown)], threading.Lock()

        def show() -> None:  # on the reader's thread, so that nothing runs ahead
            with one:  # the first call comes from here
                for part in generation.take_parts():
                    if isinstance(part, lmchat.Delta):
                        print(json.dumps(part.text), flush=True)
                        left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

        generation.listen(show)
        generation.wait()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
