"""The page size, which C++ defines."""

from lmchat.page_size import PAGE_TOKENS
from turbomind import _C
from turbomind.config import facts
from turbomind.engine import pages


def test_the_page_size_is_that_of_the_extension_everywhere() -> None:
    assert {PAGE_TOKENS, pages.PAGE_TOKENS, facts.PAGE_TOKENS} == {_C.PAGE_TOKENS}
