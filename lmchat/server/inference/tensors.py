"""Tensors of the Open Inference Protocol, as JSON and as bytes after the JSON object."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmchat.server.errors import HttpError, refusal
from lmchat.server.http.json_body import parsed
from turbomind.shown import shown

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON object in a body that has bytes after it."""

_FORMATS = {"BOOL": "?", "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f"}
_TYPES: dict[str, tuple[type, ...]] = {"BOOL": (bool,), "BYTES": (str,), "FP32": (float, int)}

MAX_DIMENSIONS = 8
MAX_TENSORS = 64
"""Most inputs or outputs of a request."""

Values = list[Any]


@dataclass(frozen=True)
class Requested:
    """A requested output: its name, and whether its values are sent as bytes."""

    name: str
    is_binary: bool


@dataclass(frozen=True)
class InferRequest:
    """A parsed body of `/infer`.

    Attributes:
        id: the client's name of the request.
        inputs: values of the inputs by name, flat; texts for BYTES.
        parameters: the request's parameters, but `binary_data_output`.
        outputs: the requested outputs; None: all.
        is_binary: whether outputs are sent as bytes unless an output says otherwise.
    """

    id: str
    inputs: dict[str, Values]
    parameters: dict[str, Any]
    outputs: tuple[Requested, ...] | None
    is_binary: bool


async def parse(body: bytes, header_length: str | None, most: int) -> InferRequest:
    """Parses a body of `/infer`.

    Args:
        body: JSON, then the bytes of binary inputs.
        header_length: length of the JSON; None: the whole body.
        most: largest number of values of one input.

    Raises:
        HttpError: the body breaks the format; the message names the input.
    """
    end = _json_end(body, header_length)
    given = await parsed(body[:end])
    if not isinstance(given, dict):
        raise HttpError(400, "the body is not a JSON object, expected one with 'inputs'")
    for name in given.keys() - {"id", "inputs", "outputs", "parameters"}:
        raise HttpError(400, f"{name[:100]!r} is not supported", param=name[:100])
    parameters = _mapping(given.get("parameters"), "parameters")
    is_binary = parameters.pop("binary_data_output", False)
    request_id = given.get("id", "")
    if not isinstance(request_id, str) or len(request_id) > 256:
        raise refusal("id", shown(request_id), "a string of at most 256 characters")
    outputs = given.get("outputs")
    return InferRequest(
        id=request_id,
        inputs=_inputs(given.get("inputs"), memoryview(body)[end:], most),
        parameters=parameters,
        outputs=None if not outputs else tuple(_requested(outputs, bool(is_binary))),
        is_binary=bool(is_binary),
    )


def encode(
    outputs: Sequence[tuple[str, str, Values, bool]], head: dict[str, Any]
) -> tuple[bytes, int | None]:
    """Returns a response's body, and the length of its JSON if bytes follow.

    Args:
        outputs: name, data type, flat values, and whether these are sent as bytes.
        head: the other fields of the response.
    """
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, datatype, values, is_binary in outputs:
        one: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(values)]}
        if is_binary:
            binary.append(_packed(datatype, values))
            one["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            one["data"] = values
        described.append(one)
    text = json.dumps({**head, "outputs": described}).encode()
    return (text + b"".join(binary), len(text)) if binary else (text, None)


def _json_end(body: bytes, header_length: str | None) -> int:
    if header_length is None:
        return len(body)
    if not header_length.isdecimal() or int(header_length[:20]) > len(body):
        raise HttpError(
            400, f"{HEADER_LENGTH} is {header_length[:20]!r}, expected at most {len(body)}"
        )
    return int(header_length[:20])


def _mapping(given: Any, what: str) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise refusal(what, shown(given), "an object")
    return dict(given or {})


def _inputs(given: Any, binary: memoryview, most: int) -> dict[str, Values]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_TENSORS:
        raise HttpError(400, "inputs is missing, expected a list of tensors", param="inputs")
    found: dict[str, Values] = {}
    at = 0
    for tensor in given:
        name, datatype, count = _described(tensor)
        if name in found:
            raise HttpError(400, f"input {name!r} is given twice", param=name)
        if count > most:
            raise HttpError(
                400, f"input {name!r} has {count} values, expected at most {most}", param=name
            )
        size = _mapping(tensor.get("parameters"), "parameters").get("binary_data_size")
        if size is None:
            found[name] = _plain(name, datatype, tensor.get("data"), count)
        else:
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise HttpError(400, f"binary_data_size of input {name!r} is wrong", param=name)
            if at + size > len(binary):
                raise HttpError(400, f"the bytes of input {name!r} are missing", param=name)
            found[name] = _unpacked(name, datatype, binary[at : at + size], count)
            at += size
        if len(found[name]) != count:
            raise HttpError(
                400, f"input {name!r} has {len(found[name])} values, expected {count}", param=name
            )
    if at != len(binary):
        raise HttpError(400, f"{len(binary) - at} bytes follow the last input, expected none")
    return found


def _described(tensor: Any) -> tuple[str, str, int]:
    """Returns a tensor's name, data type and number of values."""
    if not isinstance(tensor, dict):
        raise HttpError(400, "an input is not a JSON object", param="inputs")
    name, datatype, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if not isinstance(name, str) or len(name) > 100:
        raise HttpError(400, "an input has no name", param="inputs")
    if datatype not in ("BYTES", *_FORMATS):
        expected = ", ".join(("BYTES", *_FORMATS))
        raise HttpError(
            400, f"datatype of input {name!r} is not supported, expected {expected}", param=name
        )
    count = 1
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise HttpError(400, f"shape of input {name!r} is not a list", param=name)
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 1 << 31:
            raise HttpError(400, f"shape of input {name!r} is wrong", param=name)
        count *= length
    return name, datatype, count


def _plain(name: str, datatype: str, data: Any, count: int) -> Values:
    """Returns the `count` values of JSON data, which may be nested lists, or some more or fewer."""
    values: Values = []
    pending, lists = [data], 0
    while pending:
        value = pending.pop()
        lists += isinstance(value, list)
        if isinstance(value, list):
            pending += value[: count + 1][::-1]
        else:
            values.append(value)
        if len(values) > count or lists > MAX_DIMENSIONS * (count + 1):
            raise HttpError(
                400, f"input {name!r} has more values, expected {count} as in its shape", param=name
            )
    kinds = _TYPES.get(datatype, (int,))
    for value in values:
        if not isinstance(value, kinds) or (isinstance(value, bool) and datatype != "BOOL"):
            raise HttpError(400, f"data of input {name!r} is not of type {datatype}", param=name)
    return values


def _unpacked(name: str, datatype: str, data: memoryview, count: int) -> Values:
    """Returns the `count` values of binary data, or fewer."""
    if datatype != "BYTES":
        form = _FORMATS[datatype]
        size = struct.calcsize(f"<{form}")
        if len(data) != count * size:
            raise HttpError(
                400, f"input {name!r} has {len(data)} bytes, expected {count * size}", param=name
            )
        return list(struct.unpack(f"<{len(data) // size}{form}", data))
    found: Values = []
    at = 0
    while at < len(data):
        if len(found) == count:
            raise HttpError(
                400, f"input {name!r} has more values, expected {count} as in its shape", param=name
            )
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > len(data):
            raise HttpError(400, f"the bytes of input {name!r} are cut off", param=name)
        try:
            found.append(str(data[at + 4 : at + 4 + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise HttpError(400, f"input {name!r} is not UTF-8", param=name) from error
        at += 4 + length
    return found


def _packed(datatype: str, values: Values) -> bytes:
    if datatype != "BYTES":
        return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    encoded = [value.encode("utf-8", "replace") for value in values]
    return b"".join(len(one).to_bytes(4, "little") + one for one in encoded)


def _requested(given: Any, is_binary: bool) -> list[Requested]:
    if not isinstance(given, list) or len(given) > MAX_TENSORS:
        expected = f"a list of at most {MAX_TENSORS}"
        raise HttpError(400, f"outputs is wrong, expected {expected}", param="outputs")
    found: list[Requested] = []
    for one in given:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise HttpError(400, "an output has no name", param="outputs")
        parameters = _mapping(one.get("parameters"), "parameters")
        wanted = parameters.pop("binary_data", is_binary)
        if parameters or not isinstance(wanted, bool):
            names = ", ".join(parameters)[:100] or "binary_data"
            raise HttpError(400, f"{names} of an output is not supported", param="outputs")
        found.append(Requested(one["name"], wanted))
    return found
