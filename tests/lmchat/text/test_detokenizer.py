"""Streams of tokens against whole decodes by the library, for decoders of many shapes."""

import random

import pytest
import tokenizers
from chat_models import make_tokenizer
from tokenizers import decoders, models

from lmchat.text.replies.reply_parser import ReplyParser
from lmchat.text.tokenizer import Tokenizer

TEXT = "naïve 你好 🦙🦙 កាន់ 👩‍👩‍👧 end"
WORDS = ["▁", "▁S", "ha", "en", "▁cat", "\ufffd", ""]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def byte_level(*steps):
    """Returns a byte-level BPE with this decoder."""
    backend = make_tokenizer()
    backend.decoder = decoders.Sequence(list(steps)) if steps else decoders.ByteLevel()
    return backend


def byte_fallback(decoder):
    """Returns a vocabulary of bytes and words."""
    vocab = {text: i for i, text in enumerate([*BYTES, *WORDS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoder
    return backend


def spaces(*nested):
    return decoders.Sequence(
        [decoders.Replace("▁", " "), *nested, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


BACKENDS = {
    "alone": byte_level(),
    "in a sequence": byte_level(decoders.ByteLevel()),
    "in two levels": byte_level(decoders.Sequence([decoders.ByteLevel()])),
    "in three levels": byte_level(decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])),
    "with others": byte_level(decoders.Fuse(), decoders.Sequence([decoders.ByteLevel()])),
    "before a replacement": byte_level(decoders.ByteLevel(), decoders.Replace("Z", "z")),
    "after a replacement": byte_level(
        decoders.Sequence([decoders.Replace("Z", "z")]), decoders.ByteLevel()
    ),
    "bytes": byte_fallback(spaces(decoders.ByteFallback())),
    "bytes in two levels": byte_fallback(spaces(decoders.Sequence([decoders.ByteFallback()]))),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def whole(backend, ids):
    return backend.decode(ids, skip_special_tokens=False)


def streamed(tokenizer, ids, cut=1, context=()):
    stream = tokenizer.stream(context=context, skip_special_tokens=False)
    return [*(stream.push(ids[i : i + cut]) for i in range(0, len(ids), cut)), stream.flush()]


def test_pieces_of_any_ids_join_to_what_the_library_decodes(backend):
    tokenizer, chance = Tokenizer(backend), random.Random(1)
    bytes_ = [i for i in range(tokenizer.vocab_size) if len(backend.id_to_token(i)) in (1, 6)]
    # Ids without a token are among them.
    pools = (bytes_, range(tokenizer.vocab_size + 9), [*bytes_[-9:], tokenizer.vocab_size])
    for i in range(600):
        ids = chance.choices(pools[i % 3], k=chance.randrange(40))
        assert "".join(streamed(tokenizer, ids, 1 + i % 4)) == whole(backend, ids), ids


def test_no_piece_has_half_a_character(backend):
    tokenizer = Tokenizer(backend)
    ids = [backend.token_to_id(f"<0x{b:02X}>") for b in TEXT.encode()]
    if None in ids:
        ids = backend.encode(TEXT).ids
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    if backend.token_to_id("<0x00>") is None:  # shown as soon as it is whole
        assert sum(map(bool, pieces)) > len(TEXT) / 2


def test_a_reply_that_is_no_text_is_shown_and_costs_its_own_tokens(monkeypatch):
    backend = BACKENDS["before a replacement"]
    tokenizer, decoded = Tokenizer(backend), []
    decode = tokenizer.decode

    def counting(ids, **options):
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    broken = next(i for i in range(300) if whole(backend, [i, i]) == "\ufffd\ufffd")
    ids = [broken] * 500
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert len("".join(pieces)) > len(ids) - 20
    assert "".join([*pieces, stream.flush()]) == whole(backend, ids)
    assert sum(decoded) < 100 * len(ids)


SPACED = BACKENDS["bytes"]
HA, S, CAT, NONE = (SPACED.token_to_id("ha"), SPACED.token_to_id("▁S"),
                    SPACED.token_to_id("▁cat"), SPACED.get_vocab_size() + 3)  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([HA, NONE, S], "ha S"),
        ([HA, NONE, NONE, S, NONE, CAT], "ha S cat"),
        ([NONE, S], "S"),
        ([HA, SPACED.token_to_id(""), S], "ha S"),
        ([HA, 0xE4, NONE, 0xBD, 0xA0, S], "ha你 S"),
    ],
)
def test_an_id_without_a_token_changes_nothing_else(ids, text):
    tokenizer = Tokenizer(SPACED)
    assert whole(SPACED, ids) == text
    assert "".join(streamed(tokenizer, ids)) == text
    parser = ReplyParser(tokenizer)
    shown = [part for token in ids for _, part in parser.push([token])]
    parser.finish()
    assert parser.text == text
    assert text.startswith("".join(shown))
    assert parser.stored_tokens == len(ids)


def test_the_context_may_end_with_an_id_without_a_token():
    tokenizer = Tokenizer(SPACED)
    assert "".join(streamed(tokenizer, [S, CAT], context=[HA, NONE])) == " S cat"
    parser = ReplyParser(tokenizer, context=[HA, NONE])
    parser.push([NONE, S])
    assert parser.text == " S"
