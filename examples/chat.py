"""Holds a short conversation and prints what each turn cost.

python examples/chat.py [MODEL]
"""

import sys

import lmchat


def main(model: str | None = None) -> None:
    with lmchat.ChatEngine(model, store="memory") as engine:
        chat = engine.session("friend")
        for message in ("My dog is called Waffles.", "What's my dog's name?"):
            print(">", message)
            with chat.stream(message, temperature=0, max_new_tokens=40) as stream:
                for delta in stream:
                    print(delta, end="", flush=True)
            usage = stream.result().usage
            new = usage.prompt_tokens - usage.cached_tokens
            print(f"\n  {new} new + {usage.cached_tokens} cached")


if __name__ == "__main__":
    main(*sys.argv[1:2])
