"""The login page where the server has keys. Its cookie opens the page; `/v1` wants the key."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from lmchat.server.errors import HttpError
from lmchat.server.http.logins import LASTS, Logins

COOKIE = "lmchat_login"
_MOST_BYTES = 4096  # of the form
_PAGE = (Path(__file__).parent / "static" / "login.html").read_text(encoding="utf-8")


async def log_in(logins: Logins, request: Request) -> Response:
    """Answers the form of the login page with a cookie, or with the page and what is wrong."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            return page("The form is too large.", 413)
    try:
        form = parse_qs(body.decode("latin-1"), max_num_fields=10)
        name, key = (form.get(part, [""])[0].strip() for part in ("name", "key"))
        value = logins.log_in(name, key, request.client.host if request.client else "")
    except ValueError:
        return page("The form has too many fields.", 400)
    except HttpError as error:
        return page(str(error), error.status)
    root = request.scope["root_path"]
    response = RedirectResponse(f"{root}/", 303)
    response.set_cookie(COOKIE, value, LASTS, path=f"{root}/", httponly=True, samesite="strict")
    return response


def log_out(request: Request) -> Response:
    """Ends the login of a browser."""
    root = request.scope["root_path"]
    response = RedirectResponse(f"{root}/login", 303)
    response.delete_cookie(COOKIE, path=f"{root}/", httponly=True, samesite="strict")
    return response


def page(wrong: str = "", status: int = 200) -> Response:
    """Returns the login page, with a sentence about what is wrong."""
    return HTMLResponse(_PAGE.replace("{wrong}", wrong), status, {"Cache-Control": "no-store"})
