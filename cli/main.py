"""The entry point: runs the command line, and says how it ended."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a command; an error of ours is one line on stderr and an exit code.

    A command that was asked for JSON prints {"error": {"type", "message"}} on stdout as well.
    """
    try:
        _run()
    except KeyboardInterrupt:  # while importing or opening something
        sys.exit(130)


def _run() -> None:
    # Imported here, so that Ctrl-C is quiet from the first moment on.
    import json

    from turbomind.descriptors import explain_open_file_limit
    from turbomind.errors import Error

    from .app import app
    from .errors import (
        FAILED,
        drop_output,
        error_object,
        exit_code,
        note,
        open_missing_files,
    )

    open_missing_files()
    asked: dict[str, object] = {}
    try:
        with explain_open_file_limit("what this needs"):
            app(obj=asked)
    except Error as error:
        if asked.get("json"):
            print(json.dumps({"error": error_object(error)}), flush=True)
        note(error)
        sys.exit(exit_code(error))
    except OSError as error:  # a full disk behind stdout
        drop_output()
        note(error)
        sys.exit(FAILED)
