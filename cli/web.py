"""`lmchat web`: the chat page on the server of `lmchat serve`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest
from lmchat.server.http.keys import collect
from lmchat.server.http.sockets import is_loopback

from .serve.command import serving

if TYPE_CHECKING:
    from lmchat import AsyncChatEngine
    from lmchat.server.config import MountedApp, ServerConfig


def _mounts(engine: AsyncChatEngine, config: ServerConfig) -> Iterable[MountedApp]:
    from lmchat.webui.page import mounts

    found: Iterable[MountedApp] = mounts(engine, config)
    return found


def usage(url: str, uds: Path | None, _name: str, has_keys: bool) -> str:
    """Returns how the page is opened."""
    login = " and log in with a name and its key" if has_keys else ""
    return f"  open {url if uds is None else 'it through a proxy'} in a browser{login}"


_serve = serving(
    """Serve a chat page over the sessions of the terminal, and the API of lmchat serve.

    A reply belongs to its session: it goes on when the tab is closed, and every tab shows it.

    It needs the extra web: pip install 'lmchat[web]'.

    \b
    Examples:
      lmchat web
      lmchat web Qwen/Qwen2.5-0.5B-Instruct --port 8000
    """,
    _mounts,
    usage,
)


def check_page(host: str | None, keys: Mapping[str, str]) -> None:
    """Refuses a page that cannot be served.

    Args:
        host: the address; None: a Unix socket.
        keys: API keys and their owners.

    Raises:
        InvalidRequest: its packages are missing, or other machines would see it without a login.
    """
    if importlib.util.find_spec("gradio") is None:
        raise InvalidRequest("the page needs gradio: install it with pip install 'lmchat[web]'")
    if host is not None and not is_loopback(host) and not keys:
        raise InvalidRequest(
            f"--host is {host!r}, which other machines can reach: the page needs a key there "
            "($LMCHAT_API_KEY, --api-keys), also with --insecure"
        )


@functools.wraps(_serve)
def command(**options: Any) -> None:
    """Serves, if there can be a page."""
    host = options["host"] if options["uds"] is None else None
    check_page(host, collect(options["api_key"] or (), options["api_keys"]))
    _serve(**options)
