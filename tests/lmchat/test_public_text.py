"""Texts for remote clients are short, and name no file, host and process."""

from pathlib import Path

import pytest
from old_stores import write_version_1

import lmchat
from lmchat.errors import (
    EngineClosed,
    Error,
    InternalError,
    InvalidRequest,
    ModelError,
    SessionBusy,
    StoreError,
)
from lmchat.generation.settings import validate
from lmchat.public_text import (
    public_message,
    public_model,
    public_notice,
    public_summary,
    public_text,
)
from lmchat.sessions.model_identity import Identity
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite.sqlite_store import SqliteStore

SECRET = "/srv/secret models/llama-3"


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory", threads=1, cache_memory="16MiB") as engine:
        yield engine


@pytest.mark.parametrize(
    "error",
    [
        StoreError(f"the store {SECRET}/sessions.db: the disk is full"),
        ModelError(f"{SECRET}: damaged"),
        InternalError(f"cannot open {SECRET}"),
        EngineClosed("the chat engine has been closed"),
        OSError(2, "No such file", SECRET),
        MemoryError(),
        SessionBusy("session 'a' is generating in process 4711 on 'host7': try again"),
        InvalidRequest("/srv/secret/a.zip: its version is 3"),
        InvalidRequest("open ~/secret/x, then C:\\secret\\y."),
        InvalidRequest(f"{Path.home()}/secret is not a file"),
        Error("x" * 1_000_000),
    ],
)  # fmt: skip
def test_no_path_process_or_host_is_in_a_message(error):
    text = public_message(error)
    assert 0 < len(text) <= 500
    for private in ("secret", "4711", "host7", "sessions.db", str(Path.home()) + "/"):
        assert private not in text, text


def test_the_callers_own_errors_keep_their_text():
    for text in (
        "temperature is -1, expected a number of at least 0",
        "session 'a/b' is closed",
        "stop_strings[0] is '', expected a string that is not empty",
        "50 % of 1/2 and/or more",
    ):
        assert public_message(InvalidRequest(text)) == text
    busy = SessionBusy("session 'a' is generating in process 7: try again")
    assert public_message(busy) == "session 'a' is generating in another process: try again"


def test_archives_name_no_file(engine, tmp_path):
    (tmp_path / "with space").mkdir()
    session = engine.session("archived")
    path = tmp_path / "with space" / "a.zip"
    session.export(path)
    errors = []
    for act in (
        lambda: session.export(path),
        lambda: session.export(tmp_path / "missing dir" / "b.zip"),
        lambda: engine.import_(tmp_path / "with space"),
        lambda: engine.import_(tmp_path / "with space" / "none.zip"),
        lambda: engine.import_(__file__),
    ):
        with pytest.raises(InvalidRequest) as refused:
            act()
        assert str(tmp_path) in str(refused.value) or __file__ in str(refused.value)
        errors.append(public_message(refused.value))
    for text in errors:
        assert "/" not in text, text
        assert "space" not in text, text
        assert "dir" not in text.replace("directory", ""), text


def test_a_damaged_session_is_named(data_dir_with_damage):
    store = SqliteStore(data_dir_with_damage)
    with pytest.raises(StoreError) as refused:
        store.find("me", "old")
    assert public_message(refused.value) == "session 'old' is damaged; it can be deleted"
    store.close()


@pytest.fixture
def data_dir_with_damage(tmp_path):
    write_version_1(tmp_path / "data")
    store = SqliteStore(tmp_path / "data")
    with store._database.writing() as connection:
        connection.execute("UPDATE turns SET checksum = 0")
    store.close()
    return tmp_path / "data"


def test_models_notices_and_lists():
    here = Identity(SECRET, "f", "t", "c")
    for was, expected in (
        ("Qwen/Qwen2.5-0.5B", "the model is llama-3, and was Qwen/Qwen2.5-0.5B"),
        ("/other/place of/model", "the model is llama-3, and was model"),
        (SECRET, "the weights of llama-3, or how they are computed, have changed"),
    ):
        record = SessionRecord("a", "me", "append", fingerprint="g", model=was)
        (notice,) = here.notices(record)
        assert SECRET in notice  # the terminal shows it all
        assert public_notice(notice) == f"its KV is computed again: {expected}"
    assert public_model("memo") == "memo"
    assert public_model("C:\\models\\x") == "x"
    assert len(public_model("m" * 5000)) <= 200
    assert public_text("stopped, see /var/log/x.log: full") == "stopped, see (path): full"


def test_a_list_names_no_path_and_no_process(engine):
    engine.session("listed").set_title("t" * 9_999)
    info = next(info for info in engine.sessions() if info.name == "listed")
    info = type(info)(**{**vars(info), "model": SECRET, "busy": "process 7 on 'host7'"})
    found = public_summary(info)
    assert (found.model, found.busy, found.fingerprint) == ("llama-3", "another process", "")
    assert len(found.title) == 500
    assert found.state is info.state
    with pytest.raises(InvalidRequest, match="title is 10001 characters"):
        engine.session("listed").set_title("t" * 10_001)


LARGE = "x" * 3_000_000


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": LARGE},
        {"temperature": [LARGE] * 100},
        {"seed": 10**5000},
        {"seed": -(10**5000)},
        {"max_new_tokens": 10**5000},
        {"temperature": 10**5000},
        {"logit_bias": {10**5000: 1}},
        {"logit_bias": {LARGE: 1}},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": dict.fromkeys(range(300_000), 1.0)},
        {"bad_words": [[1]] * 100_000},
        {"bad_words": [[1] * 10_000]},
        {"stop_strings": ["x"] * 100_000},
        {"stop_strings": [LARGE]},
        {"stop_strings": [[LARGE]]},
        {"stop_token_ids": list(range(100_000))},
        {"eos_token_ids": [10**5000]},
        {"ignore_eos": LARGE},
        {LARGE: 1},
    ],
)  # fmt: skip
def test_large_values_are_refused_in_few_words(engine, given):
    (name,) = given
    calls = [lambda: validate(given)]
    if name in ("seed", "logit_bias", "bad_words", "stop_token_ids", "eos_token_ids"):
        calls.append(lambda: engine.core.stream([1], **given))
    for call in calls:
        with pytest.raises(InvalidRequest, match=name[:20]) as refused:
            call()
        assert len(str(refused.value)) < 900


def test_other_large_arguments_are_refused_in_few_words(engine):
    for call in (
        lambda: engine.session(LARGE),
        lambda: engine.session("a", overflow=LARGE),
        lambda: engine.session("a", history=LARGE),
        lambda: engine.session("a", settings=[LARGE]),
        lambda: engine.session("a", metadata={LARGE: ""}),
        lambda: engine.session("a").set_tags([LARGE]),
        lambda: engine.session("a").set_tags([[LARGE]]),
        lambda: engine.session("a").set_tags(map(str, range(100_000))),
        lambda: engine.session("a").branches(10**5000),
        lambda: engine.delete(LARGE),
        lambda: engine.session_by_id(LARGE),
        lambda: engine.sessions(after=LARGE),
        lambda: engine.sessions(limit=-(10**5000)),
        lambda: engine.generate([10**5000]),
        lambda: engine.generate(10**5000),
    ):
        with pytest.raises(Error) as refused:
            call()
        assert len(str(refused.value)) < 900


def test_a_list_within_the_bounds_is_taken():
    assert len(validate({"stop_strings": ["x"] * 256})["stop_strings"]) == 256
    assert len(validate({"logit_bias": dict.fromkeys(range(16_384), 1.0)})["logit_bias"]) == 16_384
