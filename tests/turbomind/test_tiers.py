"""Lower tiers: reloaded KV gives the same tokens and log-probabilities of the whole vocabulary.

Nothing is computed twice. Cold requests of an engine without tiers are the reference.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
from checkpoints import TINY, Zoo, prompt

import turbomind
from turbomind import Engine, Flushed, Generation, Handle, InvalidRequest, Residence

Open = Callable[..., Engine]
GREEDY = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0, "logprobs": 5}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 11}
FIRST, SECOND = 150, 30  # tokens of the first prompt, and of the second turn's
KV_BYTES = 2 if devices.ON_GPU else 4  # of a number of the TINY model
MODELS = ("llama_gqa", "qwen2_window", "mistral_window_page")


def tiers_of(kind: str, folder: Path) -> dict[str, Any]:
    """Returns engine options for the tiers of that name."""
    options: dict[str, Any] = {}
    if kind != "disk":
        options["host_memory"] = "16MiB"
    if kind != "host":
        options["page_folder"] = folder / "pages"
    return options


def turn(handle: Handle, prefix_length: int, append: list[int], **params: Any) -> Generation:
    with handle.advance(prefix_length, append, **params) as stream:
        return stream.result()


def same(got: Generation, wanted: Generation) -> None:
    assert got.token_ids == wanted.token_ids
    assert got.logprobs == wanted.logprobs  # bit for bit


def away(engine: Engine, handle: Handle) -> None:
    """Saves the handle and evicts all its pages from the device."""
    handle.save()
    assert engine.flush_pages(30)
    handle.park()
    engine.evict()
    stats = engine.stats()
    assert stats.pages_free == stats.pages_total


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


class Session:
    """A first turn in an engine with tiers, and the expected results of its continuations."""

    def __init__(
        self, folder: Path, open_engine: Open, params: dict[str, Any], **options: Any
    ) -> None:
        self.folder, self.open_engine = folder, open_engine
        self.cold = open_engine(folder, prefix_reuse=False, **options)
        vocab = self.cold.vocab_size
        self.params = {**params, "logprobs": vocab}  # of every token: rows bit for bit
        self.first, self.second = prompt(FIRST, vocab), prompt(SECOND, vocab, seed=2)
        self.tokens = self.first + self.want(self.first).token_ids
        self.written = len(self.tokens) - 1

    def want(self, token_ids: list[int]) -> Generation:
        return self.cold.generate(token_ids, **self.params)

    def begin(self, engine: Engine) -> Handle:
        handle = engine.open(persist=True)
        assert turn(handle, 0, self.first, **self.params).token_ids == self.tokens[FIRST:]
        return handle

    def go_on(self, handle: Handle) -> Generation:
        got = turn(handle, len(self.tokens), self.second, **self.params)
        same(got, self.want(self.tokens + self.second))
        return got


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_tokens_do_not_depend_on_the_tier_of_their_pages(
    kind: str, name: str, params: dict[str, Any], zoo: Zoo, tmp_path: Path, open_engine: Open
) -> None:
    session = Session(zoo.folder(name), open_engine, params)
    tokens, written = session.tokens, session.written
    engine = open_engine(session.folder, **tiers_of(kind, tmp_path))
    handle = session.begin(engine)
    resident = engine.open()
    fork = handle.fork()
    assert session.go_on(fork).reused_tokens == written
    resident.append(tokens)
    fork.close()  # its additional pages are not saved
    away(engine, handle)

    before = engine.stats()
    back = session.go_on(handle)
    assert back.reused_tokens == back.loaded_tokens == written
    assert back.foreign_tokens == 0
    after = engine.stats()
    assert after.tokens_prefilled - before.tokens_prefilled == SECOND + 1
    assert after.failed_loads == 0

    # A branch from the middle of a page of a lower tier.
    handle.close()
    engine.evict()
    other = prompt(20, engine.vocab_size, seed=3)
    branch = turn(resident, 100, other, **session.params)
    same(branch, session.want(tokens[:100] + other))
    assert branch.reused_tokens == branch.loaded_tokens == 100
    resident.close()

    # Loaded before it is needed.
    engine.evict()
    warmed = engine.open()
    warmed.append(tokens)
    warmed.warm()
    deadline = time.monotonic() + 20
    while engine.residence(tokens).device < written:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert session.go_on(warmed).loaded_tokens == 0


@pytest.mark.parametrize("name", MODELS)
def test_pages_on_disk_outlast_the_engine(
    name: str, zoo: Zoo, tmp_path: Path, open_engine: Open
) -> None:
    session = Session(zoo.folder(name), open_engine, GREEDY)
    options = tiers_of("disk", tmp_path)
    with turbomind.Engine(session.folder, threads=1, cache_memory="32MiB", **options) as engine:
        resident = session.begin(engine)
        assert resident.length == len(session.tokens)  # close() saves open handles
    again = open_engine(session.folder, **options)
    assert again.residence(session.tokens) == Residence(0, 0, session.written)
    handle = again.open(persist=True)
    handle.append(session.tokens)
    back = session.go_on(handle)
    assert back.loaded_tokens == session.written
    assert again.stats().tokens_prefilled == SECOND + 1
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700


@pytest.mark.cpu_only("on a GPU KV has the type of the weights")
def test_float16_pages_are_read_as_float16_only(
    zoo: Zoo, tmp_path: Path, open_engine: Open
) -> None:
    """A page of bfloat16 has as many bytes, so only the fingerprint tells them apart."""
    folder, pages = zoo.folder("llama_gqa"), tiers_of("disk", tmp_path)
    session = Session(folder, open_engine, GREEDY, kv_dtype="float16")
    with turbomind.Engine(
        folder, threads=1, cache_memory="32MiB", kv_dtype="float16", **pages
    ) as engine:
        session.begin(engine).close(save=True)
    other = open_engine(folder, kv_dtype="bfloat16", **pages)
    assert other.residence(session.tokens) == Residence(0, 0, 0)
    again = open_engine(folder, kv_dtype="float16", **pages)
    handle = again.open(persist=True)
    handle.append(session.tokens)
    assert session.go_on(handle).loaded_tokens == session.written
    kv_bytes = again.speeds()["kv_bytes_per_token"]
    assert kv_bytes == other.speeds()["kv_bytes_per_token"] == session.cold.info.kv_bytes_per_token


def test_damaged_pages_are_computed_again(zoo: Zoo, tmp_path: Path, open_engine: Open) -> None:
    session = Session(zoo.folder("llama_gqa"), open_engine, GREEDY)
    options = tiers_of("disk", tmp_path)
    with turbomind.Engine(session.folder, threads=1, cache_memory="32MiB", **options) as engine:
        session.begin(engine).close(save=True)
    files = [f for f in (tmp_path / "pages").rglob("*") if f.is_file() and f.stat().st_size > 4096]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 2, len(data), 1000):
            data[at] ^= 0x10
        file.write_bytes(data)
    again = open_engine(session.folder, **options)
    handle = again.open(persist=True)
    handle.append(session.tokens)
    assert session.go_on(handle).loaded_tokens < session.written
    away(again, handle)  # damaged pages are written again
    fresh = again.open()
    fresh.append(session.tokens)
    assert session.go_on(fresh).loaded_tokens >= session.written


def test_sessions_that_exceed_the_device_move_through_tiers(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    cold = open_engine(config, load_format="dummy", prefix_reuse=False)
    engine = open_engine(config, load_format="dummy", cache_pages=4, **tiers_of("both", tmp_path))
    sessions = []
    for i in range(5):
        tokens = [i, *prompt(129, engine.vocab_size, seed=i)]  # no two share a first token
        sessions.append((engine.open(persist=True), tokens))
    expected = 0
    for number in range(3):
        for handle, tokens in sessions:
            length = handle.length
            append = tokens if number == 0 else [3, 4, 5]
            got = turn(handle, length, append, **GREEDY)
            if number > 0:
                tokens += append
            same(got, cold.generate(tokens, **GREEDY))
            expected += len(append) + (number > 0)
            tokens += got.token_ids
            handle.save()
            assert engine.flush_pages(30)
    assert engine.stats().tokens_prefilled == expected
    assert engine.stats().tokens_loaded > 0


def test_a_request_can_be_cancelled_while_its_pages_load(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    engine = open_engine(config, load_format="dummy", **tiers_of("disk", tmp_path))
    ids = prompt(200, engine.vocab_size)
    handle = engine.open(persist=True)
    want = turn(handle, 0, ids, **GREEDY)
    away(engine, handle)
    for _ in range(30):
        stream = engine.stream(ids, **GREEDY)
        stream.close()
        engine.evict()
    same(engine.generate(ids, **GREEDY), want)
    handle.close()
    assert engine.flush_pages(30)
    stats = engine.stats()
    assert stats.pages_referenced == 0
    engine.check_invariants()


@pytest.mark.skipif(
    not devices.ON_GPU and turbomind._C.resolve_isa("auto") == "portable",
    reason="one numerics fingerprint",
)
def test_exact_computes_pages_of_another_numerics_fingerprint_again(
    zoo: Zoo, tmp_path: Path, open_engine: Open
) -> None:
    options = tiers_of("disk", tmp_path)
    folder = zoo.folder("llama_gqa")
    another = devices.another_machine()
    with turbomind.Engine(folder, threads=1, cache_memory="32MiB", **another, **options) as other:
        ids = prompt(FIRST, other.vocab_size)
        handle = other.open(persist=True)
        tokens = ids + turn(handle, 0, ids, **GREEDY).token_ids
        numerics = other.numerics_fingerprint
    engine = open_engine(folder, **options)
    assert engine.numerics_fingerprint != numerics
    cold = open_engine(folder, prefix_reuse=False)
    assert engine.fingerprint == cold.fingerprint
    mixed = engine.generate(tokens, **GREEDY)
    assert mixed.foreign_tokens == mixed.loaded_tokens == len(tokens) - 1
    again = engine.generate(tokens, **GREEDY)
    assert again.foreign_tokens == again.reused_tokens == len(tokens) - 1
    assert again.loaded_tokens < 64  # full pages are on the device now
    exact = engine.open(persist=True)
    got = turn(exact, 0, tokens, exact=True, **GREEDY)
    assert (got.reused_tokens, got.foreign_tokens) == (0, 0)
    same(got, cold.generate(tokens, **GREEDY))
    away(engine, exact)  # replaces the foreign pages in the lower tier
    back = engine.generate(tokens, **GREEDY)
    assert back.foreign_tokens == 0
    assert back.loaded_tokens >= 128
    same(back, got)


def test_owners_of_different_salts_share_no_pages(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    engine = open_engine(config, load_format="dummy", **tiers_of("both", tmp_path))
    ids = prompt(130, engine.vocab_size)
    handle = engine.open(salt="a", persist=True)
    turn(handle, 0, ids, **GREEDY)
    away(engine, handle)
    assert engine.residence(ids).disk == 0
    assert engine.residence(ids, salt="a").disk == 130
    assert engine.generate(ids, salt="b", **GREEDY).loaded_tokens == 0
    assert engine.generate(ids, salt="a", **GREEDY).loaded_tokens == 129


def test_residence_reports_the_prefix_of_each_tier(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    engine = open_engine(config, load_format="dummy", **tiers_of("both", tmp_path))
    ids = prompt(140, engine.vocab_size)
    assert engine.residence(ids) == Residence(0, 0, 0)
    handle = engine.open(persist=True)
    turn(handle, 0, ids, **GREEDY)
    assert engine.residence(ids).device == 140
    away(engine, handle)
    assert engine.residence(ids) == Residence(0, 140, 140)
    speeds = engine.speeds()
    assert speeds["prefill"] > 0
    assert speeds["kv_bytes_per_token"] == 2 * 16 * KV_BYTES  # one head of 16, K and V
    assert 0 < engine.predict_ttft(ids, 5) < 60
    stats = engine.stats().tiers
    assert set(stats) == {"host", "disk"}
    assert stats["disk"].pages == 3

    keys = engine.page_keys(ids)
    assert [len(key) for key in keys] == [16, 16, 16]
    assert keys[:2] == engine.page_keys(ids[:128])
    handle.close()
    engine.remove_pages(keys)
    assert engine.flush_pages(30)
    assert engine.residence(ids) == Residence(0, 0, 0)
    with pytest.raises(InvalidRequest, match="16 bytes"):
        engine.remove_pages([b"short"])


@pytest.mark.parametrize(
    ("quota", "limits"), [("auto", True), (None, False), ("none", False), ("3GiB", True)]
)
def test_the_quota_of_the_disk(
    config: Path, tmp_path: Path, open_engine: Open, quota: str | None, limits: bool
) -> None:
    """By default a tenth of what is free, counting the pages that are there, at least 1 GiB."""
    engine = open_engine(config, load_format="dummy", page_folder=tmp_path / "p", disk_quota=quota)
    found = engine.stats().tiers["disk"].quota
    assert (found > 0) == limits
    if quota == "auto":
        assert found == pytest.approx(max(1 << 30, shutil.disk_usage(tmp_path).free / 10), rel=0.1)


@pytest.mark.parametrize("quota", ["Auto", "0", 0, -1, True, "5%", [], "1 quota"])
def test_wrong_quotas_are_refused(config: Path, tmp_path: Path, quota: object) -> None:
    options: Any = {"page_folder": tmp_path / "p", "disk_quota": quota}
    with pytest.raises(InvalidRequest, match="disk_quota is .* or 'auto', or None or 'none'"):
        Engine(config, load_format="dummy", **options)


def test_flush_reports_pages_that_could_not_be_saved(
    config: Path, tmp_path: Path, open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    # Room for two pages of 64 tokens: pages that follow them do not evict them.
    options = {"page_folder": tmp_path / "p", "disk_quota": 5_000 * KV_BYTES}
    engine = open_engine(config, load_format="dummy", **options)
    ids = prompt(240, engine.vocab_size)
    handle = engine.open(persist=True)
    tokens = ids + turn(handle, 0, ids, **GREEDY).token_ids
    handle.save()
    flushed = engine.flush_pages(30)
    assert flushed.ended
    assert not flushed
    keys = engine.page_keys(tokens[:-1])
    assert engine.stats().tiers["disk"].pages == 2
    assert set(flushed.unsaved) == set(keys[2:])
    assert engine.stats().failed_saves >= len(flushed.unsaved)
    engine.remove_pages(keys)
    assert engine.flush_pages(30) == Flushed(True)
    handle.save()
    with caplog.at_level(logging.WARNING):
        engine.close()
        engine.close()
    assert len([r for r in caplog.records if "could not be saved" in r.message]) == 1


def test_wrong_tier_options_are_refused(config: Path, tmp_path: Path, open_engine: Open) -> None:
    plain = open_engine(config, load_format="dummy")
    with pytest.raises(InvalidRequest, match="persist"):
        plain.open(persist=True)
    assert plain.flush_pages(0)
    assert plain.residence(prompt(100, plain.vocab_size)) == Residence(0, 0, 0)
    handle = plain.open()
    with pytest.raises(InvalidRequest, match="persist"):
        handle.save()
    handle.warm()  # there is nothing to load
    for bad in (
        {"host_memory": 0},
        {"host_memory": "1PiB"},
        {"page_folder": ""},
        {"disk_quota": "1GiB"},
        {"host_memory": "1MiB", "prefix_reuse": False},
        {"page_folder": config},  # a file
    ):
        with pytest.raises(InvalidRequest):
            open_engine(config, load_format="dummy", **bad)
    for timeout in (-1, float("nan"), "1"):
        with pytest.raises(InvalidRequest, match="timeout"):
            plain.flush_pages(timeout)  # type: ignore[arg-type]


def test_forecasts_answer_for_many_sequences_at_once(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    engine = open_engine(config, load_format="dummy", **tiers_of("disk", tmp_path))
    prompts = [prompt(length, engine.vocab_size) for length in (140, 64, 5, 0)]
    handle = engine.open(persist=True)
    turn(handle, 0, prompts[0], **GREEDY)
    asked = [(ids, salt) for ids in prompts for salt in ("", "another")]
    found = engine.forecasts(asked, 5)
    assert [one.residence for one in found] == [engine.residence(*one) for one in asked]
    assert [one.ttft for one in found] == [engine.predict_ttft(ids, 5, salt) for ids, salt in asked]
    assert found[0].residence.device > 0
    assert found[1].residence.device == 0
    assert engine.forecasts([]) == []
    for wrong, name in (([([-1], "")], "token_ids"), ([([1], 5)], "salt")):
        with pytest.raises(InvalidRequest, match=name):
            engine.forecasts(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="new_tokens"):
        engine.forecasts(asked, 0)
