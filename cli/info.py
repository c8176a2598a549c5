"""`lmchat info`: the machine, and the sizes of a model on it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lmchat
from lmchat.bundled import find_model
from lmchat.errors import StoreError
from lmchat.store.data_directory import data_place
from turbomind.config import facts
from turbomind.engine.plan import Plan, plan
from turbomind.loading.loader import KV_BYTES, ModelInfo, float16_note
from turbomind.models import Description

from .options import DESCRIBING, Json, with_engine_options
from .terminal.texts import human_bytes

if TYPE_CHECKING:
    from rich.table import Table


def _describing(command: Callable[..., None]) -> Callable[..., None]:
    return with_engine_options(command, DESCRIBING)


@_describing
def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, GGUF file, config.json or hub name; memo: the model that ships with "
            "lmchat.",
        ),
    ] = None,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Show this machine, where sessions are stored, and the memory and chat template of a model.

    Reads configuration files and the headers of weights, and refuses what loading refuses; of
    weights at most the head, where one is stored though the configuration says that it is the
    embedding. A chat template of the class "append" only adds to a conversation, "trim" also
    changes white space at the ends of replies, "rewrite" changes earlier turns. The history rule
    is then "append" (earlier turns stay as they were) or "template" (they are rendered again, and
    what changed is computed again).

    \b
    Examples:
      lmchat info
      lmchat info memo
      lmchat info ./Qwen2.5-0.5B-Instruct --cache-memory 4GiB
      lmchat info ./config.json --json
    """
    here = facts.machine(engine.get("device", "auto"), engine.get("tp"))
    report: dict[str, Any] = {"version": lmchat.__version__, "machine": here}
    report["data_directory"] = _data_directory()
    if model is not None:
        where = find_model(model)
        # Of a hub name nothing is downloaded but the configuration.
        made = plan(where, weights=Path(where).exists(), **engine)
        cache_bytes = made.cache.on_host(made.model.weight_bytes)
        report["model"] = plan_facts(made, cache_bytes)
        info = made.model
        report["model"] |= chat_facts(info)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    from .terminal.tables import ReportPrinter

    printer = ReportPrinter()
    printer.print(_machine_table(report))
    if model is not None:
        printer.print(_model_table(report["model"]))


def plan_facts(made: Plan, cache_bytes: int) -> dict[str, Any]:
    """Returns the facts about a planned engine's model, `model_facts()`, the reason why GPUs cannot
    run it, "gpu_fault", and what else the user should know, "note".

    Args:
        made: The plan.
        cache_bytes: Memory of the KV cache on the CPU, in bytes.
    """
    fault = f"{made.device}: {made.fault}" if made.fault else made.device_note
    notes = ["" if made.gpus else float16_note(made.model, made.isa), made.model.head_note]
    return {
        **model_facts(made.model, cache_bytes),
        "gpu_fault": fault,
        "note": "; ".join(filter(None, notes)) or None,
    }


def _other_heads(model: Description) -> list[dict[str, int]]:
    """Returns how heads of other layers differ from those of the first, with their layers."""
    shapes = Counter((layer.kv_heads, layer.head_dim) for layer in model.layers)
    del shapes[model.layers[0].kv_heads, model.layers[0].head_dim]
    return [
        {"layers": layers, "kv_heads": kv_heads, "head_dim": dim}
        for (kv_heads, dim), layers in shapes.items()
    ]


def model_facts(info: ModelInfo, cache_bytes: int) -> dict[str, Any]:
    """Returns the shape of a model and its sizes: weights, KV bytes per token, cached tokens.

    Args:
        info: The model.
        cache_bytes: Memory of the KV cache, in bytes.
    """
    model = info.description
    layer = model.layers[0]
    windows = sorted({each.window for each in model.layers if each.window})
    shared, ranks = facts.rank_memory(info, cache_bytes)
    return {
        "path": str(info.path),
        "architecture": model.architecture,
        "layers": len(model.layers),
        "hidden": model.hidden,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "other_heads": _other_heads(model),
        "intermediate": max(each.intermediate for each in model.layers),
        "experts": _experts_facts(model),
        "vocabulary": model.vocab,
        "context": model.max_context,
        "windows": windows,
        "window_layers": sum(1 for each in model.layers if each.window),
        "rope": info.rope_type,
        "tied_head": model.tied_head,
        "encoders": list(info.encoders),
        "draft_layers": info.draft_layers,
        "eos_token_ids": list(info.eos_token_ids),
        "unknown_fields": list(info.unknown_fields),
        "parameters": info.parameters,
        "dtype": info.dtype,
        "weights": info.weights_text,
        "weight_bytes": info.weight_bytes,
        "kv_dtype": info.kv_dtype,
        "cache_bytes": cache_bytes,
        "ranks": info.tp,
        "shared_weight_bytes": shared,
        "rank_memory": ranks,
        "kv": {
            kv_dtype: {
                "bytes_per_token": facts.page_bytes(model, kv_dtype, info.tp) // facts.PAGE_TOKENS,
                "tokens_that_fit": facts.tokens_that_fit(model, kv_dtype, cache_bytes, info.tp),
            }
            for kv_dtype in KV_BYTES
        },
    }


def _experts_facts(model: Description) -> dict[str, int] | None:
    layers = [layer.experts for layer in model.layers if layer.experts is not None]
    if not layers:
        return None
    experts = layers[0]
    return {
        "count": experts.count,
        "top_k": experts.top_k,
        "intermediate": experts.intermediate,
        "layers": len(layers),
    }


def chat_facts(info: ModelInfo) -> dict[str, Any]:
    """Returns the facts about the chat template, "chat": None without a tokenizer, and all tokens
    that end a reply, "eos_token_ids".

    A broken tokenizer or template gives a "chat" with only "error".
    """
    from lmchat.errors import Error
    from lmchat.text.model_text import has_tokenizer, read_text
    from lmchat.text.prompt import PromptBuilder

    if not has_tokenizer(info):
        return {"chat": None}
    try:
        text = read_text(info)
        builder = PromptBuilder(text.tokenizer, text.template, info.eos_token_ids)
        found, ends = builder.info, builder.end_token_ids
    except Error as error:
        return {"chat": {"error": str(error)}}
    chat = {
        "template": found.kind,
        "history": found.default_history,
        "system_prompt": found.system,
        "reasoning": found.reasoning and [found.reasoning.open, found.reasoning.close],
        "thinking_switch": found.switch and dataclasses.asdict(found.switch),
        "notes": list(found.notes),
    }
    return {"chat": chat, "eos_token_ids": [i for i in ends if i < info.description.vocab]}


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, Text(value))  # not markup: names of files and fields are in it
    return table


def _data_directory() -> str | None:
    """Returns where sessions are stored; None where that has to be said, without a home."""
    try:
        return str(data_place())
    except StoreError:
        return None


def _machine_table(report: dict[str, Any]) -> Table:
    machine = report["machine"]
    return _table(
        f"lmchat {report['version']}",
        [
            ("processor", machine["cpu"]),
            ("threads", f"{machine['threads']}, one per physical core this process may use"),
            ("memory", human_bytes(machine["memory_bytes"])),
            ("instruction set", machine["isa"]),
            ("available", ", ".join(machine["available_isas"])),
            *([("AMX", machine["amx_hindrance"])] if machine["amx_hindrance"] else []),
            *(("GPU", _gpu_text(gpu)) for gpu in machine["gpus"]),
            ("device", _device_text(machine)),
            *([("cuBLASLt", machine["cublaslt"])] if machine["cublaslt"] else []),
            ("data directory", report["data_directory"] or "none: set LMCHAT_HOME to a folder"),
        ],
    )


def _gpu_text(gpu: dict[str, Any]) -> str:
    memory = human_bytes(gpu["memory_bytes"])
    return f"{gpu['name']}, {memory}, compute capability {gpu['compute_capability']}"


def _device_text(machine: dict[str, Any]) -> str:
    fault = machine["gpu_fault"]
    return f"{machine['device']}; {fault}" if fault else str(machine["device"])


def _heads_text(model: dict[str, Any]) -> str:
    text = f"{model['heads']}, kv {model['kv_heads']}, dim {model['head_dim']}"
    for other in model["other_heads"]:
        text += f"; kv {other['kv_heads']}, dim {other['head_dim']} in {other['layers']} layers"
    return text


def _model_table(model: dict[str, Any]) -> Table:
    windows = ", ".join(map(str, model["windows"]))
    attention = f"{windows} tokens in {model['window_layers']} layers" if windows else "none"
    experts = model["experts"]
    mlp = f", mlp {model['intermediate']}" if model["intermediate"] else ""
    rows = [
        ("architecture", model["architecture"]),
        ("layers", f"{model['layers']}, hidden {model['hidden']}{mlp}"),
        *([("experts", _experts_text(experts))] if experts else []),
        ("heads", _heads_text(model)),
        ("vocabulary", f"{model['vocabulary']}{', tied head' if model['tied_head'] else ''}"),
        ("context", f"{model['context']} tokens, rope {model['rope']}"),
        ("windows", attention),
        ("parameters", f"{model['parameters']:,}"),
        ("weights", f"{human_bytes(model['weight_bytes'])} as {model['weights']}"),
    ]
    if model["ranks"] > 1:
        rows += _rank_rows(model)
    for kv_dtype, kv in model["kv"].items():
        chosen = " (chosen)" if kv_dtype == model["kv_dtype"] else ""
        rows.append(
            (
                f"KV {kv_dtype}",
                f"{human_bytes(kv['bytes_per_token'])} per token, {kv['tokens_that_fit']:,} tokens "
                f"in {human_bytes(model['cache_bytes'])}{chosen}",
            )
        )
    if model["note"]:
        rows.append(("note", model["note"]))
    if model["draft_layers"]:
        rows.append(("not loaded", f"{model['draft_layers']} layers that draft tokens"))
    if model["encoders"]:
        rows.append(("not loaded", f"{' and '.join(model['encoders'])}: only text is understood"))
    if model["unknown_fields"]:
        rows.append(("ignored fields", ", ".join(model["unknown_fields"])))
    if model["gpu_fault"]:
        rows.append(("not on a GPU", model["gpu_fault"]))
    return _table(model["path"], rows + _chat_rows(model["chat"]))


def _rank_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what each rank alone has, and what they share."""
    rows = [("ranks", f"{model['ranks']} (tensor parallelism)")]
    if shared := model["shared_weight_bytes"]:
        rows.append(("all ranks", f"{human_bytes(shared)} of weights in one copy"))
    for number, rank in enumerate(model["rank_memory"]):
        weights, pages = human_bytes(rank["weight_bytes"]), human_bytes(rank["cache_bytes"])
        each = human_bytes(rank["bytes_per_token"])
        rows.append(
            (f"rank {number}", f"{weights} of weights, {pages} of KV pages, {each} per token")
        )
    return rows


def _experts_text(experts: dict[str, int]) -> str:
    return (
        f"{experts['count']}, {experts['top_k']} per token, mlp {experts['intermediate']}, "
        f"in {experts['layers']} layers"
    )


def _chat_rows(chat: dict[str, Any] | None) -> list[tuple[str, str]]:
    if chat is None:
        return [("tokenizer", "none")]
    if "error" in chat:
        return [("tokenizer", chat["error"])]
    switch = chat["thinking_switch"]
    rules = {
        "append": "earlier turns stay as they were",
        "template": "earlier turns are rendered again",
    }
    template = ", ".join([chat["template"], *chat["notes"]])
    return [
        ("chat template", template),
        ("history", f"{chat['history']}: {rules[chat['history']]}"),
        ("system prompt", chat["system_prompt"]),
        ("reasoning", " ... ".join(chat["reasoning"] or ["none"])),
        (
            "thinking switch",
            f"{switch['variable']}: {switch['on']!r} or {switch['off']!r}" if switch else "none",
        ),
    ]
