"""Checks of settings and arguments, and their conversion to the core's option structs.

A wrong name, type or range raises InvalidRequest. `wrong()` makes it: "NAME is VALUE, expected
WHAT", with NAME as its `param`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any, TypeVar

import turbomind._C as _C
from turbomind.errors import Error, InvalidRequest
from turbomind.near import suggestion
from turbomind.settings import MAX_FLOAT, MOST_ENTRIES, MOST_WORD_TOKENS, REQUEST, SAMPLING
from turbomind.shown import cut, shown

MAX_SIZE = 1 << 62
_NUMBER_KINDS = "iufO"  # of numpy's dtypes
_ROWS = {**SAMPLING, **REQUEST}
_OF_CORE = re.compile(r"(.+?)(: got| is) (.+?)[,;] expected (.+)", re.DOTALL)
_INDEX = re.compile(r"[.\[].*", re.DOTALL)
E = TypeVar("E", bound=Error)


def wrong(name: str, value: object, expected: str, *, seen: str | None = None) -> InvalidRequest:
    """Returns the error of a wrong argument or setting: "NAME is VALUE, expected WHAT".

    Args:
        name: Its name, with the place in it: "top_k", "stop_strings[1]", "logit_bias.5". It is the
            error's `param`, unless it has spaces, as "the environment variable X".
        value: The value as the caller gave it. The message shows at most 120 characters of it.
        expected: What it may be.
        seen: A description in place of the value, such as "300 entries".
    """
    text = shown(value) if seen is None else seen
    error = InvalidRequest(f"{name} is {text}, expected {expected}")
    error.param = None if " " in _INDEX.sub("", name) else name
    return error


def about(name: str, error: E) -> E:
    """Sets the `param` of an error whose message has another form, and returns the error."""
    if isinstance(error, InvalidRequest):
        error.param = name
    return error


def renamed(error: E, name: Callable[[str], str]) -> E:
    """Returns an error in the words of a caller that has other names for the arguments.

    Args:
        error: The error; one without a `param` is returned as it is.
        name: Returns the caller's name of an argument. The place in it stays: "stop_strings[1]" is
            "stop[1]" for a caller to whom "stop_strings" is "stop".
    """
    param = error.param if isinstance(error, InvalidRequest) else None
    if param is None:
        return error
    root = _INDEX.sub("", param)
    new, text = name(root) + param.removeprefix(root), str(error)
    if new == param:
        return error
    found = type(error)(new + text.removeprefix(param) if text.startswith(param) else text)
    found.__dict__.update(error.__dict__)
    return about(new, found.with_traceback(error.__traceback__))


def of_core(error: E) -> E:
    """Returns an error of the core in the form of `wrong()`, with its `param`, if it has one."""
    is_plain = isinstance(error, InvalidRequest) and error.param is None
    match = _OF_CORE.fullmatch(str(error)) if is_plain else None
    if match is None:
        return error
    name, form, seen, expected = match.groups()
    if seen == "no tokens":
        seen, expected = "empty", "at least one token"
    found = error if form == " is" else type(error)(f"{name} is {seen}, expected {expected}")
    return found if " " in name else about(name, found)


@contextlib.contextmanager
def in_form() -> Iterator[None]:
    """Raises errors of the core as `of_core()` returns them."""
    try:
        yield
    except InvalidRequest as error:
        raise of_core(error) from error


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidRequest for the first unknown name, with a near one or all known ones."""
    known = list(known)
    for name in given:
        if name not in known:
            hint = suggestion(str(name), known)
            raise about(cut(str(name)), InvalidRequest(f"unknown {what} {shown(name)}{hint}"))


def check_count(name: str, value: object) -> None:
    """Raises InvalidRequest for more entries than MOST_ENTRIES allows."""
    most = MOST_ENTRIES.get(name)
    if most is not None and isinstance(value, Sized) and len(value) > most:
        raise wrong(name, value, f"at most {most}", seen=f"{len(value)} entries")
    if name == "bad_words" and isinstance(value, list | tuple):
        for i, word in enumerate(value):
            if isinstance(word, Sized) and len(word) > MOST_WORD_TOKENS:
                most, seen = MOST_WORD_TOKENS, f"{len(word)} tokens"
                raise wrong(f"bad_words[{i}]", word, f"at most {most}", seen=seen)


def check_range(name: str, value: Any, given: object) -> None:
    """Raises InvalidRequest for a value of the right type that is out of the setting's range.

    Args:
        name: The setting.
        value: The value as the setting's type.
        given: The value as the caller gave it.
    """
    row = _ROWS.get(name)
    if row is not None and row.fits is not None and not row.fits(value):
        raise wrong(name, given, row.expected)


def _is_number(value: Any) -> bool:
    """Returns whether a value may be a number of any library. A truth value is not one, an array
    without dimensions is."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return not isinstance(value, bool)
    return getattr(dtype, "kind", "O") in _NUMBER_KINDS and "bool" not in str(dtype)


def integer_of(value: Any) -> int:
    """Returns an integer of any library as an int. Raises TypeError for anything else."""
    if not _is_number(value):
        raise TypeError(f"{type(value).__name__} is not an integer")
    return operator.index(value)


def _is_integer(value: Any) -> bool:
    try:
        integer_of(value)
    except TypeError:
        return False
    return True


def number_of(value: Any) -> float:
    """Returns a number of any library as a float. Raises TypeError for anything else, and NaN."""
    kind = type(value)
    has_value = hasattr(kind, "__float__") or hasattr(kind, "__index__")
    if not has_value or not _is_number(value) or math.isnan(value):
        raise TypeError(f"{kind.__name__} is not a number")
    return float(value)


def items_of(value: Any) -> Iterable[Any]:
    """Returns an iterable as it is. Raises TypeError where its items are characters, bytes or
    keys."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__} is not a list")
    return value


def ids_of(value: Any) -> list[int]:
    """Returns the token ids in an iterable. Raises TypeError for anything else."""
    return [integer_of(item) for item in items_of(value)]


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int, also from a numpy integer.

    Raises:
        InvalidRequest: The value is no integer from `low` to `high`.
    """
    try:
        number: int | None = integer_of(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise wrong(name, value, f"an integer from {low} to {high}")
    return number


def set_option(target: Any, name: str, value: Any, expected: str) -> None:
    """Sets a field of a core struct; raises InvalidRequest for a value of another type or range."""
    now, given = getattr(target, name), value  # `now` has the field's type
    try:
        if any(isinstance(value, kind) != isinstance(now, kind) for kind in (bool, str)):
            raise TypeError
        if isinstance(now, int) and not isinstance(now, bool):
            value = integer_of(value)
        elif isinstance(now, float):
            value = number_of(value)
        with in_form():
            setattr(target, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(name, given, expected) from error
    check_range(name, value, given)
    check_range(name, getattr(target, name), given)  # a tiny number is 0 in 32 bits


def retention_priority_of(value: float) -> float:
    """Returns a checked retention priority, rounded to float32."""
    options = _C.HandleOptions()
    set_option(options, "retention_priority", value, REQUEST["retention_priority"].expected)
    return options.retention_priority


def sampling_params(
    given: Mapping[str, Any],
    eos_token_ids: Sequence[int],
    vocab: int | None = None,
    prompt: int | None = None,
) -> tuple[_C.SamplingParams, int]:
    """Converts sampling settings; None means the default, and without a seed a random one is set.

    Args:
        given: The settings.
        eos_token_ids: End tokens where the settings have none.
        vocab: Size of the vocabulary, for the check of token ids. None: they are not checked.
        prompt: Length of the prompt, for the check of `continued`. None: it is not checked.

    Returns:
        The core's struct and the seed that applies.
    """
    params = _C.SamplingParams()
    params.eos_token_ids = list(eos_token_ids)
    for name in SAMPLING:
        value: Any = given.get(name)
        if value is None:
            continue
        check_count(name, value)
        if name in MOST_ENTRIES:
            value = _entries(name, value)
            check_ids(name, dict(value) if name == "logit_bias" else value, vocab)
        set_option(params, name, value, SAMPLING[name].expected)
    least, most = params.min_new_tokens, params.max_new_tokens
    if 0 <= most < least:
        raise wrong("min_new_tokens", least, f"at most {most}, the most tokens to generate")
    if vocab is not None and params.logprobs > vocab:
        raise wrong("logprobs", given["logprobs"], f"an integer from 0 to {vocab}")
    if prompt is not None and params.continued > prompt:
        raise wrong("continued", given["continued"], f"0 to {prompt}, the length of the prompt")
    if given.get("seed") is None:
        params.seed = secrets.randbits(63)
    return params, params.seed


def check_ids(name: str, value: Any, vocab: int | None) -> None:
    """Raises InvalidRequest for the first token id outside the vocabulary.

    Args:
        name: One of the settings of MOST_ENTRIES.
        value: Its value: biases by token id, lists of token ids, or token ids.
        vocab: Size of the vocabulary. None: nothing is checked.
    """
    if vocab is None:
        return
    if name == "logit_bias":
        for token, bias in value.items():
            if not 0 <= token < vocab:
                expected = f"the bias of a token id from 0 to {vocab - 1}"
                raise wrong(name_of_bias(token), bias, expected)
        return
    for at, item in enumerate(value):
        if name == "bad_words":
            token_id_list(item, vocab, f"{name}[{at}]")
        elif not 0 <= item < vocab:
            raise wrong(f"{name}[{at}]", item, f"a token id from 0 to {vocab - 1}")


def _entries(name: str, value: Any) -> list[Any]:
    """Returns the value of a setting that is a list, as the core takes it."""
    try:
        if name == "logit_bias":
            if not isinstance(value, Mapping):
                raise TypeError
            return [(integer_of(i), bias_of(i, bias)) for i, bias in value.items()]
        listed = list(itertools.islice(items_of(value), MOST_ENTRIES[name] + 1))
        check_count(name, listed)
        if name != "bad_words":
            return ids_of(listed)
        words = [ids_of(word) for word in listed]
        check_words(words)
        return words
    except TypeError as error:
        raise wrong(name, value, SAMPLING[name].expected) from error


def name_of_bias(token: object) -> str:
    """Returns the name of one entry of `logit_bias`, such as "logit_bias.5"."""
    return f"logit_bias.{cut(token if isinstance(token, str) else shown(token), 40)}"


def bias_of(token: object, value: Any) -> float:
    """Returns the bias of a token as a float, which may be -inf."""
    try:
        bias = number_of(value)
    except (TypeError, OverflowError) as error:
        raise wrong(name_of_bias(token), value, "a number") from error
    if bias > MAX_FLOAT:
        raise wrong(name_of_bias(token), value, "a finite number or -inf")
    return bias


def check_words(words: Sequence[Sequence[int]]) -> None:
    """Raises InvalidRequest for an empty sequence among `bad_words`."""
    for at, word in enumerate(words):
        if not word:
            raise wrong(f"bad_words[{at}]", word, "at least one token id")


def request_options(given: Mapping[str, Any], kind: str = "generate") -> _C.RequestOptions:
    """Converts `priority`, `retention_priority`, `salt` and `exact` to the core's struct."""
    options = _C.RequestOptions()
    options.kind = kind
    for name, row in REQUEST.items():
        if given.get(name) is not None:
            set_option(options, name, given[name], row.expected)
    return options


def sequence_of_ids(token_ids: Iterable[int], name: str = "token_ids") -> list[Any]:
    """Returns the entries of a sequence; InvalidRequest for what is none."""
    # Sets and mappings have no order that the caller has chosen.
    if not isinstance(token_ids, str | bytes | Set | Mapping):
        with contextlib.suppress(TypeError):  # an array without dimensions, as a number
            return list(token_ids)
    kind = f"a {type(token_ids).__name__}"
    raise wrong(name, token_ids, "a sequence of token ids", seen=kind)


def token_id_list(token_ids: Iterable[int], vocab: int, name: str = "token_ids") -> list[int]:
    """Returns token ids as plain ints; InvalidRequest names the first outside the vocabulary."""
    items = sequence_of_ids(token_ids, name)
    try:
        ids = [integer_of(item) for item in items]
    except TypeError as error:
        at = next(i for i, item in enumerate(items) if not _is_integer(item))
        raise wrong(f"{name}[{at}]", items[at], "an integer") from error
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise wrong(f"{name}[{at}]", ids[at], f"a token id from 0 to {vocab - 1}")
    return ids
