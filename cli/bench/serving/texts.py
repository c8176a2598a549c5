"""Writes messages of a wanted number of tokens, by the server's tokenizer where it has one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .endpoint import Endpoint, Request

WORDS = tuple(
    """a about after again all also always an and another any are around as ask at away back be
    because been before began being best better between big black book both boy bring but by call
    came can car change children city close cold come could country cut day did different do does
    done door down each early earth eat end enough even ever every eye face family far fast father
    feel few find fire first fish five follow food for form found four from full game gave get girl
    give go good great green ground group grow had half hand hard has have he head hear help her
    here high him his home horse hot house how idea if important in into is it just keep kind king
    knew know land large last late later learn leave left let letter life light like line list
    little live long look low made main make man many mark may me mean men might mind more morning
    most mother move much must my name near need never new next night no north not nothing now
    number of off often old on once one only open or order other our out over own page paper part
    people place plan plant play point power press problem public put question quick rain ran read
    real red right river road rock room round run said same saw say school sea second see set she
    ship short should show side simple since sleep slow small so some song soon sound south stand
    star start state stay step still stop story street strong study such sun table take talk tell
    ten than that the their them then there these they thing think this those thought three through
    time to today together told too took top town travel tree true try turn two under until up us
    use very voice walk want war warm was watch water way we week well went were what when where
    which while white who why will wind with without woman wood word work world would write year
    yes you young your""".split()
)
FEWEST_WORDS = 50  # with one token each, for a text whose length is then exact
SAMPLE_WORDS = 400  # of the text whose tokens are counted
TOKENS_PER_WORD = 4 / 3  # of English text, where no tokenizer says


@dataclass(frozen=True)
class Writer:
    """Writes random words.

    Attributes:
        words: The words.
        tokens_per_word: Tokens of a word and the space before it, on average.
        source: What counted them: "tokenize", "usage" or "words".
    """

    words: Sequence[str]
    tokens_per_word: float
    source: str

    def text(self, tokens: int, dice: random.Random) -> str:
        """Returns a text of about so many tokens.

        Args:
            tokens: The wanted length.
            dice: Chooses the words.
        """
        count = max(1, round(tokens / self.tokens_per_word))
        return " ".join(dice.choices(self.words, k=count))


async def make_writer(endpoint: Endpoint) -> Writer:
    """Returns a writer that counts with /tokenize, else by usage, else words as one token each."""
    dice = random.Random(0)
    if await endpoint.count_tokens(WORDS[0]) is not None:
        whole = await _one_token_words(endpoint, WORDS)
        words = whole if len(whole) >= FEWEST_WORDS else WORDS
        sample = " ".join(dice.choices(words, k=SAMPLE_WORDS))
        counted = await endpoint.count_tokens(sample) or SAMPLE_WORDS
        return Writer(words, counted / SAMPLE_WORDS, "tokenize")
    counts = []
    for words_in_prompt in (8, 8 + SAMPLE_WORDS // 4):
        message = {"role": "user", "content": " ".join(dice.choices(WORDS, k=words_in_prompt))}
        turn, _ = await endpoint.exchange(Request([message], 1), endpoint.timeout)
        counts.append(turn.prompt_tokens)
    short, long = counts
    if short is not None and long is not None and long > short:
        return Writer(WORDS, (long - short) / (SAMPLE_WORDS // 4), "usage")
    return Writer(WORDS, 1.0, "words")


async def _one_token_words(endpoint: Endpoint, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words that are one token after a space."""
    count = await endpoint.count_tokens(" " + " ".join(words))
    if count == len(words):
        return tuple(words)
    # A tokenizer without words would make this a request per word, without any result.
    if len(words) == 1 or count is None or count > 3 * len(words):
        return ()
    half = len(words) // 2
    first = await _one_token_words(endpoint, words[:half])
    return first + await _one_token_words(endpoint, words[half:])


async def lengths_of(endpoint: Endpoint, texts: Sequence[str]) -> list[int]:
    """Returns the tokens of each text by /tokenize, else TOKENS_PER_WORD tokens per word."""
    lengths = []
    for text in texts:
        count = await endpoint.count_tokens(text)
        if count is None:
            return [max(1, round(len(each.split()) * TOKENS_PER_WORD)) for each in texts]
        lengths.append(count)
    return lengths
