"""A chat in a process of its own, to be killed: `killed_chat.py MODEL HOME SETTINGS TEXT...`.

Each text is sent in turn; SETTINGS (JSON) are those of the last one, whose text is written as it
comes, one JSON string a line. The ones before are "sent" when they are acknowledged.
"""

from __future__ import annotations

import json
import sys

import lmchat

SETTINGS = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {0: -100.0, 2: -100.0}}


def main() -> None:
    """Until it is killed, or the last reply has ended."""
    model, home, settings, *texts = sys.argv[1:]
    options = {"dtype": "float32", "threads": 1, "cache_memory": "32MiB"}
    with lmchat.ChatEngine(model, store=home, **options) as engine:
        chat = engine.session("trip")
        for text in texts[:-1]:
            chat.send(text, **SETTINGS)
            print('"sent"', flush=True)
        with chat.stream(texts[-1], **json.loads(settings)) as stream:
            for part in stream:
                print(json.dumps(part), flush=True)
        print('"done"', flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
