"""A jinja2 sandbox with bounded time and memory.

Every block of a template, every call and every operation that `template_limits` prices reports to
the thread's meter: blocks through a line in the generated code, `~`, comparisons, literals and
slices through filters put into the parsed template, the rest where jinja2 lets an environment look.
All of it happens in the rendering thread: no signal, no process, and the thread can go on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2.compiler
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
import markupsafe

from lmchat.text.template_limits import (
    CALL,
    COMPARING_FILTERS,
    COMPARING_TESTS,
    FILTERS,
    FREE_FILTERS,
    LAZY_FILTERS,
    LISTED_FILTERS,
    NODE,
    OPERATORS,
    UNBOUND,
    active,
    afford,
    compared_size,
    method_arguments,
    numbers_in,
    priced,
    shallow,
    size_of,
    spend,
    text_size,
    weigh,
)

# What the compiled template calls; the names hold a space, so no template can spell them.


def _written(value: Any) -> Any:
    """Charges for an operand of `~`, or for output."""
    if type(value) is str:
        spend(len(value) if len(value) < 1024 else size_of(value))
    else:
        spend(weigh(value))
    return value


def _plus(*parts: Any) -> Any:
    """`a + b + ...`, which is most of what templates do."""
    size = 0
    for part in parts:
        if type(part) is not str:
            return _plus_any(parts)
        size += len(part)
    if size > 1024:
        afford(sum(map(size_of, parts)))
    else:
        spend(size)
    return "".join(parts)


def _plus_any(parts: Iterable[Any]) -> Any:
    rest = iter(parts)
    total = next(rest)
    for part in rest:
        afford(shallow(total) + shallow(part))
        total = total + part
    return total


def _written_plus(*parts: Any) -> Any:
    """`a + b + ...`, printed."""
    total = _plus(*parts)
    return total if type(total) is str else _written(total)


def _compared(value: Any) -> Any:
    """Charges for an operand of a comparison, or a key."""
    if isinstance(value, str):
        return _searched(value)
    if not isinstance(value, (int, float)) and value is not None:
        weigh(value)
    return value


def _searched(value: Any) -> Any:
    """Charges for the container that `in` searches for a constant."""
    if isinstance(value, (str, list, tuple)) and len(value) > 1024:
        active.meter.work(64 * len(value))
    return value


def _made(value: Any) -> Any:
    """Charges for a literal or a slice."""
    spend(NODE + shallow(value))
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """The elements of a loop that has a condition, or of a filter that is lazy."""
    for value in values:
        spend(NODE)
        yield value


_HOOKS = {
    "a written": _written,
    "a plus": _plus,
    "a written plus": _written_plus,
    "a compared": _compared,
    "a searched": _searched,
    "a made": _made,
    "all counted": _counted,
}


def _lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2's that takes the context and makes one element after another."""

    @functools.wraps(function)
    def counting(context: Any, value: Any = (), *args: Any, **named: Any) -> Any:
        return function(context, _counted(value) if value else value, *args, **named)

    return counting


class _Hooking(jinja2.visitor.NodeTransformer):
    """Puts the hooks into a parsed template."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_hook("a written", part) for part in node.nodes]
        return node

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for i, part in enumerate(node.nodes):
            if isinstance(part, jinja2.nodes.Filter) and part.name == "a plus":
                part.name = "a written plus"
            elif not isinstance(part, jinja2.nodes.TemplateData):
                node.nodes[i] = _hook("a written", part)
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.left, jinja2.nodes.Filter) and node.left.name == "a plus":
            node.left.args.append(node.right)
            return node.left
        return _hook("a plus", node.left, node.right)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # A comparison with a constant or a truth value ends at once.
        others = [operand.expr for operand in node.ops]
        if not (_plain(node.expr) or all(map(_plain, others))):
            node.expr = _hook("a compared", node.expr)
            for operand in node.ops:
                operand.expr = _hook("a compared", operand.expr)
        else:
            for operand in node.ops:
                if operand.op in ("in", "notin") and not _plain(operand.expr):
                    operand.expr = _hook("a searched", operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _hook("a made", node)
        node.arg = _hook("a compared", node.arg)
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if _plain(node) else _hook("a made", node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if _plain(node) or node.ctx != "load" else _hook("a made", node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _hook("a compared", pair.key)
        return _hook("a made", node)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:
            node.iter = _hook("all counted", node.iter)
        return node


def _hook(name: str, node: Any, *others: Any) -> jinja2.nodes.Expr:
    if isinstance(node, jinja2.nodes.Const) and not others:
        return node
    return jinja2.nodes.Filter(node, name, [*others], [], None, None, lineno=node.lineno)


def _plain(node: jinja2.nodes.Node) -> bool:
    """Returns whether the node is a constant, a truth value or a short row of constants."""
    if isinstance(node, (jinja2.nodes.List, jinja2.nodes.Tuple)):
        return len(node.items) <= 64 and all(
            isinstance(item, jinja2.nodes.Const) for item in node.items
        )
    flat = (jinja2.nodes.Const, jinja2.nodes.Compare, jinja2.nodes.Not, jinja2.nodes.Test)
    return isinstance(node, flat)


class _Generator(jinja2.compiler.CodeGenerator):
    """A code generator whose blocks charge for themselves and their text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._branches: set[int] = set()

    def visit_If(  # noqa: N802
        self, node: jinja2.nodes.If, frame: jinja2.compiler.Frame
    ) -> None:
        self._branches.update(map(id, _branches(node)))
        super().visit_If(node, frame)

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        if id(nodes) not in self._branches:
            self.writeline(f"environment.tick({CALL + _text_of(nodes)})")
        super().blockvisit(nodes, frame)


def _branches(node: jinja2.nodes.If) -> list[list[jinja2.nodes.Node]]:
    return [node.body, node.else_, *(other.body for other in node.elif_)]


def _text_of(nodes: Iterable[jinja2.nodes.Node]) -> int:
    size = 0
    for node in nodes:
        if isinstance(node, jinja2.nodes.If):
            size += sum(map(_text_of, _branches(node)))
        elif isinstance(node, jinja2.nodes.Output):
            data = [p.data for p in node.nodes if isinstance(p, jinja2.nodes.TemplateData)]
            size += sum(map(size_of, data))
    return size


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format` with priced fields."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        afford(weigh(value) + 4 * numbers_in(format_spec) + NODE)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        afford(10 * weigh(value))
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, jinja2.sandbox.SandboxedEscapeFormatter):
    pass


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox; compile and render its templates inside `metered` only."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        for name in [*self.filters]:
            self.limit_filter(name, self.filters[name])
        self.filters.update(_HOOKS)
        for name in COMPARING_TESTS:
            test: Any = self.tests[name]
            self.tests[name] = priced(test, compared_size)

    def limit_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter, priced by its name."""
        if name in LAZY_FILTERS:
            function = _lazy(function)
        elif name in COMPARING_FILTERS:
            function = priced(function, compared_size, listed=True)
        elif name not in FREE_FILTERS:
            price = FILTERS.get(name, text_size)
            function = priced(function, price, listed=name in LISTED_FILTERS)
        self.filters[name] = function

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Hooking().visit(tree)
        tree.set_environment(self)
        return tree

    tick = staticmethod(spend)  # a block begins, and its own text is printed

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Charges for an operator and applies it."""
        if type(left) is not int or operator not in "%-":
            afford(OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(
        __self,  # noqa: N805
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Charges for a call and makes it."""
        spend(CALL + 8 * len(args))
        kind = type(__obj)
        if kind is types.BuiltinMethodType or kind is types.MethodType:
            args = method_arguments(__obj.__self__, __obj.__name__, args, kwargs)
            result = super().call(__context, __obj, *args, **kwargs)
            spend(shallow(result))
            return result
        if not callable(__obj) or isinstance(__obj, UNBOUND):
            raise jinja2.exceptions.SecurityError(f"{kind.__name__} cannot be called")
        if kind is not jinja2.runtime.Macro:
            for value in (*args, *kwargs.values()):
                weigh(value)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, priced."""
        if super().wrap_str_format(value) is None:
            return None
        text, mapped = value.__self__, value.__name__ == "format_map"
        markup = isinstance(text, markupsafe.Markup)
        formatter = _EscapeFormatter(self, escape=text.escape) if markup else _Formatter(self)

        def limited(*args: Any, **kwargs: Any) -> str:
            args, kwargs = ((), args[0]) if mapped else (args, kwargs)
            return str(type(text)(formatter.vformat(text, args, kwargs)))

        return limited
