"""Chat templates: messages to the text a model was trained on.

Templates come from model folders, so they run in jinja2's immutable sandbox, with the filters and
globals that transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from turbomind.config import read_json
from turbomind.errors import InvalidRequest, ModelError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendering shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what the body sets stays inside it.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    `tokens` are the variables a template reads special tokens from, as `{"bos_token": "<s>", ...}`.
    Raises ModelError when `source` is no valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The folder's template, None when it has none.

        It is `chat_template.jinja`, else in `chat_template.json`, else in `tokenizer_config.json`
        (of several the one named "default").
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        source: Any = None
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if source is None:
            source = _read_json(folder / "chat_template.json").get("chat_template")
        if source is None:
            source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source}
            if "default" not in named:
                raise ModelError(
                    f"{folder}: chat templates {sorted(map(str, named))}, none is 'default'"
                )
            source = named["default"]
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(f"{folder}: chat_template is {type(source).__name__}, expected text")
        return cls(source, special_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of `messages` ({"role", "content"} each), up to where the reply begins.

        Raises InvalidRequest with the template's own words when it refuses the messages.
        """
        names = {"tools": None, "documents": None, **self.tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **names
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest(f"chat template: {error}") from error


def special_tokens(folder: str | Path) -> dict[str, Any]:
    """Texts of the folder's named special tokens, as templates see them."""
    merged = {
        **_read_json(Path(folder) / "special_tokens_map.json"),
        **_read_json(Path(folder) / "tokenizer_config.json"),
    }
    found: dict[str, Any] = {}
    for name in _NAMED_TOKENS:
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
