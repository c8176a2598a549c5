"""Opens an engine on stored pages in a new process and runs one turn.

The process reads one JSON object from stdin, writes "open" when the engine is open, waits for a
line (so that the caller can drop files from the page cache) and writes one JSON object. It is run
by its path and imports only `turbomind`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from turbomind import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 1}


def main() -> None:
    """Runs the turn."""
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
