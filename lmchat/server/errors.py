"""Errors of requests as responses: OpenAI's error object, for every dialect that has no other."""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from lmchat.errors import (
    BAD_REQUEST,
    INTERNAL,
    LOGGABLE,
    SERVER,
    Error,
    InvalidRequest,
    Kind,
    Overloaded,
    kind_of,
)
from lmchat.public_text import public_message
from lmchat.server.root_path import PATH
from turbomind.config.limits import shortage
from turbomind.params import renamed
from turbomind.shown import shown

MAX_MESSAGE = 1000
"""Longest error message, in characters."""
MAX_PARAM = 200
"""Longest name of a field in an error, in characters."""

_SHORT = Kind(INTERNAL.error, 503, SERVER, "out_of_resources")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


E = TypeVar("E", bound=Error)


class HttpError(HTTPException):
    """A refusal that has no error of `lmchat`: a status, a message, and what else a client reads.

    It is an `HTTPException` because FastAPI passes only these on while it reads a body.

    Args:
        status: the HTTP status.
        message: what is wrong, the value seen and the value expected.
        param: name of the field that is wrong.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.param, self.code = status, param, code

    def __str__(self) -> str:
        return str(self.detail)


def refusal(field: str, seen: str, expected: str, code: str | None = None) -> HttpError:
    """Returns the refusal of a field's value.

    Args:
        field: name of the field.
        seen: a description of the value, of any length.
        expected: what it may be.
        code: a word for programs.
    """
    text = f"{field} is {bounded(seen, 100)}, expected {expected}"
    return HttpError(400, text, param=field, code=code)


def unsupported(field: str, hint: str = "") -> HttpError:
    """Returns the refusal of a field that this server does not support."""
    more = f": {hint}" if hint else ""
    return HttpError(400, f"{field} is not supported{more}", param=field, code="unsupported_field")


@contextlib.contextmanager
def in_field(name: str) -> Iterator[None]:
    """Names the field of a body in refusals that name none, such as those of an absent object."""
    try:
        yield
    except HttpError as error:
        error.param = error.param or name
        raise


def named(error: E, fields: Mapping[str, str]) -> E:
    """Returns an error in the names of a client.

    Args:
        error: the error.
        fields: the client's names of arguments and settings that it names otherwise.
    """
    return renamed(error, lambda name: fields.get(name, name))


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return _kind(error).status


def error_object(error: BaseException) -> dict[str, Any]:
    """Returns OpenAI's error object: {"error": {"message", "type", "param", "code"}}.

    It shows nothing of the process and the machine: such messages go to the log.
    """
    if isinstance(error, HttpError):
        status, kind, code, param = error.status, _type(error.status), error.code, error.param
    else:
        row = _kind(error)
        status, kind, code = row.status, row.type, row.code
        param = error.param if isinstance(error, InvalidRequest) else None
    message = str(error) if isinstance(error, HttpError) else public_message(error)
    if code == _SHORT.code:
        message = "the server lacks threads or open files; its log has the reason, try again later"
    if status == 500:
        message = "the server failed; its log has the reason"
    param = None if param is None else bounded(param, MAX_PARAM)
    return {"error": {"message": bounded(message), "type": kind, "param": param, "code": code}}


def code_of(error: BaseException) -> str | None:
    """Returns the word for programs of an error."""
    return _kind(error).code


def headers_of(error: BaseException) -> dict[str, str]:
    """Returns the headers of an error's response, such as when a retry can succeed."""
    if isinstance(error, Overloaded):
        seconds = max(0.0, float(getattr(error, "retry_after", 1.0)))
        return {
            "Retry-After": str(max(1, math.ceil(seconds))),
            "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
        }
    return dict(error.headers or {}) if isinstance(error, HttpError) else {}


def bounded(text: str, most: int = MAX_MESSAGE) -> str:
    """Returns at most `most` characters of a text, with an ellipsis where it is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def error_response(error: BaseException, path: str = "") -> JSONResponse:
    """Returns the response of an error, and logs one that is a bug.

    Args:
        error: the error.
        path: the request's path without the root path. Below `/v2` errors have the form of the
            Open Inference Protocol, {"error": "message"}.
    """
    status = status_of(error)
    if status >= 500 and not isinstance(error, HttpError):
        log_failure("a request failed", error)
    found = error_object(error)
    if path == "/v2" or path.startswith("/v2/"):
        found = {"error": found["error"]["message"]}
    return JSONResponse(found, status, headers_of(error))


def log_failure(what: str, error: BaseException) -> None:
    """Logs an error that is a bug, with the places in the code where it was raised.

    Its message may repeat a prompt. It is logged with the level "debug" only, unless it is marked
    as `lmchat.errors.loggable`; of a lack of threads or files, that text alone is logged.
    """
    log = logging.getLogger(__name__)
    is_logged = getattr(error, LOGGABLE, False) or log.isEnabledFor(logging.DEBUG)
    hidden = shortage(error) or "the message is logged at level debug"
    text = str(error) if is_logged else hidden
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    log.error("%s: %s (%s)\n%s", what, type(error).__name__, text, frames)


def install(app: FastAPI, refusals: Mapping[int, Callable[[Scope], HttpError]]) -> None:
    """Makes all errors of the app's routes responses of this form.

    Args:
        app: the app.
        refusals: return what is answered where the router refuses a request, by status.
    """

    async def respond(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.scope[PATH])

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_invalid(error), request.scope[PATH])

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if refusal := refusals.get(error.status_code):
            return error_response(refusal(request.scope), request.scope[PATH])
        found = HttpError(error.status_code, str(error.detail), headers=error.headers)
        return error_response(found, request.scope[PATH])

    app.add_exception_handler(Error, respond)
    app.add_exception_handler(HttpError, respond)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, respond)


def _kind(error: BaseException) -> Kind:
    kind = kind_of(error)
    if kind is INTERNAL and shortage(error) is not None:
        return _SHORT
    return kind


def _type(status: int) -> str:
    return _TYPES.get(status, BAD_REQUEST if status < 500 else SERVER)


def _invalid(error: RequestValidationError) -> HttpError:
    """Returns a refusal that names the first wrong field, its value and what is expected."""
    first = error.errors()[0]
    place = first["loc"][1:]  # after "body", "query", "path" or "header"
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    field = bounded(field.removeprefix("."), MAX_PARAM)
    if first["type"] == "json_invalid":
        return HttpError(400, "the body is not valid JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return HttpError(400, f"{field} is not supported", param=field, code="unsupported_field")
    if first["type"] == "missing":
        what = field or "the body"
        return HttpError(400, f"{what} is missing", param=field or None, code="missing_field")
    if first["type"] == "value_error":  # it has the value and what is expected
        text = bounded(str(first["ctx"]["error"]), 300)
    else:
        text = f"{shown(first.get('input'))}, expected {_expected(first)}"
    text = f"{field or 'the body'} is {text}"
    return HttpError(400, text, param=field or None)


_SENTENCES = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "setting": "{expected}",
    "string_pattern_mismatch": "a string like {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a string",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
}
"""What is expected, by pydantic's type of an error and with its values."""


def _expected(error: Mapping[str, Any]) -> str:
    """Returns what pydantic expects of a value."""
    form = _SENTENCES.get(error["type"])
    if form is not None:
        return form.format(**error.get("ctx", {}))
    return bounded(str(error["msg"]), 300)
