"""Safetensors files: valid headers, shards, superfluous tensors, memory while loading."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY, TINY_SHAPES, tiny_tensors, write_safetensors, write_tiny

import turbomind
from turbomind import ModelError
from turbomind.files.checkpoint import INDEX, Checkpoint, SafetensorsFile
from turbomind.quant.scheme import Scheme

Open = Callable[..., turbomind.Engine]
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(2, 2).to(torch.float16),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        found = file.tensors[name]
        assert found.shape == tuple(tensor.shape)
        assert bytes(file.data(found)) == tensor.view(torch.uint8).numpy().tobytes()


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [32], "data_offsets": [0, 128], **changes}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({NORM: 7}, "header entry is 7"),
        ({NORM: entry(dtype="BF17")}, "dtype is 'BF17', expected one of BF16, F16, F32"),
        ({NORM: entry(dtype=None)}, "dtype is None"),
        ({NORM: entry(shape=[-32])}, r"shape is \[-32\]"),
        ({NORM: entry(shape="32")}, "shape is '32'"),
        ({NORM: entry(shape=[32.0])}, r"shape is \[32.0\]"),
        ({NORM: entry(data_offsets=[0])}, r"data_offsets is \[0\]"),
        ({NORM: entry(data_offsets=[128, 0])}, r"data_offsets is \[128, 0\]"),
        ({NORM: entry(data_offsets=[0, 1 << 60])}, "truncated or damaged"),
        ({NORM: entry(data_offsets=[0, 64])}, r"64 bytes, expected 128 for F32 \[32\]"),
        ({NORM: entry(shape=[1 << 40, 1 << 40])}, "128 bytes, expected"),
        ({NORM: entry(data_offsets=[0, 128])}, "overlap"),
        ({NORM: entry(shape=[1 << 60] * 60)}, "128 bytes, expected an integer of"),
        ({NORM: entry(shape=[1] * 65)}, "expected a list of at most 64 sizes"),
        ({f"{NORM}\x1b]0;x\x07": entry()}, r"norm.weight\\x1b\]0;x\\x07 has .* printable"),
    ],
)
def test_wrong_headers_are_refused_by_name(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tiny_tensors(), changes)
    with pytest.raises(ModelError, match=match) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert NORM in str(caught.value)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "0 bytes, expected at least 8"),
        (b"1234", "4 bytes"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes, expected at most 2"),
        (struct.pack("<Q", 1 << 63), "header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 2) + b"{]", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "header is a list"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not valid JSON"),
        (b"PK\x03\x04 a zip archive, as pickles come", "truncated or not safetensors"),
        (struct.pack("<Q", 15) + b'{"a":1,"b":2,"a":1}'[:15], "not valid JSON"),
        (struct.pack("<Q", 19) + b'{"a":1,"b":2,"a":1}', "the header has a twice"),
    ],
)
def test_other_files_are_refused(data: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=match):
        SafetensorsFile(path)


def test_so_many_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = (f'"{i}":0' for i in range(100_001))
    header = f"{{{','.join(names)}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="100001 tensors, expected at most 100000"):
        SafetensorsFile(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tiny_tensors())
    whole = path.read_bytes()
    for size in (*range(0, 64, 7), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            SafetensorsFile(path)


def shards(folder: Path, *parts: list[str]) -> None:
    """Writes the TINY model in one shard per list of names, with its index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    tensors, weight_map = tiny_tensors(), {}
    for i, names in enumerate(parts, start=1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    names = list(TINY_SHAPES)
    shards(tmp_path, names[:4], names[4:])
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint) == set(names)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"missing 1 of 2 shards: model-00002-of-00002"):
        Checkpoint(tmp_path)


def test_the_index_decides_between_two_copies_of_a_tensor(tmp_path: Path) -> None:
    """Whichever shard it names; without a name for it there is no answer."""
    names = list(TINY_SHAPES)
    shards(tmp_path, names[:5], names[4:])
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    for file in files:
        index["weight_map"][names[4]] = file
        (tmp_path / INDEX).write_text(json.dumps(index))
        found, _ = Checkpoint(tmp_path).find(names[4], TINY_SHAPES[names[4]])
        assert found.path.name == file
    del index["weight_map"][names[4]]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"tensor {names[4]} is in .*00001.* and in .*00002"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        (None, "weight_map is None"),
        ({}, "weight_map is {}"),
        ({NORM: "../model.safetensors"}, "expected the name of a .safetensors file"),
        ({NORM: "weights.bin"}, "expected the name of a .safetensors file"),
        ({NORM: "a.safetensors", Q: "b.safetensors"}, "missing 2 of 2 shards"),
    ],
)
def test_a_wrong_index_is_refused(weight_map: Any, match: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=match):
        Checkpoint(tmp_path)


def test_an_index_may_name_what_no_shard_has_and_the_model_does_not_need(
    tmp_path: Path, open_engine: Open
) -> None:
    """Tools that drop a tied head or draft layers keep their names; a needed tensor is missing."""
    names = list(TINY_SHAPES)
    shards(tmp_path, names[:4], names[4:])
    index = json.loads((tmp_path / INDEX).read_text())
    second = "model-00002-of-00002.safetensors"
    index["weight_map"] |= {"lm_head.weight": second, "model.mtp.fc.weight": second}
    index["weight_map"][names[0]] = second  # it is in the first
    (tmp_path / INDEX).write_text(json.dumps(index))
    expected = open_engine(write_tiny(tmp_path / "plain")).logits([3, 4, 5])
    assert (open_engine(tmp_path).logits([3, 4, 5]) == expected).all()
    write_safetensors(tmp_path / second, {n: tiny_tensors()[n] for n in names[5:]})
    with pytest.raises(
        ModelError, match=f"tensor {names[4]} is missing.* index has it in {second}"
    ):
        open_engine(tmp_path)


def test_weights_in_other_layouts_beside_are_not_read(tmp_path: Path, open_engine: Open) -> None:
    folder = write_tiny(tmp_path / "both")
    expected = open_engine(folder).logits([3, 4, 5])
    other = {"layers.0.attention.wq.weight": np.ones((4, 4), np.float32)}
    write_safetensors(folder / "consolidated.safetensors", other)
    (folder / "original").mkdir()
    write_safetensors(folder / "original" / "model.safetensors", other)
    (folder / "params.json").write_text("{}")
    assert (open_engine(folder).logits([3, 4, 5]) == expected).all()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="consolidated.safetensors has another layout"):
        open_engine(folder)


def test_tables_of_the_rotation_are_ignored(tmp_path: Path, open_engine: Open) -> None:
    """Old versions of transformers stored them."""
    expected = open_engine(write_tiny(tmp_path / "plain")).logits([3, 4, 5])
    attention = "model.layers.0.self_attn.rotary_emb"
    tables = {f"{attention}.{name}": np.ones((4, 4), np.float32)
              for name in ("inv_freq", "cos_cached", "sin_cached")}  # fmt: skip
    folder = write_tiny(tmp_path / "old", tensors=tiny_tensors() | tables)
    assert (open_engine(folder).logits([3, 4, 5]) == expected).all()


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        turbomind.Engine(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*convert"):
        turbomind.Engine(tmp_path)


def test_superfluous_tensors_are_refused(tmp_path: Path, open_engine: Open) -> None:
    tensors = tiny_tensors()
    plain = open_engine(write_tiny(tmp_path / "plain", tensors=tensors)).logits([3, 4, 5])
    harmless = {
        **tensors,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],  # a tied head, written out
    }
    folder = write_tiny(tmp_path / "harmless", tensors=harmless)
    assert np.array_equal(open_engine(folder).logits([3, 4, 5]), plain)
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"):
        folder = write_tiny(tmp_path / name, tensors={**tensors, name: np.zeros(32, np.float32)})
        with pytest.raises(ModelError, match=f"1 tensors that LlamaForCausalLM.*{name}"):
            open_engine(folder)


def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path, open_engine: Open) -> None:
    for name, shape in TINY_SHAPES.items():
        tensors = tiny_tensors()
        del tensors[name]
        with pytest.raises(ModelError, match=f"tensor {name} is missing"):
            open_engine(write_tiny(tmp_path, tensors=tensors))
        tensors[name] = np.zeros((*shape[:-1], shape[-1] + 1), np.float32)
        with pytest.raises(ModelError, match=f"tensor {name} has shape"):
            open_engine(write_tiny(tmp_path, tensors=tensors))


def test_weights_of_other_types_are_refused(tmp_path: Path, open_engine: Open) -> None:
    tensors = tiny_tensors()
    folder = write_tiny(tmp_path, tensors=tensors)
    from safetensors.numpy import save_file

    for dtype in (np.float64, np.int8):
        changed = {k: v.astype(dtype) if k == Q else v for k, v in tensors.items()}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ModelError, match=f"tensor {Q} has dtype .*expected one of BF16, F16"):
            open_engine(folder)


def test_data_may_start_anywhere(tmp_path: Path, open_engine: Open) -> None:
    """The format does not promise alignment."""
    folder = write_tiny(tmp_path)
    expected = open_engine(folder).logits([3, 4, 5])
    for pad in (1, 2, 3):
        write_safetensors(folder / "model.safetensors", tiny_tensors(), pad=pad)
        assert np.array_equal(open_engine(folder).logits([3, 4, 5]), expected)


@pytest.mark.parametrize("rest", [0, 0.3, 0.9])
def test_a_file_that_shrinks_while_it_is_loaded_is_an_error(
    rest: float, tmp_path: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read through a memory map, it would end the process (SIGBUS)."""
    path = write_tiny(tmp_path) / "model.safetensors"
    pack = Scheme.pack

    def shrinking(*arguments: Any) -> None:
        os.truncate(path, int(path.stat().st_size * rest) if rest else 0)
        pack(*arguments)

    monkeypatch.setattr(Scheme, "pack", shrinking)
    with pytest.raises(ModelError, match=f"{path}: it ends at byte .* the file changed while"):
        open_engine(tmp_path)


def test_a_matrix_of_many_pieces_is_read_in_order(tmp_path: Path, open_engine: Open) -> None:
    """The core reads about 2 MiB at a time. Rows in reversed order give reversed logits."""
    vocab = 90_001
    found = []
    for name, order in (("a", slice(None)), ("b", slice(None, None, -1))):
        tensors = tiny_tensors()
        for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
            if tensor in tensors:
                rows = np.random.default_rng(1).random((vocab, tensors[tensor].shape[1]))
                tensors[tensor] = np.ascontiguousarray(rows.astype(np.float32)[order] - 0.5)
        engine = open_engine(write_tiny(tmp_path / name, {"vocab_size": vocab}, tensors))
        ids = np.array([3, 16_383, 16_384, 65_535, 65_536, 90_000])
        found.append(engine.logits((ids if name == "a" else vocab - 1 - ids).tolist())[:, order])
    assert np.array_equal(*found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q, NORM, "model.embed_tokens.weight"])
def test_weights_that_are_not_finite_are_refused(
    name: str, value: float, tmp_path: Path, open_engine: Open
) -> None:
    tensors = tiny_tensors()
    tensors[name].flat[-1] = value
    with pytest.raises(ModelError, match="finite|NaN"):
        open_engine(write_tiny(tmp_path, tensors=tensors))


def test_the_digest_changes_with_sampled_content(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    path = tmp_path / "model.safetensors"

    def digest() -> str:
        write_safetensors(path, tensors)
        return Checkpoint(tmp_path).digest()

    first = digest()
    assert digest() == first
    for name in (NORM, Q):
        tensors[name].flat[-1] += 1
        assert digest() != first


MEASURE = """
import sys, threading, time
from pathlib import Path
from turbomind.loading.loader import describe, load

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

info = describe(sys.argv[1], dtype=sys.argv[2])
before, peak, stop = anonymous(), 0, False

def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
model = load(info, isa="auto", threads=2)
peak = max(peak, anonymous())
stop = True
thread.join()
print(model.weight_bytes, peak - before)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_never_holds_the_weights_twice(dtype: str, tmp_path: Path) -> None:
    """Loading a float32 checkpoint takes at most 1.1 times the packed weights."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status")
    hidden, vocab = 512, 16000
    config = {**TINY, "hidden_size": hidden, "vocab_size": vocab, "intermediate_size": 2048}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        NORM: (hidden,),
    }
    for i in range(3):
        p = f"model.layers.{i}."
        shapes |= {
            p + f"{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {p + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        shapes |= {p + f"mlp.{n}_proj.weight": (2048, hidden) for n in ("gate", "up")}
        shapes[p + "mlp.down_proj.weight"] = (hidden, 2048)
    rng = np.random.default_rng(0)
    tensors = {n: rng.random(s, np.float32) for n, s in shapes.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    packed, used = map(int, done.stdout.split())
    assert (
        packed >= (2 if dtype == "bfloat16" else 4) * sum(t.size for t in tensors.values()) * 0.99
    )
    assert used <= 1.1 * packed
