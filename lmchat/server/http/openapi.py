"""The OpenAPI document, with the API keys that the guard asks for before any route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

SCHEMES = {
    "Bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The places of a request in which an API key can be."""


class App(FastAPI):
    """A FastAPI app whose document says where an API key goes.

    Args:
        open_paths: paths that need no key.
        needs_key: whether the others need one.
        options: those of FastAPI.
    """

    def __init__(self, *, open_paths: frozenset[str], needs_key: bool, **options: Any) -> None:
        self._open_paths, self._needs_key = open_paths, needs_key
        super().__init__(**options)

    def openapi(self) -> dict[str, Any]:
        """Returns the document, which is made at the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            document.setdefault("components", {})["securitySchemes"] = SCHEMES
            document["security"] = [{name: []} for name in SCHEMES]
            if not self._needs_key:
                document["security"].append({})
            for path in self._open_paths & document["paths"].keys():
                for described in document["paths"][path].values():
                    described["security"] = []
        return super().openapi()
