"""`/v1/models`, and the check of a request's `model`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from lmchat.server.errors import HttpError
from lmchat.server.state import ServerState, state_of
from turbomind.shown import shown

router = APIRouter(prefix="/v1", tags=["openai"])


@router.get("/models")
async def models(request: Request) -> JSONResponse:
    """Lists the served model, by its name."""
    return JSONResponse({"object": "list", "data": [_card(state_of(request))]})


@router.get("/models/{model:path}")
async def model(request: Request, model: str) -> JSONResponse:
    """Returns the served model."""
    state = state_of(request)
    check_model(state, model)
    return JSONResponse(_card(state))


def check_model(state: ServerState, name: str | None) -> str:
    """Returns the served model's name.

    Args:
        state: the server's state.
        name: the model that a request names; None: the served one.

    Raises:
        HttpError: the name is another one than those of the served model.
    """
    if name is not None and name not in names(state):
        raise HttpError(
            404,
            f"the model {shown(name)} does not exist, expected {state.model_name!r}",
            param="model",
            code="model_not_found",
        )
    return state.model_name


def names(state: ServerState) -> tuple[str, ...]:
    """Returns the names of the served model: its own, and the hub name that it was loaded by."""
    loaded = state.engine.model
    is_hub_name = len(PurePath(loaded).parts) <= 2 and not loaded.startswith((".", "/", "~"))
    return (state.model_name, loaded) if is_hub_name else (state.model_name,)


def _card(state: ServerState) -> dict[str, Any]:
    name = state.model_name
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "lmchat",
        "root": name,
        "parent": None,
        "max_model_len": state.engine.max_context,
    }
