"""Moves in the tree of a conversation and prints the tokens that each move computes.

python examples/branches.py [MODEL]
"""

import sys

import lmchat


def show(verb: str, reply: lmchat.Reply) -> None:
    computed = reply.usage.prompt_tokens - reply.usage.cached_tokens
    print(f"{verb}: {reply.text!r} ({computed} prompt tokens computed)")


def main(model: str | None = None) -> None:
    with lmchat.ChatEngine(model, store="memory") as engine:
        chat = engine.session("pets")
        chat.set(temperature=0, max_new_tokens=24)
        chat.send("My dog is called Waffles.")
        show("send", chat.send("What's my dog's name?"))
        show("retry", chat.retry(temperature=0.8, seed=1))

        chat.undo()
        show("edit", chat.edit(0, "My dog is called Sprocket."))
        show("send", chat.send("What's my dog's name?"))
        print("branches of the first question:", [b.turn.text for b in chat.branches(0)])

        chat.switch(0, 0)  # back to Waffles: its KV cache is still there
        show("send", chat.send("Where does my dog live?"))
        show("fork", chat.fork("pets-2").send("Is it a good name?"))


if __name__ == "__main__":
    main(*sys.argv[1:2])
