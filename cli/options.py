"""Engine options of the command line, shared by all commands that open an engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar, get_args

import typer

from turbomind.config.engine_options import OPTIONS, TYPES
from turbomind.engine.tiers import parse_quota

Result = TypeVar("Result")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model folder, GGUF file or hub name; memo: the small model that ships with lmchat.",
    ),
]


def _remember(context: typer.Context, value: bool) -> bool:
    context.ensure_object(dict)["json"] = value
    return value


Json = Annotated[bool, typer.Option("--json", callback=_remember, help="Print one JSON object.")]
"""The option is also stored in the typer context, so that errors can be printed as JSON."""


def engine_option(name: str, **more: Any) -> Any:
    """Returns the annotation of an engine's option, from its row.

    Args:
        name: The option's name.
        more: More arguments of `typer.Option`.
    """
    row, kinds = OPTIONS[name], get_args(TYPES[name]) or (TYPES[name],)
    kind = next(one for one in (str, bool, int, float) if one in kinds)
    text = f"{row.text} [default: {row.default_text}]" if row.default_text else row.text
    flags = (row.flags,) if row.flags else ()
    return Annotated[kind | None, typer.Option(*flags, metavar=row.metavar, help=text, **more)]


def _checked_quota(value: str | None) -> str | None:
    if value is not None:
        parse_quota("--disk-quota", value)
    return value


Device = engine_option("device")
DiskQuota = engine_option("disk_quota", callback=_checked_quota)

ENGINE_OPTIONS = tuple(name for name, row in OPTIONS.items() if row.command)
"""Options of `turbomind.Engine` of commands that open one. None means the engine's default."""

DESCRIBING = tuple(name for name, row in OPTIONS.items() if row.describing)
"""Those of the options that facts about a model depend on."""

LOADING = tuple(name for name, row in OPTIONS.items() if row.loading)
"""Those of the options that loading depends on."""


def with_engine_options(
    command: Callable[..., Result], names: Collection[str] = ENGINE_OPTIONS
) -> Callable[..., Result]:
    """Adds options of the names to a command, which gets those that are given as `engine`."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> Result:
        given = {name: arguments.pop(name) for name in names}
        return command(**arguments, engine={k: v for k, v in given.items() if v is not None})

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=engine_option(name)
        )
        for name in names
    ]
    parameters = [p for p in own if p.name != "engine"] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
