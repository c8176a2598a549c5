"""Limits of a rendering, and the prices of a template's operations.

jinja2's sandbox keeps templates away from Python, but not from loops without end, numbers and
strings without bound, or a nested list whose printing takes forever. `template_sandbox` therefore
asks here for the price of every operation whose result, or whose time, can be much larger than its
source: it is charged to the thread's `Meter` before the operation runs. The rest is cheap for its
size, and sizes are bounded by what is priced.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, MappingView
from dataclasses import dataclass, replace
from typing import Any

import jinja2.exceptions
import jinja2.utils

_MIB = 1 << 20
NODE = 64  # bytes of an element of a list or a dictionary, about
CALL = 128  # approximate bytes that a call or a block leaves allocated
_STEP = 16 << 10  # bytes from one look at the clock to the next
_MAX_NUMBER = 100_000  # for widths, counts and the like; jinja2's range has the same bound
_MAX_BITS = 10_000  # of an integer
_MAX_STEPS = 1 << 30  # of one search or wrap, about a second
_MAX_FORMAT = 1_000  # characters of a format of dates


@dataclass(frozen=True)
class Limits:
    """The limits of one rendering.

    `seconds` of processor time of its thread; `memory` in bytes, of all it ever made;
    `value` in bytes, of one string or nested list when printed; `output` in characters.
    Each message adds `message_seconds`, up to `most_seconds` in all, and `message_memory`: some
    templates look back over all messages for each of them.
    """

    seconds: float = 2.0
    memory: int = 256 * _MIB
    value: int = 16 * _MIB
    output: int = 16 * _MIB
    message_seconds: float = 0.01
    message_memory: int = _MIB // 8
    most_seconds: float = 30.0

    def of(self, messages: int) -> Limits:
        """Returns the limits of a rendering of this many messages."""
        grown = min(self.seconds + messages * self.message_seconds, self.most_seconds)
        return replace(
            self,
            seconds=max(self.seconds, grown),
            memory=self.memory + messages * self.message_memory,
        )


class LimitExceeded(Exception):
    """A template exceeded a limit, which the message names."""


class Meter:
    """The rest of a rendering's limits, checked after every `_STEP` bytes."""

    __slots__ = ("_memory", "_until", "fuel", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.fuel = _STEP
        self._memory = limits.memory
        self._until = time.thread_time() + limits.seconds

    def work(self, size: int) -> None:
        """Counts bytes that are only read; raises LimitExceeded when the time is over."""
        if size > _STEP:
            self._check_time()
        self.fuel -= size >> 4

    def refill(self) -> None:
        """Takes from the limits what was spent; raises LimitExceeded at their end."""
        self._memory -= _STEP - self.fuel
        self.fuel = _STEP
        if self._memory < 0:
            raise LimitExceeded(f"over {self.limits.memory} bytes of memory")
        self._check_time()

    def printed(self, size: int) -> None:
        """Counts output; raises LimitExceeded when there is too much."""
        if size > self.limits.output:
            raise LimitExceeded(f"over {self.limits.output} characters of output")

    def _check_time(self) -> None:
        if time.thread_time() > self._until:
            raise LimitExceeded(f"over {self.limits.seconds:g} seconds")


class _Active(threading.local):
    meter: Meter


active = _Active()


def spend(size: int) -> None:
    """Counts bytes made by this thread's template; raises LimitExceeded when it must end."""
    meter = active.meter
    meter.fuel -= size
    if meter.fuel < 0:
        meter.refill()


@contextlib.contextmanager
def metered(limits: Limits) -> Iterator[Meter]:
    """Runs templates of this thread under `limits`, within the context."""
    before = getattr(active, "meter", None)
    active.meter = meter = Meter(limits)
    try:
        yield meter
    finally:
        if before is None:
            del active.meter
        else:
            active.meter = before


def size_of(text: str) -> int:
    """Returns the approximate size of a text, in bytes."""
    return len(text) if text.isascii() else 4 * len(text)


def shallow(value: Any) -> int:
    """Returns the size of the value without its elements, in bytes."""
    if isinstance(value, str):
        return size_of(value)
    return 8 * len(value) if isinstance(value, (list, tuple, dict)) else 0


def weigh(value: Any, step: int = 0) -> int:
    """Returns the bytes of the value written out, with `step` more per level.

    Shared parts count as often as they occur.

    Raises LimitExceeded when that is more than one value may have: such a value can be small in
    memory, but to print, compare or hash it takes time and memory of this size.
    """
    if isinstance(value, str):
        return size_of(value)
    most = active.meter.limits.value
    total = 0
    rest: list[tuple[Any, int]] = [(value, 0)]
    while rest:
        item, depth = rest.pop()
        total += NODE + step * depth
        parts: Any = ()
        if isinstance(item, str):
            total += size_of(item)
        elif isinstance(item, Mapping):
            total += 2 * NODE * len(item)
            parts = (part for pair in item.items() for part in pair)
        elif isinstance(item, (list, tuple, set, frozenset, MappingView)):
            total += NODE * len(item)
            parts = item
        elif isinstance(item, jinja2.utils.Namespace):
            parts = (object.__getattribute__(item, "_Namespace__attrs"),)
        if total > most:
            raise LimitExceeded(f"over {most} bytes in one value")
        rest.extend((part, depth + 1) for part in parts)
    active.meter.work(total)
    return total


def _number(value: Any) -> int:
    """Returns a width or a count, 0 for no number. Refuses large ones."""
    if not isinstance(value, int):
        return 0
    if abs(value) > _MAX_NUMBER:
        raise LimitExceeded(f"a width or count over {_MAX_NUMBER}")
    return abs(value)


def numbers_in(spec: str) -> int:
    """Returns the sum of widths and precisions in a format."""
    return sum(_number(int(digits[:9])) for digits in re.findall(r"\d+", spec))


def _listed(value: Any) -> Any:
    """Returns the value, an iterator as a list."""
    if isinstance(value, Iterator):
        value = list(value)
        spend(NODE * len(value))
    return value


def describe(error: BaseException) -> str:
    """Returns the error's message, shortened."""
    if isinstance(error, RecursionError):
        return f"over {sys.getrecursionlimit()} levels of calls"
    try:
        return str(error)[:_MAX_FORMAT] or type(error).__name__
    except Exception:
        return type(error).__name__


# Prices of operators


def _percent_size(form: Any, values: Any) -> int:
    """Returns the price of `form % values`."""
    specs = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", str(form))
    if any("*" in spec for spec in specs):
        raise LimitExceeded("a width given by '*' in a format")
    # `%r` and `%a` write a character as ten.
    return size_of(form) + sum(map(numbers_in, specs)) + 3 * len(specs) * weigh(values)


def _times_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            return shallow(value) * max(count, 0) + NODE
    return 0


def _power_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left.bit_length() * max(right, 0))
    return 0


def _bits(count: int) -> int:
    if count > _MAX_BITS:
        raise LimitExceeded(f"an integer over {_MAX_BITS} bits")
    return count


OPERATORS: dict[str, Callable[[Any, Any], int]] = {
    "*": _times_size,
    "**": _power_size,
    "%": lambda left, right: _percent_size(left, right) if isinstance(left, str) else 0,
    "-": lambda left, right: NODE * len(left) if isinstance(left, Collection) else 0,
}


# Prices of methods


def _replace_size(text: str, old: Any, new: Any, *_: Any) -> int:
    return size_of(text) + text.count(str(old)) * weigh(str(new))


def _split_size(text: str, separator: Any = None, *_: Any) -> int:
    if isinstance(separator, str) and separator:
        return size_of(text) + NODE * text.count(separator)
    # How many words there are is worth counting only where it may be too many.
    return size_of(text) * (NODE // 2 if len(text) > _MIB // 4 else 1)


def _search_size(text: str, wanted: Any = "", *_: Any) -> int:
    # Searching from the right takes the product of both lengths at worst.
    if isinstance(wanted, str):
        _afford_steps(len(text) * len(wanted))
    return size_of(text)


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill"),
        lambda text, width, *_: size_of(text) + 4 * _number(width),
    ),
    "expandtabs": lambda text, width=8: size_of(text) + text.count("\t") * _number(width),
    "join": lambda text, parts: weigh(parts) + len(parts) * size_of(text),
    "replace": _replace_size,
    "striptags": lambda text: _tags_size(str(text)),
    **dict.fromkeys(("split", "splitlines"), _split_size),
    **dict.fromkeys(
        ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"), _search_size
    ),
}
# They make bytes and tables, which no prompt is made of.
_REFUSED = {"encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromhex", "fromkeys"}
UNBOUND = (
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)


def method_arguments(
    owner: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Prices a method call and returns its arguments."""
    if name in _REFUSED:
        raise jinja2.exceptions.SecurityError(f"method {name!r} is not for templates")
    if not isinstance(owner, str):
        for value in (*args, *named.values(), *([owner] if isinstance(owner, list) else ())):
            weigh(value)
        return args
    if name == "join":
        args = tuple(_listed(value) for value in args)
    price = _METHODS.get(name)
    # A capital letter can become three characters.
    cost = price(owner, *args, *named.values()) if price else 3 * len(owner)
    afford(cost)
    return args


def afford(cost: int) -> None:
    """Charges for one value; raises LimitExceeded when it is too large or the render must end."""
    meter = active.meter
    if cost > meter.limits.value:
        raise LimitExceeded(f"over {meter.limits.value} bytes in one value")
    spend(cost)


def _afford_steps(count: int) -> None:
    if count > _MAX_STEPS:
        raise LimitExceeded(f"over {_MAX_STEPS} steps in one operation")
    active.meter.work(count >> 8)


# Prices of filters


def priced(
    function: Callable[..., Any], price: Callable[..., int], listed: bool = False
) -> Callable[..., Any]:
    """Returns a filter that is charged before it runs; `listed`: its value is made a list first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **named: Any) -> Any:
        if listed and len(args) > first:
            args = (*args[:first], _listed(args[first]), *args[first + 1 :])
        afford(price(*args[first:], **named))
        return function(*args, **named)

    return charged


def text_size(value: Any, *rest: Any, **named: Any) -> int:
    """Prices filters that write their value as text, at worst with entities."""
    others = [*rest, *named.values()]
    return 6 * (weigh(value) + sum(map(_number, others)) + sum(map(weigh, others)))


def _trim_size(value: Any, chars: Any = None) -> int:
    return _search_size(value, chars) if isinstance(value, str) else weigh(value)


def compared_size(value: Any, *rest: Any, **named: Any) -> int:
    """Prices filters and tests that compare or hash what is in their arguments."""
    for other in (*rest, *named.values()):
        weigh(other)
    return weigh(value)


def _join_filter_size(value: Any, d: Any = "", attribute: Any = None) -> int:
    count = len(value) if hasattr(value, "__len__") else 0
    return 6 * (weigh(value) + count * weigh(d))


def _replace_filter_size(s: Any, old: Any, new: Any, count: Any = None) -> int:
    text = s if isinstance(s, str) else str(s) if weigh(s) else ""
    return 6 * _replace_size(text, old, new)


def _format_size(value: Any, *args: Any, **named: Any) -> int:
    return _percent_size(value, (args, named)) if isinstance(value, str) else weigh(value)


def _indent_size(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    step = _number(width) if isinstance(width, int) else weigh(width)
    lines = len(s.splitlines()) if isinstance(s, str) else 1
    return weigh(s) + (lines + 1) * step


def _tojson_size(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> int:
    step = _number(indent) if isinstance(indent, int) else len(indent) if indent else 0
    return weigh(value, step + sum(map(len, separators or ()))) * (3 if ensure_ascii else 1)


def _wordwrap_size(
    s: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> int:
    size, step = weigh(s), max(_number(width), 1)
    # A long word is cut at its front, again and again.
    _afford_steps(64 * size + size * size // step)
    return size + (size // step + str(s).count("\n") + 1) * (weigh(wrapstring) if wrapstring else 1)


def _slow_size(value: Any, *rest: Any, **named: Any) -> int:
    """Prices filters that take long for each byte."""
    return 64 * text_size(value, *rest, **named)


def _counted_size(value: Any, *rest: Any, **named: Any) -> int:
    """Prices filters whose other arguments are counts."""
    counts = sum(_number(other) for other in (*rest, *named.values()))
    return shallow(value) + 8 * counts


def _sum_size(iterable: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, (int, float)):
        raise LimitExceeded("a sum of other things than numbers")
    return 0


def _tags_size(value: Any) -> int:
    # The rest of the text is copied for each comment in it.
    text = value if isinstance(value, str) else ""
    _afford_steps(text.count("<!") * len(text))
    return text_size(value)


def _int_size(value: Any, default: Any = 0, base: Any = 10) -> int:
    # Python itself limits decimal digits only.
    if base != 10 and isinstance(value, str):
        _bits(4 * len(value))
    return weigh(value)


# Filters in neither of these write their value as text.
FREE_FILTERS = {
    "abs",
    "attr",
    "count",
    "d",
    "default",
    "first",
    "items",
    "last",
    "length",
    "random",
}
LAZY_FILTERS = {"map", "reject", "rejectattr", "select", "selectattr"}
LISTED_FILTERS = {"batch", "join", "list", "slice", "sum"}
FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("batch", "round", "slice"), _counted_size),
    **dict.fromkeys(("string", "lower", "upper", "safe"), lambda value: 3 * weigh(value)),
    "center": lambda value, width=80: weigh(value) + _number(width),
    "float": lambda value, default=0.0: weigh(value),
    "format": _format_size,
    "int": _int_size,
    "indent": _indent_size,
    "join": _join_filter_size,
    "list": lambda value: NODE * len(value) if hasattr(value, "__len__") else 0,
    "pprint": _slow_size,
    "replace": _replace_filter_size,
    "reverse": lambda value: shallow(value),
    "striptags": _tags_size,
    "sum": _sum_size,
    "tojson": _tojson_size,
    "trim": _trim_size,
    "urlize": _slow_size,
    "wordwrap": _wordwrap_size,
}
COMPARING_FILTERS = {"dictsort", "groupby", "max", "min", "sort", "unique"}
COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"),
    *(">", "gt", "greaterthan", ">=", "ge", "in"),
)
