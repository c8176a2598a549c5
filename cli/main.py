"""The entry point: runs a command and sets the exit code."""

from __future__ import annotations

import sys

from .init import run_in_child


def main() -> None:
    """Runs a command. A `turbomind` error becomes one line on stderr and an exit code.

    With --json, {"error": {"type", "message"}} is also printed on stdout.
    """
    try:
        run_in_child()
        _run()
    except KeyboardInterrupt:  # while modules are imported or files are opened
        sys.exit(130)


def _run() -> None:
    # Imported here so that Ctrl-C prints no traceback while modules are loading.
    import json
    import os

    # Before tokenizers and numpy are imported: their threads would have nothing to compute.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from turbomind.config.limits import explain_limits
    from turbomind.errors import Error

    from .app import app
    from .errors import (
        FAILED,
        drop_output,
        error_object,
        exit_code,
        explained,
        note,
        open_missing_files,
    )

    open_missing_files()
    os.environ["TERM"] = os.environ.get("TERM") or "dumb"  # for rich and prompt_toolkit too
    asked: dict[str, object] = {}
    try:
        with explain_limits("what this needs"):
            app(obj=asked)
    except Error as error:
        if asked.get("json"):
            print(json.dumps({"error": error_object(error)}), flush=True)
        note(error)
        sys.exit(exit_code(error))
    except OSError as error:  # such as a full disk
        drop_output()
        note(explained(error))
        sys.exit(FAILED)
