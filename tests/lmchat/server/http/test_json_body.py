"""The number of values in a body is bounded before it is parsed."""

import asyncio
import json
import random

import pytest

from lmchat.server.errors import HttpError
from lmchat.server.http.json_body import parsed, values


def count(value):
    """Returns the number of values in a parsed body, as separators count it."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(count(one) - 1 for one in value.values()) + 1
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(count(one) - 1 for one in value) + 1
    return 1


def made(rng, depth=0):
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind < 2:
        return "".join(rng.choice('ab,[{"\\/\n:}]') for _ in range(rng.randrange(12)))
    if kind < 4:
        return rng.choice((None, True, 3, -1.5))
    size = rng.randrange(5)
    if kind == 4:
        return [made(rng, depth + 1) for _ in range(size)]
    return {f'k{i},"': made(rng, depth + 1) for i in range(size)}


@pytest.mark.parametrize("seed", range(200))
def test_values_are_counted_outside_of_texts(seed):
    value = made(random.Random(seed))
    body = json.dumps(value).encode()
    assert values(body, 10_000) == count(value)


def test_a_long_text_is_no_value():
    body = json.dumps({"text": '[{,"\\' * 100_000}).encode()
    assert asyncio.run(parsed(body, 10)) == json.loads(body)


@pytest.mark.parametrize("body", [b"[" + b"1," * 50 + b"1]", b'{"a":1},' * 50, b"[" * 50])
def test_too_many_values_are_refused(body):
    with pytest.raises(HttpError) as caught:
        asyncio.run(parsed(body, 10))
    assert caught.value.status == 413


@pytest.mark.parametrize("body", [b"", b"{", b'"\\', b'"\\"', b"NaN", b"\xff", b"[1,]"])
def test_what_is_no_json_is_400(body):
    with pytest.raises(HttpError) as caught:
        asyncio.run(parsed(body))
    assert caught.value.status == 400
