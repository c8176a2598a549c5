"""Holds several conversations at once with asyncio; the engine batches them.

python examples/many_sessions.py [MODEL]
"""

import asyncio
import sys

import lmchat

NAMES = ("Ada", "Grace", "Edsger", "Barbara")


async def converse(engine: lmchat.AsyncChatEngine, name: str) -> str:
    chat = await engine.session(name.lower())
    await chat.send(f"My name is {name}.", temperature=0, max_new_tokens=24)
    text = ""
    async with chat.stream("What's my name?", temperature=0, max_new_tokens=24) as stream:
        async for delta in stream:
            text += delta
    return text


async def main(model: str | None = None) -> None:
    async with lmchat.AsyncChatEngine(model, store="memory") as engine:
        answers = await asyncio.gather(*(converse(engine, name) for name in NAMES))
    for name, answer in zip(NAMES, answers, strict=True):
        print(f"{name}: {answer}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
