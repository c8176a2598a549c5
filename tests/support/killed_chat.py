"""A chat in a process that is killed: `killed_chat.py MODEL DATA_DIR SETTINGS SHOWN TEXT...`

Each text is sent in turn; SETTINGS (JSON) apply to the last one. Its reply is written as it is
generated, one JSON string per line; after SHOWN pieces the process kills itself (-1: the caller
kills it). For each earlier text, "sent" is written when its turn is stored.
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
    """Runs until the process is killed or the last reply has ended."""
    model, data_dir, settings, shown, *texts = sys.argv[1:]
    options = {"threads": 1, "cache_memory": "32MiB"}
    with lmchat.ChatEngine(model, store=data_dir, **options) as engine:
        chat = engine.session("trip")
        for text in texts[:-1]:
            chat.send(text, **SETTINGS)
            print('"sent"', flush=True)
        generation = chat.start_send(texts[-1], **json.loads(settings))
        left, one = [int(shown)], threading.Lock()

        def show() -> None:  # on the reader's thread, so that no output is delayed
            with one:  # the first call is made by this thread
                for part in follower.take():
                    if isinstance(part, lmchat.Delta) and part.text:
                        print(json.dumps(part.text), flush=True)
                        left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

        follower = generation.follow()
        generation.listen(show)
        generation.wait()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
