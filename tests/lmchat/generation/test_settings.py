"""The precedence of settings, and the refusal of invalid ones."""

import inspect
import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmchat.aio.engine import AsyncChatEngine
from lmchat.aio.session import AsyncSession
from lmchat.engine import ChatEngine
from lmchat.errors import InvalidRequest, ModelError
from lmchat.generation.settings import (
    SETTINGS,
    STATELESS_SETTINGS,
    GenerationSettings,
    StatelessSettings,
    from_generation_config,
    merge,
    validate,
)
from lmchat.sessions.session import Session
from turbomind import _C
from turbomind.params import sampling_params
from turbomind.settings import SAMPLING

GOOD = {
    "max_new_tokens": 5,
    "min_new_tokens": 1,
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: -1.0, 4: -math.inf},
    "bad_words": [[1, 2], [3]],
    "stop_strings": ["a", "b"],
    "stop_token_ids": [4],
    "eos_token_ids": [5],
    "ignore_eos": True,
    "seed": 7,
    "logprobs": 2,
    "exact": True,
}


def test_every_setting_is_known_explained_and_passed_on():
    assert set(GOOD) == set(SETTINGS)
    assert all(SETTINGS.values())
    of_requests = {"attempt", "continued", "n"}
    assert set(SAMPLING) - of_requests == set(SETTINGS) - {"do_sample", "stop_strings", "exact"}
    assert validate(GOOD) == GOOD
    effective = merge(GOOD, {}, {})
    assert effective.stop_strings == ("a", "b")
    expected = {k: v for k, v in GOOD.items() if k not in ("do_sample", "stop_strings")}
    assert effective.params == {**expected, "attempt": 0}


BAD = [
    ("max_new_tokens", [0, -1, 1.5, "5", True]),
    ("min_new_tokens", [-1, 0.5]),
    ("do_sample", [1, "yes", 0.0]),
    ("temperature", [-0.1, math.nan, math.inf, 1e39, "hot", False, [1]]),
    ("top_k", [-1, 2.0, 1 << 31]),
    ("top_p", [0, 1.1, -1, math.nan, "x"]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1, math.inf, True]),
    ("presence_penalty", [math.inf, math.nan, "x"]),
    ("frequency_penalty", [-math.inf, 1e39, True]),
    ("logit_bias", [5, [1], {1: math.inf}, {1: math.nan}, {"x": 1}, {1.5: 1}, {1: "x"}]),
    ("bad_words", [3, [3], [[]], [["x"]], "word", [[True]], {1: 2}]),
    ("stop_strings", [3, [3], [""], "", ["a", None], {"a": 1}]),
    ("stop_token_ids", [3, ["x"], [True], [1.5], "5", [1 << 40]]),
    ("eos_token_ids", [3, [None], b"5"]),
    ("ignore_eos", [1, "no"]),
    ("seed", [-1, 1 << 64, 0.5, True]),
    ("logprobs", [-1, 257, True]),
]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD for v in values])
def test_what_cannot_be_is_refused_by_name_and_value(name, value):
    for given_to in (lambda s: merge(s, {}, {}), lambda s: merge({}, s, {}), validate):
        with pytest.raises(InvalidRequest, match=rf"^{name}\S* is .*, expected ") as caught:
            given_to({name: value})
        inner = value.values() if isinstance(value, dict) else value
        shown = [repr(value), *map(repr, inner if isinstance(value, list | dict) else ())]
        assert any(text in str(caught.value) for text in shown)
        assert re.split(r"[.[]", caught.value.param or "")[0] == name


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.array(0.5), 0.5),
        ("temperature", np.int64(0), 0.0),
        ("temperature", Decimal("0.5"), 0.5),
        ("top_p", Fraction(1, 2), 0.5),
        ("top_k", np.uint8(4), 4),
        ("seed", np.uint64(1 << 63), 1 << 63),
        ("stop_token_ids", np.array([5, 6], np.uint16), [5, 6]),
        ("bad_words", np.array([[5, 6]]), [[5, 6]]),
        ("logit_bias", {np.int64(5): np.float32(1.5)}, {5: 1.5}),
    ],
)
def test_numbers_of_other_libraries_are_taken(name, value, plain):
    stored = validate({name: value})[name]
    assert (stored, type(stored)) == (plain, type(plain))
    core, same = (getattr(sampling_params({name: v}, ())[0], name) for v in (value, plain))
    assert core == same


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", np.True_),
        ("temperature", np.array(True)),
        ("temperature", np.array("0.5")),
        ("temperature", bytearray(b"1")),
        ("temperature", 1j),
        ("top_k", np.True_),
        ("top_k", np.float64(4)),
        ("stop_token_ids", b"56"),
        ("stop_token_ids", bytearray(b"56")),
        ("stop_token_ids", {5: 1}),
        ("stop_token_ids", [True]),
        ("stop_token_ids", np.array([True])),
        ("stop_token_ids", np.array([5.0])),
        ("eos_token_ids", [np.True_]),
        ("bad_words", [b"56"]),
        ("bad_words", [{5: 1}]),
        ("logit_bias", [(5, 1.5)]),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: "1"}),
    ],
)
def test_what_only_looks_like_a_number_is_refused_by_both(name, value):
    """By the settings of sessions and by the core's, which `turbomind` takes."""
    for take in (validate, lambda settings: sampling_params(settings, ())):
        with pytest.raises(InvalidRequest, match=rf"^{name}\S* is .*, expected"):
            take({name: value})


@pytest.mark.parametrize("name", ["temprature", "attempt", "priority", "salt", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(
        InvalidRequest,
        match="unknown setting.*(expected one of max_|did you mean 'te)",
    ):
        validate({name: 1})


@given(
    st.sampled_from(sorted(set(GOOD) & set(SAMPLING) - {"logit_bias", "bad_words"})),
    st.integers(-3, 300) | st.floats(width=32) | st.booleans() | st.lists(st.integers(-1, 60)),
)
def test_what_is_accepted_the_core_accepts(name, value):
    """And the other way round: the ranges here are those of the sampler."""

    def core(settings):
        params, _ = sampling_params({"logprobs": 0, **settings}, ())
        _C.test_sample(np.zeros(300, np.float32), params, [], [], 0, 0)

    outcomes = []
    for check in (lambda s: core(validate(s)), core):
        try:
            check({name: value})
            outcomes.append(True)
        except InvalidRequest:
            outcomes.append(False)
    assert outcomes[0] == outcomes[1]


def test_values_come_out_as_plain_python():
    found = validate(
        {
            "top_k": np.int64(3),
            "temperature": np.float32(0.5),
            "stop_strings": "a",
            "stop_token_ids": np.array([1, 2]),
            "bad_words": ((1, 2),),
            "logit_bias": {"5": 1},
            "seed": None,
        }
    )
    assert json.loads(json.dumps(found)) == {
        "top_k": 3,
        "temperature": 0.5,
        "stop_strings": ["a"],
        "stop_token_ids": [1, 2],
        "bad_words": [[1, 2]],
        "logit_bias": {"5": 1.0},
    }
    assert found["logit_bias"] == {5: 1.0}


def test_call_over_session_over_model():
    model = {"temperature": 0.0, "top_k": 1, "top_p": 0.1}
    session = {"top_k": 2, "top_p": 0.2, "stop_strings": ["a"], "temperature": None}
    effective = merge({"top_p": 0.3, "top_k": None}, session, model)
    params = {k: v for k, v in effective.params.items() if k != "seed"}
    assert params == {"temperature": 0.0, "top_k": 2, "top_p": 0.3, "attempt": 0}
    assert effective.stop_strings == ("a",)
    assert merge({"stop_strings": []}, session, model).stop_strings == ()
    assert model == {"temperature": 0.0, "top_k": 1, "top_p": 0.1}


@pytest.mark.parametrize(
    ("call", "session", "model", "temperature"),
    [
        ({}, {}, {}, None),
        ({}, {}, {"temperature": 0.0}, 0.0),
        ({"temperature": 0.7}, {}, {"temperature": 0.0}, 0.7),
        ({"do_sample": False}, {"temperature": 0.7}, {}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, {}, {}, 0.0),
        ({"do_sample": True}, {"temperature": 0.7}, {"temperature": 0.0}, 0.7),
        ({"do_sample": True}, {}, {"temperature": 0.0}, 1.0),
        ({"do_sample": True}, {}, {}, None),
        ({"temperature": 0.7}, {"do_sample": False}, {}, 0.7),
        ({}, {"do_sample": True}, {"temperature": 0.0}, 1.0),
    ],
)
def test_do_sample_decides_the_temperature(call, session, model, temperature):
    effective = merge(call, session, model)
    assert effective.params.get("temperature") == temperature
    assert "do_sample" not in effective.params


def test_settings_that_contradict_each_other():
    with pytest.raises(InvalidRequest, match="do_sample is True, expected False, or a temp"):
        validate({"do_sample": True, "temperature": 0})
    with pytest.raises(InvalidRequest, match="min_new_tokens is 9, expected at most 5,"):
        merge({"min_new_tokens": 9}, {"max_new_tokens": 5}, {})


def test_the_seed_is_chosen_and_stored():
    seeds = {merge({}, {}, {}).params["seed"] for _ in range(20)}
    assert len(seeds) == 20
    assert merge({"seed": 5}, {}, {}).params["seed"] == 5
    assert merge({}, {"seed": 6}, {}, attempt=2).stored == {"seed": 6, "attempt": 2}


def test_what_is_stored_generates_the_same_again():
    first = merge(GOOD, {}, {"temperature": 0.0, "top_k": 50})
    stored = {name: value for name, value in first.stored.items() if name != "attempt"}
    assert merge(stored, {"top_p": 0.5}, {}) == first


def test_a_models_own_settings():
    assert from_generation_config({}) == {"temperature": 0.0}
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": None,
        "eos_token_id": [1, 2],
        "num_beams": 4,
        "max_new_tokens": 2048,
        "stop_strings": "###",
        "bad_words_ids": [[5]],
        "transformers_version": "5",
    }
    expected = {"temperature": 0.6, "top_k": 50, "max_new_tokens": 2048}
    assert from_generation_config(config) == {
        **expected,
        "stop_strings": ["###"],
        "bad_words": [[5]],
    }
    greedy = {"temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.05}
    assert from_generation_config(greedy) == {"temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": True, "top_p": 7}, "top_p is 7"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop_strings": [""]}, "stop_strings"),
    ],
)
def test_a_models_broken_settings_are_a_model_error(config, message):
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        from_generation_config(config)


# --- keywords -------------------------------------------------------------------------------------


def test_the_typed_settings_are_those_of_the_table():
    assert list(GenerationSettings.__annotations__) == list(SETTINGS)
    assert not GenerationSettings.__required_keys__
    assert StatelessSettings.__optional_keys__ == set(STATELESS_SETTINGS)


def test_only_a_generation_without_a_session_takes_n():
    assert list(STATELESS_SETTINGS)[len(SETTINGS) :] == ["n", "skip_special_tokens"]
    assert validate({**GOOD, "n": 3}, stateless=True) == {**GOOD, "n": 3}
    assert merge({"n": 256}, {}, {}, stateless=True).params["n"] == 256
    for wrong in (0, 257, True, 1.5, "2", 10**30):
        with pytest.raises(InvalidRequest, match="^n is .*, expected"):
            validate({"n": wrong}, stateless=True)
    for number in (1, 2, "x"):
        with pytest.raises(InvalidRequest, match=r"^n is .*session.*generate\(\)"):
            validate({"n": number})
    with pytest.raises(InvalidRequest, match="^n is 2, expected to be left out in a session"):
        merge({}, {"n": 2}, {}, stateless=True)
    assert validate({"n": None}) == validate({"n": None}, stateless=True) == {}


def test_only_a_generation_without_a_session_spells_special_tokens():
    given = {"skip_special_tokens": False}
    assert validate(given, stateless=True) == given
    found = merge(given, {}, {}, stateless=True)
    assert "skip_special_tokens" not in found.params
    assert found.hidden_tokens([4]) == {4}
    assert merge({}, {}, {}, stateless=True).hidden_tokens([4]) is None
    more = {"eos_token_ids": [5], "stop_token_ids": [6]}
    assert merge({**given, **more}, {}, {}, stateless=True).hidden_tokens([4]) == {5, 6}
    more = {"ignore_eos": True}
    assert merge({**given, **more}, {}, {}, stateless=True).hidden_tokens([4]) == set()
    with pytest.raises(InvalidRequest, match=r"^skip_special_tokens is .*session"):
        validate(given)
    with pytest.raises(InvalidRequest, match="^skip_special_tokens is 1, expected"):
        validate({"skip_special_tokens": 1}, stateless=True)


@pytest.mark.parametrize("kind", [Session, AsyncSession, ChatEngine, AsyncChatEngine])
def test_every_verb_that_generates_lists_the_settings(kind):
    verbs = ("send", "stream", "continue_", "retry", "edit", "generate")
    found = [getattr(kind, verb) for verb in verbs if hasattr(kind, verb)]
    assert len(found) in (2, 5)
    typed = "StatelessSettings" if hasattr(kind, "generate") else "GenerationSettings"
    for verb in found:
        settings = inspect.signature(verb).parameters["settings"]
        assert settings.annotation == f"Unpack[{typed}]"
