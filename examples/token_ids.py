"""Uses turbomind alone: token ids in, token ids out, with a handle that keeps its KV cache.

python examples/token_ids.py [MODEL]
"""

import sys

import lmchat
import turbomind


def main(model: str | None = None) -> None:
    with turbomind.Engine(model or lmchat.bundled_model()) as engine:
        prompt = [5, 6, 7, 8]
        generation = engine.generate(prompt, max_new_tokens=8, temperature=0)
        print("generated:", generation.token_ids)

        with engine.open() as handle:
            handle.append(prompt)
            first = handle.generate(max_new_tokens=4, temperature=0).result()
            fork = handle.fork()  # shares every page
            handle.append([9])
            second = handle.generate(max_new_tokens=4, temperature=0).result()
            print("handle:   ", first.token_ids, second.token_ids, "of", handle.length, "tokens")
            fork.truncate(len(prompt))
            print("fork:     ", fork.token_ids)
            fork.close()

        print("scores:   ", [round(score, 2) for score in engine.score([*prompt, 9, 10])])


if __name__ == "__main__":
    main(*sys.argv[1:2])
