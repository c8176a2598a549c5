"""Continues a session in a new engine: tokens and KV cache come from the disk.

python examples/resume.py [MODEL]
"""

import sys
import tempfile

import lmchat


def main(model: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with lmchat.ChatEngine(model, store=folder) as engine:
            chat = engine.session("trip", system="You are brief.")
            chat.set(temperature=0, max_new_tokens=24)
            print(chat.send("My name is Mirela. " + "I like long walks by the sea. " * 12).text)

        with lmchat.ChatEngine(model, store=folder) as engine:  # another process, another day
            chat = engine.session("trip")
            chat.warm()  # optional: loads the KV cache before the message is there
            reply = chat.send("What's my name?")
            print(reply.text)
            print(f"{reply.usage.cached_tokens} of {reply.usage.prompt_tokens} tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:2])
