"""Marks of tabs, and what the server remembers of tabs."""

import pytest

from lmchat.errors import NotFound
from lmchat.webui.marks import ROUNDS, Mark, Tabs

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize("mark", [Mark(), Mark(ID, 3), Mark(ID, 3, 7), Mark(ID, 1, None, 40)])
def test_a_mark_survives_its_text(mark):
    assert Mark.parse(str(mark)) == mark


@pytest.mark.parametrize(
    "text",
    ["", "x", ID, f"{ID}:1", f"{ID}:1:2:3:4", f"{ID.upper()}:1::20", f"{ID}:-1::20", "a:1::20",
     f"{ID}:1::20\n", f"../{ID}:1::20", f"{ID}:{'9' * 40}::20"],
)  # fmt: skip
def test_other_texts_are_a_new_chat(text):
    assert Mark.parse(text) == Mark()
    assert Mark().rounds == ROUNDS


def test_a_value_is_sent_to_a_tab_once():
    tab = Tabs().of("ann", "a")
    assert tab.changed("view", "1")
    assert not tab.changed("view", "1")
    assert tab.changed("view", "2")


def test_a_tab_is_its_owner_s_and_the_last_used_are_remembered():
    tabs = Tabs(most=2)
    first = tabs.of("ann", "a")
    assert tabs.of("ann", "a") is first
    assert tabs.is_foreign("bob", "a")
    assert not tabs.is_foreign("ann", "a")
    assert not tabs.is_foreign("bob", "b")
    with pytest.raises(NotFound, match="the tab is unknown"):
        tabs.of("bob", "a")
    tabs.of("ann", "b")
    assert tabs.of("ann", "a") is first
    tabs.of("ann", "c")
    tabs.of("ann", "d")
    assert tabs.of("ann", "a") is not first
