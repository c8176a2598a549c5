"""The paths of the page. All others are the server's.

The patterns are also those of HAProxy (`lmchat deploy`): extended regular expressions of POSIX,
without groups such as (?:...).
"""

from __future__ import annotations

import re

from lmchat.store.records import SESSION_ID

STATIC = "/page/static"
"""Path of the page's own files."""

FILES = rf"/page/v1/sessions/(import|{SESSION_ID}/export)"
"""Paths of archives for visitors of the page."""

APP = (
    rf"/|/login|/logout|{STATIC}/[a-z]+\.(js|css)|/(assets|static)/.+|/theme\.css|/favicon\.ico"
    r"|/gradio_api/(queue/join|queue/data|run/predict|app_id)/?"
)
"""Paths of the page and of Gradio."""


REPEATED = ("/gradio_api/run/predict", "/gradio_api/run/predict/")
"""Paths that an idle tab asks once a second. Its verbs have them too."""


def claims(path: str) -> bool:
    """Returns whether the page answers a path, archives aside."""
    return re.fullmatch(APP, path) is not None and ".." not in path
