"""Bodies of requests: strict models, and fields that are accepted without an effect."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator

from lmchat.errors import InvalidRequest
from lmchat.server.errors import named
from lmchat.server.http.json_body import parsed

MAX_FIELDS = 256
"""Most fields of one object. Each unknown one would be an error of its own."""


class Body(BaseModel):
    """A JSON body whose unknown fields are refused by name.

    Subclasses declare the fields that they use. A field of `IGNORED` is accepted with any value,
    because it does not change the answer. A field of `NEUTRAL` is accepted with these values, which
    ask for nothing. Every field may be null, which is the same as leaving it out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields, expected at most {MAX_FIELDS}")
        return {
            name: value
            for name, value in given.items()
            if value is not None
            and name not in cls.IGNORED
            and not any(_same(value, one) for one in cls.NEUTRAL.get(name, ()))
        }


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def example(**values: Any) -> ConfigDict:
    """Returns the configuration of a body whose description has an example."""
    return ConfigDict(json_schema_extra={"examples": [values]})


class _JsonRequest(Request):
    """Parses the body in a bounded time, with a bound of its depth, and without NaN."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await parsed(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A route whose body is parsed by `_JsonRequest`. Routers use it as their `route_class`.

    Its refusals have the names of its requests: of the arguments and settings that these name
    otherwise than Python, a subclass has the names in `FIELDS`, and `name_fields()` sets those of
    one request.
    """

    FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(_JsonRequest(request.scope, request.receive))
            except InvalidRequest as error:
                raise named(error, fields_of(request)) from error

        return handle


_FIELDS = "lmchat.fields"


def name_fields(request: Request, fields: Mapping[str, str]) -> None:
    """Sets the names that the refusals of a request have, in place of those of its route."""
    request.scope[_FIELDS] = fields


def fields_of(request: Request) -> Mapping[str, str]:
    """Returns the names of arguments and settings that a request names otherwise than Python."""
    found: Mapping[str, str] = request.scope.get(_FIELDS) or request.scope["route"].FIELDS
    return found
