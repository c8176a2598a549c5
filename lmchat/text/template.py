"""Chat templates: messages to the text a model was trained on.

Templates come from model folders, so they run in jinja2's immutable sandbox and under limits of
time and memory, with the filters and globals that transformers gives them.
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

from lmchat.text.template_limits import LimitExceeded, Limits, describe, metered
from lmchat.text.template_sandbox import LimitedEnvironment
from turbomind.errors import InvalidRequest, ModelError
from turbomind.files.json_file import read_json

_MAX_SOURCE = 1 << 19  # characters; the longest real one has 17 thousand

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
    return _strftime(datetime.now(), form)


def _strftime(now: datetime, form: str) -> str:
    if len(form) > 1000:  # a date, no text
        raise jinja2.TemplateError(f"a date format of {len(form)} characters, expected up to 1000")
    return now.strftime(form)


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


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.limit_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template; any number of threads may render it.

    `tokens` are the variables a template reads special tokens from, as `{"bos_token": "<s>", ...}`.
    Raises ModelError when `source` is not a valid template.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, Any] | None = None, *, limits: Limits | None = None
    ) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        self.limits = limits or Limits()
        if len(source) > _MAX_SOURCE:
            raise ModelError(
                f"chat template: {len(source)} characters, expected up to {_MAX_SOURCE}"
            )
        try:
            with metered(self.limits):
                self._template = _environment().from_string(source)
        except Exception as error:  # of Python's compiler, too: what nests too deep
            raise ModelError(f"chat template: {describe(error)}") from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """Returns the folder's template, or None.

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

    def literals(self) -> list[str]:
        """Returns the texts in the template's source, also those that some branch alone writes."""
        with metered(self.limits):
            tree = _environment().parse(self.source)
        data = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
        values = [node.value for node in tree.find_all(jinja2.nodes.Const)]
        return [text for text in (*data, *values) if isinstance(text, str)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Returns the text of `messages` ({"role", "content"} each), up to the start of the reply.

        `now` is the time that the template's `strftime_now` shows, by default the clock's.
        Raises InvalidRequest with the template's own words when it refuses the messages, and with
        the limit's when it goes over one; nothing else that happens in a template leaves it.
        """
        names = {"tools": None, "documents": None, **self.tokens}
        if now is not None:
            names["strftime_now"] = lambda form: _strftime(now, form)
        names |= variables
        names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._render(names)
        except LimitExceeded as error:
            problem = f"stopped, {describe(error)}"
        except Exception as error:
            problem = describe(error)
        # Raised here, so that it does not hold the template's frames and what they had made.
        raise InvalidRequest(f"chat template: {problem}")

    def _render(self, names: dict[str, Any]) -> str:
        pieces, size = [], 0
        with metered(self.limits.of(len(names["messages"]))) as meter:
            for piece in self._template.generate(names):
                size += len(piece)
                meter.printed(size)
                pieces.append(piece)
        return "".join(pieces)


def special_tokens(folder: str | Path) -> dict[str, Any]:
    """Returns texts of the folder's named special tokens, as templates see them."""
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
