"""Pictures of reports: the check of their file names and of matplotlib."""

from __future__ import annotations

from pathlib import Path

from turbomind.errors import InvalidRequest


def check_plot(path: str) -> None:
    """Raises InvalidRequest if `path` cannot be plotted to, before the measurement."""
    if Path(path).suffix != ".png":
        raise InvalidRequest(f"--plot is {path!r}, expected a file name that ends in .png")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidRequest(f"--plot is {path!r}, expected it in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            '--plot needs matplotlib: install it with pip install "lmchat[plots]"'
        ) from None
