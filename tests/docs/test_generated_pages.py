"""Pages that `make docs` generates are current."""

from assets import ROOT

import lmchat
import turbomind
from lmchat.cli.support_table import rewrite
from tools import python_api


def test_the_python_api_page_is_that_of_the_docstrings():
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert page == python_api.document(lmchat, turbomind), "run make docs"


def test_the_support_table_is_that_of_the_code():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert rewrite(page) == page, "run make docs"
