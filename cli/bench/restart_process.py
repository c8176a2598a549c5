"""A process of its own that opens an engine on stored pages and takes one turn.

One JSON object comes on stdin; "open" is written when the engine is there, and a line is waited for
before the turn, so that files can be dropped in between; then one JSON object is written. Run by
its path, so it knows of nothing here but `turbomind`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from turbomind import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 1}


def main() -> None:
    """Takes the turn."""
    asked = json.loads(sys.stdin.readline())
    history, salt = asked["history"], asked["salt"]
    with Engine(asked["model"], **asked["options"]) as engine:
        print("open", flush=True)
        sys.stdin.readline()
        predicted = engine.predict_ttft(history, len(asked["new"]), salt=salt)
        with engine.open(salt=salt, persist=True) as handle:
            handle.append(history + asked["new"])
            begin = time.perf_counter()
            done = handle.generate(**GREEDY).result()
            seconds = time.perf_counter() - begin
    report = {
        "seconds": seconds,
        "predicted": predicted,
        "prompt": done.prompt_tokens,
        "reused": done.reused_tokens,
        "loaded": done.loaded_tokens,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
