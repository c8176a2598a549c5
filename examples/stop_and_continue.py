"""Stops a reply in the middle and continues it: the result equals a reply that never stopped.

python examples/stop_and_continue.py [MODEL]
"""

import sys

import lmchat

QUESTION = "Tell me a story."
SETTINGS = {"temperature": 0, "max_new_tokens": 48}


def main(model: str | None = None) -> None:
    with lmchat.ChatEngine(model, store="memory") as engine:
        whole = engine.session("whole").send(QUESTION, **SETTINGS)

        chat = engine.session("stopped")
        with chat.stream(QUESTION, **SETTINGS) as stream:
            for count, _delta in enumerate(stream):
                if count == 4:
                    break  # leaving the block stops the reply and keeps what is there
        print("stopped after:", chat.turns[-1].text)
        rest = whole.usage.completion_tokens - len(chat.turns[-1].token_ids)
        continued = chat.continue_(max_new_tokens=max(1, rest)) if rest > 0 else whole
        print("continued:    ", continued.text)
        print("equal to a reply without a stop:", continued.token_ids == whole.token_ids)


if __name__ == "__main__":
    main(*sys.argv[1:2])
