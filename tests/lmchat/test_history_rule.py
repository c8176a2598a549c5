"""The rule "append" was called "keep": files keep the old word, so that both versions read them."""

import pytest

from lmchat.archive.document import to_document
from lmchat.errors import InvalidRequest
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite import rows
from lmchat.text.prompt import check_history


def test_rows_and_archives_spell_the_append_rule_keep():
    record = SessionRecord("trip", "local", "append")
    assert b'"history":"keep"' in rows.session_values(record)["body"]
    assert to_document(record)["session"]["history"] == "keep"


def test_the_former_name_of_the_append_rule_is_refused_with_its_new_name():
    with pytest.raises(InvalidRequest, match="'keep', expected 'append' or 'template'; .*'append'"):
        check_history("keep")
    with pytest.raises(InvalidRequest, match="history is 'x', expected 'append' or 'template'$"):
        check_history("x")
