"""The event stream of a completion is read however its bytes are cut."""

import itertools
import json

import pytest
from scripted_server import delta, usage

from lmchat.cli.bench.serving.event_stream import StreamReader
from lmchat.cli.bench.serving.turn import Turn


def encoded(*events):
    lines = [e if isinstance(e, str) else f"data: {json.dumps(e)}" for e in events]
    return "".join(f"{line}\n\n" for line in lines).encode()


def read(data, *cuts):
    """Feeds the bytes in parts that arrive at 1, 2, 3 ... seconds."""
    reader = StreamReader()
    borders = [0, *cuts, len(data)]
    for at, (begin, end) in enumerate(itertools.pairwise(borders), 1):
        reader.feed(data[begin:end], float(at))
    return reader


STREAM = encoded(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    ": keep-alive",
    delta("Grüße"),
    delta(" zwei"),
    delta(None, finish_reason="stop"),
    usage(11, 5, cached=8),
    "data: [DONE]",
)


def test_every_cut_of_the_bytes_gives_the_same_text():
    for cut in range(len(STREAM)):
        reader = read(STREAM, cut)
        assert reader.text == "Grüße zwei"
        assert len(reader.times) == 2
        assert (reader.prompt_tokens, reader.completion_tokens) == (11, 5)
        assert (reader.cached_tokens, reader.finish_reason) == (8, "stop")
        assert reader.done
        assert reader.error is reader.malformed is None


def test_an_event_has_the_time_of_its_last_byte():
    end_of_first = STREAM.index(b" zwei")
    assert read(STREAM, 5, end_of_first).times == [2.0, 3.0]


def test_line_ends_may_be_crlf_and_data_may_have_several_lines():
    data = encoded(delta("a")).replace(b"\n", b"\r\n")
    assert read(data).text == "a"
    split = json.dumps(delta("b"), indent=0).replace("\n", "\ndata: ")
    assert read(f"data: {split}\n\n".encode()).text == "b"


def test_tokens_are_counted_by_lists_of_ids_or_logprobs():
    listed = [{"token": "x"}] * 2
    reader = read(
        encoded(
            delta("abc", token_ids=[1, 2, 3]),
            delta("de", logprobs={"content": listed}),
            delta("", token_ids=[4]),  # a token without text yet
            {"choices": [{"text": "f", "logprobs": {"tokens": ["f"]}}]},
        )
    )
    assert reader.counts == [3, 2, 1, 1]
    turn = Turn(0.0)
    turn.take(reader)
    assert turn.tokens == 7
    assert turn.tokens_by_event() == [3, 2, 1, 1]


def test_reasoning_counts_as_tokens_but_not_as_text():
    for name in ("reasoning_content", "reasoning"):
        reader = read(encoded({"choices": [{"delta": {name: "hm"}}]}, delta("yes")))
        assert reader.text == "yes"
        assert len(reader.times) == 2


def test_an_error_in_the_stream_and_a_malformed_event_are_kept():
    reader = read(encoded(delta("a"), {"error": {"message": "broken", "code": 500}}))
    assert reader.error == {"message": "broken", "code": 500}
    assert not reader.complete
    assert read(b"data: oops\n\n").malformed == "oops"
    assert read(b'data: {"choices": [3]}\n\n').malformed


@pytest.mark.parametrize("last", ["data: [DONE]", delta(None, finish_reason="length")])
def test_a_stream_is_complete_with_either_end(last):
    assert not read(encoded(delta("a"))).complete
    assert read(encoded(delta("a"), last)).complete
