"""Orders of AMX products that were measured, by processor.

`benchmarks/tune_amx.py` adds this machine to `tile_orders.json`; engines read it when they load a
model. A processor that is not listed gets the default order. Bits are equal in every order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import turbomind._C as _C
from turbomind.errors import InvalidRequest

TABLE = Path(__file__).with_name("tile_orders.json")
FIELDS = ("chunk_k_blocks", "stays", "stream")


def tile_order(isa: str, table: Path = TABLE, processor: str | None = None) -> _C.TileOrder | None:
    """Returns the measured order of a processor, or None for the default.

    Args:
        isa: Instruction set of the engine; those without tiles have no order.
        table: JSON file of the orders.
        processor: The processor's name; None: the name of this machine's.

    Raises:
        InvalidRequest: The table is not readable, or holds no valid order for the processor.
    """
    if not isa.startswith("amx"):
        return None
    name = _C.cpu_name() if processor is None else processor
    entry = read_table(table).get(name)
    if entry is None:
        return None
    try:
        chunk, stays, stream = (entry[field] for field in FIELDS)
        return _C.TileOrder(chunk, stays, stream)
    except (KeyError, TypeError, InvalidRequest) as error:
        raise InvalidRequest(
            f"{name!r} in {table} is {entry!r}, expected {', '.join(FIELDS)}: {error}"
        ) from None


def read_table(table: Path) -> dict[str, Any]:
    """Returns the entries of a table by processor."""
    try:
        content = json.loads(table.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{table}: {error}, expected a JSON file") from None
    processors = content.get("processors") if isinstance(content, dict) else None
    if not isinstance(processors, dict):
        raise InvalidRequest(f"{table}: expected an object with the key 'processors'")
    return processors
