"""A process of its own that opens an engine on stored pages and takes one turn.

One JSON object comes on stdin; "open" is written when the engine is there, and a line is waited for
before the turn, so that files can be dropped in between; then one JSON object is written. Run by
its path, so it knows of nothing here but `turbomind`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from turbomind import Engine, Stream

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 1}


def main() -> None:
    """Takes the turn."""
    asked = json.loads(sys.stdin.readline())
    history, salt = asked["history"], asked["salt"]
    begin = time.perf_counter()
    with Engine(asked["model"], **asked["options"]) as engine:
        opened = time.perf_counter() - begin
        print("open", flush=True)
        sys.stdin.readline()
        predicted = engine.predict_ttft(history, len(asked["new"]), salt=salt)
        with engine.open(salt=salt, persist=True) as handle:
            handle.append(history + asked["new"])
            seconds, done = _timed(lambda: handle.generate(**GREEDY))
            kept, _ = _timed(lambda: handle.advance(len(history), asked["other"], **GREEDY))
    report = {
        "open_seconds": opened,
        "seconds": seconds,
        "kept_seconds": kept,
        "predicted_seconds": predicted,
        "prompt_tokens": done.prompt_tokens,
        "reused_tokens": done.reused_tokens,
        "loaded_tokens": done.loaded_tokens,
    }
    print(json.dumps(report), flush=True)


def _timed(ask: Callable[[], Stream]) -> tuple[float, Any]:
    begin = time.perf_counter()
    done = ask().result()
    return time.perf_counter() - begin, done


if __name__ == "__main__":
    main()
