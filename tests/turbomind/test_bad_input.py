"""Bad input raises an error with the name, value and expected value; the engine continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY, tiny_tensors, write_tiny

import turbomind
from turbomind import ContextFull, InvalidRequest, ModelError
from turbomind.settings import REQUEST, SAMPLING

Open = Callable[..., turbomind.Engine]
GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[turbomind.Engine]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    with turbomind.Engine(folder, device=device, threads=2, cache_memory="4MiB") as engine:
        yield engine


@pytest.fixture(autouse=True)
def alive(engine: turbomind.Engine) -> Iterator[None]:
    """Checks after each test that the engine gives the same tokens and its invariants hold."""
    expected = engine.generate([3, 4, 5], **GREEDY).token_ids
    yield
    assert engine.generate([3, 4, 5], **GREEDY).token_ids == expected
    engine.check_invariants()


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([], "token_ids is empty"),
        ([70], r"token_ids\[0\] is 70, expected a token id from 0 to 69"),
        ([3, 4, -1], r"token_ids\[2\] is -1"),
        ([3, 1 << 40], r"token_ids\[1\] is 1099511627776"),
        ([3, "4"], r"token_ids\[1\] is '4', expected an integer"),
        ([3, 4.5], r"token_ids\[1\] is 4.5, expected an integer"),
        ([3, None], r"token_ids\[1\] is None"),
        ("345", "token_ids is a str"),
        (None, "token_ids is a NoneType, expected a sequence"),
        (5, "token_ids is a int"),
        ({3, 4}, "token_ids is a set"),
        ({3: 4}, "token_ids is a dict"),
        (np.array(3), "token_ids is a ndarray, expected a sequence"),
    ],
)
def test_wrong_token_ids_are_refused_by_name(
    ids: Any, match: str, engine: turbomind.Engine
) -> None:
    for call in (engine.generate, engine.logits, engine.score):
        with pytest.raises(InvalidRequest, match=match):
            call(ids)
    if not isinstance(ids, list) or ids:
        with engine.open() as handle:
            with pytest.raises(InvalidRequest, match=match):
                handle.append(ids)
            assert handle.length == 0


def test_numpy_arrays_are_token_ids(engine: turbomind.Engine) -> None:
    expected = engine.generate([3, 4, 5], **GREEDY).token_ids
    for dtype in (np.int32, np.int64, np.uint16):
        assert engine.generate(np.array([3, 4, 5], dtype), **GREEDY).token_ids == expected
    with pytest.raises(InvalidRequest):
        engine.generate(np.array([3.0, 4.0]))


def fill_and_generate(handle: turbomind.Handle, ids: list[int]) -> None:
    handle.append(ids)
    handle.generate().result()


def test_a_prompt_longer_than_the_context_is_refused(engine: turbomind.Engine) -> None:
    ids = [3] * (engine.max_context + 1)
    for call in (engine.generate, engine.logits, engine.score):
        with pytest.raises(ContextFull, match=str(engine.max_context)):
            call(ids)
    stream = engine.stream(ids)
    (event,) = list(stream)
    assert (event.finish_reason, event.terminal) == ("error", True)
    assert isinstance(event.error, ContextFull)
    with engine.open() as handle, pytest.raises(ContextFull):
        fill_and_generate(handle, ids)


def test_an_empty_handle_cannot_generate(engine: turbomind.Engine) -> None:
    with engine.open() as handle, pytest.raises(InvalidRequest):
        handle.generate(**GREEDY).result()


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"temprature": 1.0}, "unknown parameter 'temprature'; did you mean 'temperature'"),
        ({"do_sample": True}, "unknown parameter 'do_sample', expected one of max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k is 2.5, expected an integer"),
        ({"top_k": True}, "top_k is True"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -5}, "max_new_tokens"),
        (
            {"max_new_tokens": -1},
            "max_new_tokens is -1, expected an integer from 1 to 2147483647",
        ),
        ({"max_new_tokens": "all"}, "max_new_tokens is 'all'"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"continued": -1}, "continued"),
        ({"continued": 1.5}, "continued is 1.5, expected an integer"),
        ({"n": 0}, "n"),
        ({"n": 1 << 20}, "n"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"logprobs": -1}, "logprobs is -1, expected an integer from 0 to 256"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 71}, "logprobs"),
        ({"stop_token_ids": [70]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": [[-1]]}, "bad_words"),
        ({"logit_bias": {70: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"retention_priority": "much"}, "retention_priority is 'much'"),
        ({"salt": 5}, "salt is 5"),
        ({"salt": b"x"}, "salt is b'x'"),
        ({"temperature": np.str_("1")}, "temperature"),
        ({"top_k": np.float32(2.5)}, "top_k is .*, expected an integer"),
        ({"top_k": 1 << 40}, r"top_k is 1099511627776, expected an integer from 0 to 2147483647"),
        ({"attempt": -1}, "attempt is -1"),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    params: dict[str, Any], match: str, engine: turbomind.Engine
) -> None:
    (name,) = params
    with pytest.raises(InvalidRequest, match=match) as caught:
        engine.generate([3, 4], **params)
    assert re.split(r"[.[]", caught.value.param or "")[0] == name
    if name in (*SAMPLING, *REQUEST):
        assert re.match(
            f"{re.escape(caught.value.param or '')} is .+, expected .+", str(caught.value)
        )
    with engine.open() as handle:
        handle.append([3, 4])
        with pytest.raises(InvalidRequest) as again:
            handle.generate(**params)
        assert again.value.param == caught.value.param
        assert handle.token_ids == [3, 4]


def test_an_unknown_instruction_set_in_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOMIND_ISA", "sse9")
    with pytest.raises(InvalidRequest, match='variable TURBOMIND_ISA is "sse9", expected auto or'):
        turbomind.Engine(write_tiny(tmp_path))


def test_parameters_of_another_call_are_refused(engine: turbomind.Engine) -> None:
    with pytest.raises(InvalidRequest, match="unknown parameter 'temperature'"):
        engine.logits([3], temperature=1.0)
    with engine.open() as handle:
        handle.append([3])
        with pytest.raises(InvalidRequest, match="unknown parameter 'salt'"):
            handle.generate(salt="x")
        with pytest.raises(InvalidRequest, match="n is 2, expected 1 for a handle"):
            handle.generate(n=2)
        for value in (None, "much", True, float("nan")):
            with pytest.raises(InvalidRequest, match="retention_priority"):
                handle.set_retention_priority(value)  # type: ignore[arg-type]
        for wrong in (-1, 2, "1", None, True, 1 << 70):
            with pytest.raises(InvalidRequest, match="length"):
                handle.truncate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="salt is 5"):
        engine.open(salt=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        (
            {"max_batchsize": 4},
            "unknown engine option 'max_batchsize'; did you mean 'max_batch_size'",
        ),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": "16"}, "max_batch_size is '16'"),
        ({"max_context_tokens": -1}, "max_context_tokens is -1"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"step_ms": "fast"}, "step_ms is 'fast'"),
        ({"step_ms": -1.0}, "step_ms"),
        ({"step_ms": float("nan")}, "step_ms"),
        ({"cache_memory": "lots"}, "cache_memory is 'lots'"),
        ({"cache_memory": 1}, "cache"),
        (
            {"cache_memory": "900TiB"},
            r"\(cache_memory\b.*expected at|cache_memory is .* expected",
        ),
        ({"cache_pages": 1 << 50}, r"cache_pages\).*expected at most|cache_pages is "),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 1 << 20}, "threads is 1048576, expected an integer from 1 to 1024"),
        ({"threads": 1 << 100}, "threads"),
        ({"threads": 1.0}, "threads is 1.0"),
        ({"threads": True}, "threads is True"),
        ({"prefill_chunk": 1 << 40}, "prefill_chunk is 1099511627776, expected an integer from 1"),
        ({"isa": None}, "isa is None"),
        ({"weights_digests": 5}, "weights_digests is 5, expected the path of a file or None"),
        ({"weights_digests": ""}, "weights_digests is ''"),
        ({"device": None}, "device is None"),
        ({"cache_memory": "120%"}, "cache_memory is '120%', expected a share"),
        ({"prefix_reuse": 1}, "prefix_reuse is 1"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of auto, bfloat16"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'"),
        ({"load_format": "pt"}, "load_format is 'pt', expected one of auto, dummy"),
        ({"rope_length": 512}, "rope_length is 512"),
        ({"isa": "sse9"}, "sse9"),
        ({"revision": "main"}, "revision is 'main'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_engine_options_are_refused_by_name(
    options: dict[str, Any], match: str, tmp_path: Path, open_engine: Open
) -> None:
    with pytest.raises(InvalidRequest, match=match) as caught:
        open_engine(write_tiny(tmp_path), **options)
    if "of memory" not in str(caught.value):  # which options share
        assert caught.value.param in options


def test_numpy_integers_are_integers(tmp_path: Path, open_engine: Open) -> None:
    one = np.int64(1)
    options = {"threads": one, "max_batch_size": one, "cache_pages": np.int32(4), "seed": one}
    engine = open_engine(write_tiny(tmp_path), **options)
    assert (engine.threads, engine.stats().pages_total) == (1, 4)
    params = {**GREEDY, "max_new_tokens": np.uint8(4), "top_k": np.int16(3), "seed": np.uint64(7)}
    assert len(engine.generate([3], **params).token_ids) == 4
    with engine.open() as handle:
        handle.append([3, 4])
        handle.truncate(one)
        assert handle.token_ids == [3]


@pytest.mark.parametrize("path", [None, 5, b"model", "", []])
def test_a_model_that_is_no_name_is_refused(path: Any, open_engine: Open) -> None:
    with pytest.raises(InvalidRequest, match="model is .*, expected the path of a folder"):
        open_engine(path)


def test_a_model_larger_than_the_machine_is_refused(tmp_path: Path, open_engine: Open) -> None:
    huge = {**TINY, "hidden_size": 1 << 20, "num_attention_heads": 1 << 13}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**huge, "num_key_value_heads": 1}))
    match = "weights as .* GiB.*expected at most|hidden is 1048576, expected at most"  # CPU, GPU
    with pytest.raises((InvalidRequest, ModelError), match=match):
        open_engine(path, load_format="dummy")


def test_a_config_without_weights_is_refused(tmp_path: Path, open_engine: Open) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    with pytest.raises(ModelError, match="is a file, expected a folder"):
        open_engine(path)


def test_logits_that_are_not_finite_end_the_request_only(tmp_path: Path, open_engine: Open) -> None:
    """Finite weights whose products overflow fail one request and not the others of the batch."""
    tensors = tiny_tensors()
    # Only token 7 reaches the first column, where gate and up are near the end of float32.
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][7, 0] = 1e3
    tensors["model.layers.0.self_attn.o_proj.weight"][0] = 0
    for name in ("gate", "up"):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"][:, 0] = 3e38
    tensors["model.layers.0.post_attention_layernorm.weight"][0] = 1
    tensors["lm_head.weight"] = np.random.default_rng(1).random((70, 32), np.float32)
    tensors["lm_head.weight"][7] = 0  # so that no reply contains it
    broken = open_engine(write_tiny(tmp_path, {"tie_word_embeddings": False}, tensors))
    good = broken.generate([3, 4, 5], **GREEDY).token_ids
    with pytest.raises(ModelError, match="finite|NaN"):
        broken.generate([3, 7], **GREEDY)
    with pytest.raises(ModelError, match="finite|NaN"):
        broken.score([3, 7, 3])
    streams = [broken.stream(ids, **GREEDY) for ids in ([3, 4, 5], [3, 5, 7], [3, 4, 5])]
    finishes = [list(stream)[-1] for stream in streams]
    assert [e.finish_reason for e in finishes] == ["length", "error", "length"]
    assert isinstance(finishes[1].error, ModelError)
    assert broken.generate([3, 4, 5], **GREEDY).token_ids == good
    broken.check_invariants()
