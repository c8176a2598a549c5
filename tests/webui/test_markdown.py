"""Markdown of messages: text stays text, code stays code, formulas and prices are told apart."""

import pytest

from lmchat.webui.markdown import markdown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b and vec<T>", "a &lt; b and vec&lt;T>"),
        ("<script>alert(1)</script>", "&lt;script>alert(1)&lt;/script>"),
        ("use `vec<T>` or <T>", "use `vec<T>` or &lt;T>"),
        ("``a ` <b>`` <b>", "``a ` <b>`` &lt;b>"),
        ("an open ` <b>\n\n` <b>", "an open ` &lt;b>\n\n` &lt;b>"),
        ("```html\n<b>\n```\n<b>", "```html\n<b>\n```\n&lt;b>"),
        ("~~~\n<b> $x$\n", "~~~\n<b> $x$\n"),
        ("- item\n\n  ```\n  <b>\n  ```\n- <b>", "- item\n\n  ```\n  <b>\n  ```\n- &lt;b>"),
        ("a\n\n    <b>\n\nb <b>", "a\n\n    <b>\n\nb &lt;b>"),
        ("```\n<b> never closed", "```\n<b> never closed"),
    ],
)
def test_html_is_text_and_code_is_code(text, shown):
    assert markdown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![a cat](http://x/c.png)", "[a cat](http://x/c.png)"),
        ("![](http://x/c.png)", "[picture](http://x/c.png)"),
        ("![a][ref]\n\n[ref]: http://x/c.png", "[a][ref]\n\n[ref]: http://x/c.png"),
        ("`![a](b)`", "`![a](b)`"),
        ("[![badge](http://x/b.svg)](http://x)", "[[badge](http://x/b.svg)](http://x)"),
    ],
)
def test_pictures_are_links(text, shown):
    assert markdown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("$x^2$ is", r"\(x^2\) is"),
        ("$5 and $6", "$5 and $6"),
        ("$5 and x$", r"\(5 and x\)"),
        ("it costs $5.", "it costs $5."),
        ("$ x$ and $x $", "$ x$ and $x $"),
        ("$x$5", "$x$5"),
        ("US$5 and US$6", "US$5 and US$6"),
        ("$$x < y$$", "$$x &lt; y$$"),
        (r"\$x$", r"\$x$"),
        ("$a_1 < b$", r"\(a_1 &lt; b\)"),
        ("`$x$` and $y$", r"`$x$` and \(y\)"),
    ],
)
def test_formulas_follow_pandoc_s_rule(text, shown):
    assert markdown(text) == shown


def test_an_empty_text_and_endings_of_lines():
    assert markdown("") == ""
    assert markdown("a\n\nb\n") == "a\n\nb\n"
