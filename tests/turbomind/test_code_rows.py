"""Codes of quantized checkpoints, as readers hand them to the core: values, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from turbomind import _C, InvalidRequest, ModelError

ROWS, COLUMNS = 19, 512
# bits, group, scales, offsets, ordered: all kinds of each.
FORMATS = [
    (8, 0, "float32", "none", False),
    (4, 0, "float32", "none", False),
    (8, 32, "float16", "none", False),
    (4, 32, "float16", "none", False),
    (4, 32, "float16", "minimum", False),
    (8, 32, "bfloat16", "minimum", False),
    (4, 128, "float16", "zero", False),
    (8, 64, "bfloat16", "zero", True),
    (4, 32, "int8", "minimum", False),
    (8, 16, "int8", "none", False),
    (8, 256, "float32", "none", True),
]


def random_codes(
    bits: int, group: int, scales: str, offsets: str, ordered: bool, columns: int = COLUMNS
) -> dict[str, Any]:
    """Returns arguments of test_code_rows()."""
    rng = np.random.default_rng(bits + group)
    most = 15 if bits == 4 else 127 if offsets == "minimum" else 255
    groups = -(-columns // group) if group else 1
    made: dict[str, Any] = {
        "rows": ROWS,
        "cols": columns,
        "codes": rng.integers(0, most + 1, (ROWS, columns), np.uint8),
        "scales": _numbers(rng, scales, (ROWS, groups)),
    }
    if offsets == "zero":
        made["offsets"] = rng.integers(0, most + 1, (ROWS, groups), np.uint8)
    if offsets == "minimum":
        made["offsets"] = _numbers(rng, scales, (ROWS, groups))
    if scales == "int8":
        made["super_scales"] = _numbers(rng, "float16", (ROWS, columns // 256))
        if offsets == "minimum":
            made["super_offsets"] = _numbers(rng, "float16", (ROWS, columns // 256))
    if ordered:
        made["columns"] = rng.permutation(columns).astype(np.int32)
    return made


def unpack(name: str, made: dict[str, Any]) -> npt.NDArray[np.float32]:
    return _C.test_unpack_codes(name, _C.test_code_rows(**made))


def _numbers(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> npt.NDArray[Any]:
    if kind == "int8":
        return rng.integers(0, 64, shape, np.int8)
    values = rng.normal(size=shape).astype(np.float32)
    if kind == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(kind)


def _floats(kind: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def expected_values(
    made: dict[str, Any], bits: int, group: int, scales: str, offsets: str
) -> npt.NDArray[np.float32]:
    columns = made["cols"]
    group = group or columns

    def spread(values: npt.NDArray[Any], by: int) -> npt.NDArray[Any]:
        return np.repeat(values, by, axis=1)[:, :columns]

    codes = made["codes"].astype(np.float32)
    scale = spread(_floats(scales, made["scales"]), group)
    minimum = np.float32(0)
    if scales == "int8":
        scale = spread(made["super_scales"].astype(np.float32), 256) * scale
    if offsets == "minimum":
        minimum = spread(_floats(scales, made["offsets"]), group)
        if scales == "int8":
            minimum = -(spread(made["super_offsets"].astype(np.float32), 256) * minimum)
        values = scale * codes + minimum
    else:
        zero = spread(made["offsets"], group) if offsets == "zero" else 2 ** (bits - 1)
        values = scale * (codes - np.asarray(zero, np.float32))
    if "columns" in made:
        ordered = np.empty_like(values)
        ordered[:, made["columns"]] = values
        return ordered
    return values


@pytest.mark.parametrize("columns", [COLUMNS, 336])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: "-".join(map(str, kind)))
def test_packing_keeps_every_value(kind: tuple[int, int, str, str, bool], columns: int) -> None:
    if kind[2] == "int8" and columns % 256:
        pytest.skip("K-quants have blocks of 256")
    made = random_codes(*kind, columns=columns)
    name = _C.code_format(*kind)
    expected = expected_values(made, *kind[:4])
    assert np.array_equal(unpack(name, made), expected)


def test_codes_of_four_bits_may_come_in_halves() -> None:
    made = random_codes(4, 32, "float16", "none", False, columns=99)
    codes = np.pad(made["codes"], ((0, 0), (0, 1)))
    halves = made | {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "code_bits": 4}
    values = [unpack("int4-g32-float16", each) for each in (made, halves)]
    assert np.array_equal(*values)


def test_a_name_gives_its_format_in_any_process() -> None:
    for kind in FORMATS:
        name = _C.code_format(*kind)
        made = random_codes(*kind)
        assert unpack(name, made).shape == (ROWS, COLUMNS)
    assert _C.parts_format([(64, "int8"), (32, "bfloat16")]) == "64 int8 + 32 bfloat16"


def change(name: str, index: Any, value: Any) -> Any:
    def apply(made: dict[str, Any]) -> None:
        made[name][index] = value

    return apply


BAD: dict[str, tuple[tuple[int, int, str, str, bool], Any, str]] = {
    "NaN scale": (FORMATS[2], change("scales", (3, 1), np.nan), "scales has nan"),
    "infinite minimum": (FORMATS[4], change("offsets", (3, 1), np.inf), "offsets has inf"),
    "infinite super scale": (FORMATS[8], change("super_scales", (0, 0), np.inf), "super_scales"),
    "code above 15": (FORMATS[3], change("codes", (0, 5), 16), "codes has 16, expected at most 15"),
    "code above 127": (FORMATS[5], change("codes", (0, 5), 128), "codes has 128"),
    "column twice": (FORMATS[7], change("columns", 3, 4), "columns has"),
    "column out of range": (FORMATS[7], change("columns", 3, 512), "columns has 512 at 3"),
    "negative column": (FORMATS[7], change("columns", 3, -1), "columns has -1 at 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_codes_are_refused_by_field(name: str) -> None:
    kind, spoil, message = BAD[name]
    made = random_codes(*kind)
    spoil(made)
    with pytest.raises(ModelError, match=message):
        unpack(_C.code_format(*kind), made)


@pytest.mark.parametrize("field", ["codes", "scales", "offsets", "super_scales", "super_offsets"])
def test_wrong_sizes_are_refused_by_field(field: str) -> None:
    kind = FORMATS[8]
    made = random_codes(*kind)
    for wrong in (made[field][:, :-1].copy(), None):
        if wrong is None and field in ("codes", "scales"):
            wrong = b""
        with pytest.raises(ModelError, match=f"{field} has .* bytes, expected"):
            unpack(_C.code_format(*kind), made | {field: wrong})


def test_what_a_format_does_not_have_is_refused() -> None:
    made = random_codes(*FORMATS[2])
    for more in ("offsets", "super_scales", "columns"):
        with pytest.raises(ModelError, match=f"{more} has .* bytes, expected 0"):
            unpack("int8-g32-float16", made | {more: np.zeros(8, np.int32)})
    with pytest.raises(ModelError, match="expected values to pack as bfloat16"):
        unpack("bfloat16", made)
    with pytest.raises(ModelError, match="code_bits is 5"):
        unpack("int8-g32-float16", made | {"code_bits": 5})
    with pytest.raises(ModelError, match="336 columns, expected a multiple of 256"):
        unpack("int8-g16-factor", random_codes(8, 16, "float16", "none", False, columns=336))
    with pytest.raises(ModelError, match="expected codes of int8-g32-float16"):
        _C.test_unpack("int8-g32-float16", np.ones((3, 32), np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 32, "float16"), "bits 5, expected 4 or 8"),
        ((8, 48, "float16"), "group 48, expected"),
        ((8, 512, "float16"), "group 512, expected"),
        ((8, 0, "float16"), "group 0, expected"),
        ((8, 32, "float8"), "scales: got 'float8'"),
        ((8, 32, "float16", "maximum"), "offsets: got 'maximum'"),
        ((4, 32, "int8", "zero"), "no zeros"),
    ],
)
def test_formats_that_there_are_not_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _C.code_format(*arguments)


@pytest.mark.parametrize(
    "name", ["", "int8-", "int4-g0-float16", "int8-g32", "8 int9", "int8 + int8"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        _C.test_unpack(name, np.ones((1, 1), np.float32))
