"""The core's sampler against transformers' logits processors, token for token.

The processors give the distribution; the token is its inverse at the Philox number of
(seed, attempt, choice, position), computed here from the published algorithm.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from turbomind import _C

VOCAB = 997
MASK = 0xFFFFFFFF


def philox_uniform(seed: int, attempt: int, choice: int, position: int) -> float:
    """Returns 53 bits of Philox4x32-10 with counter (position, choice, attempt) and key seed."""
    counter = [position & MASK, position >> 32, choice, attempt]
    key = [seed & MASK, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 32) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return ((counter[0] << 32 | counter[1]) >> 11) * 2.0**-53


def processors(params: _C.SamplingParams, prompt_length: int) -> list[Any]:
    """Returns the processors of `generate()` for these parameters, in its order."""
    t = transformers
    found: list[Any] = []
    if params.repetition_penalty != 1:
        found.append(t.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        found.append(t.SequenceBiasLogitsProcessor([[[i], b] for i, b in params.logit_bias]))
    if params.bad_words:
        found.append(t.NoBadWordsLogitsProcessor(params.bad_words))
    if params.min_new_tokens:
        found.append(
            t.MinNewTokensLengthLogitsProcessor(
                prompt_length, params.min_new_tokens, params.eos_token_ids, device="cpu"
            )
        )
    if params.temperature > 0:
        found.append(t.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        found.append(t.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(t.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        found.append(t.MinPLogitsWarper(params.min_p))
    return found


def expected_token(
    logits: npt.NDArray[np.float32],
    params: _C.SamplingParams,
    prompt: list[int],
    produced: list[int],
    choice: int,
    position: int,
) -> tuple[int, float]:
    """Returns (token, distance of the random number from the next token's range)."""
    ids = torch.tensor([prompt + produced])
    scores = torch.tensor(logits)[None].double()
    for processor in processors(params, len(prompt)):
        scores = processor(ids, scores)
    if params.temperature == 0:
        return int(scores.argmax()), 1.0
    mass = torch.softmax(scores[0], 0).numpy().cumsum()
    u = philox_uniform(params.seed, params.attempt, choice, position)
    token = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return token, float(np.abs(mass / mass[-1] - u).min())


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.3},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.8},
    "wide top-p": {"temperature": 3.0, "top_p": 0.97},
    "min-p": {"min_p": 0.05},
    "top-k, top-p, min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "temperature": 1.2},
    "repetition penalty": {"repetition_penalty": 1.2, "top_p": 0.9},
    "repetition reward": {"repetition_penalty": 0.8},
    "logit bias": {"logit_bias": [(3, 4.0), (11, -5.0), (12, 2.5)]},
    "bad words": {"bad_words": [[5], [20, 21], [7, 8, 9], [21, 22, 23]]},
    "min new tokens": {"min_new_tokens": 5, "eos_token_ids": [1, 2, 3]},
    "all": {
        "temperature": 0.9,
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "logit_bias": [(30, 3.0)],
        "bad_words": [[4], [20, 24]],
        "min_new_tokens": 4,
        "eos_token_ids": [30],
        "attempt": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    rng = np.random.default_rng(len(name))
    compared = 0
    for case in range(60):
        logits = (rng.standard_normal(VOCAB) * rng.choice([1.0, 3.0])).astype(np.float32)
        logits[:32] += 3  # makes the tokens of the cases likely
        params = _C.SamplingParams()
        params.seed = int(rng.integers(2**63))
        for field, value in CASES[name].items():
            setattr(params, field, value)
        prompt = [int(i) for i in rng.integers(0, 40, 8)] + [7, 8]
        produced = [int(i) for i in rng.integers(0, 40, case % 8)] + [20] * (case % 2)
        choice, position = case % 3, int(rng.integers(2**34))
        token, _, _ = _C.test_sample(logits, params, prompt, produced, choice, position)
        expected, margin = expected_token(logits, params, prompt, produced, choice, position)
        if margin < 1e-6:
            continue  # float32 and float64 may round to either side
        compared += 1
        assert token == expected, f"case {case}"
    assert compared >= 55


def test_output_penalties_count_output_tokens_only() -> None:
    """Presence and frequency penalty count the output only, as the OpenAI API defines them."""
    logits = np.zeros(8, np.float32)
    logits[[2, 3, 4]] = [1.0, 0.9, 0.8]
    params = _C.SamplingParams()
    params.temperature = 0.0
    params.presence_penalty = 0.15

    def sample(produced: list[int]) -> int:
        return _C.test_sample(logits, params, [2, 2, 2], produced, 0, 0)[0]

    assert sample([]) == 2
    assert sample([2]) == 3
    assert sample([2, 2, 3, 3, 3]) == 2  # 0.85, 0.75, 0.8
    params.frequency_penalty = 0.2
    assert sample([2, 2, 3, 3, 3]) == 4  # 0.45, 0.15, 0.8
    params.continued = 2  # of the prompt
    assert sample([]) == 3  # 0.45, 0.9, 0.8
    assert sample([3]) == 4  # 0.45, 0.55, 0.8
    params.continued = 0
    assert sample([]) == 2


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    """Log-probabilities ignore the sampling parameters; ties go to the lower id."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    logits[[800, 10, 500]] = 5
    params = _C.SamplingParams()
    params.temperature, params.top_k, params.repetition_penalty, params.logprobs = 0.5, 5, 2.0, 4
    token, logprob, top = _C.test_sample(logits, params, [10, 800], [], 0, 3)
    reference = torch.log_softmax(torch.tensor(logits).double(), 0).numpy()
    assert logprob == pytest.approx(reference[token], abs=1e-5)
    assert [i for i, _ in top[:3]] == [10, 500, 800]
    assert [value for _, value in top] == pytest.approx(np.sort(reference)[::-1][:4], abs=1e-5)
    params.logprobs = -1
    assert _C.test_sample(logits, params, [], [], 0, 3)[1:] == (None, [])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[77] = bad
    with pytest.raises(_C.ModelError, match="finite"):
        _C.test_sample(logits, _C.SamplingParams(), [], [], 0, 0)


def test_nothing_left_to_sample_is_an_error() -> None:
    params = _C.SamplingParams()
    params.bad_words = [[0], [1]]
    with pytest.raises(_C.ModelError, match="banned"):
        _C.test_sample(np.zeros(2, np.float32), params, [], [], 0, 0)
