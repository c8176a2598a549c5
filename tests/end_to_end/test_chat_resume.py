"""Sessions that outlive their chat: --session, --continue, kills, two terminals on one store."""

import os
import re
import signal
from datetime import timedelta

import pytest
from chat_terminal import ChatUser
from persistent_chat import (  # noqa: F401 - fixtures
    OPTIONS,
    made_data_dir,
    made_model,
    made_script,
    made_start,
    reply_of,
)
from stores import stored_session

import lmchat
from lmchat import bundled
from lmchat.cli.chat import session_choice
from lmchat.cli.terminal.texts import clean
from lmchat.errors import InvalidRequest, StoreError
from lmchat.store.records import SessionRecord, TurnStart, now
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn, TurnTree

INTERRUPTED = "(interrupted: the process ended)"


# --- which session, which model ------------------------------------------------------------------


@pytest.fixture
def store(data_dir, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir))
    store = SqliteStore(data_dir)
    yield store
    store.close()


def add_session(store, name, *texts, model="", age=0, **more):
    """Puts a session into the store that was used `age` minutes ago."""
    roles = ("user", "assistant") * len(texts)
    turns = [
        Turn(i, i - 1 or None, role, text, {"role": role, "content": text})
        for i, (role, text) in enumerate(zip(roles, texts, strict=False), 1)
    ]
    record = SessionRecord(
        name=name,
        owner=more.pop("owner", "local"),
        history="append",
        model=model,
        last_used=now() - timedelta(minutes=age),
        tree=TurnTree.of(turns),
        leaf=len(turns) or None,
        **more,
    )
    return store.add(record)


def found(*given, **more):
    """Returns the choice of a stored session, with the default rules of one."""
    model, name, *rest = given
    return session_choice.Choice(
        model, name, True, *rest, history="append", overflow="refuse", **more
    )


def test_continue_means_the_last_session_with_that_model(store):
    add_session(store, "new", model="a/one")
    add_session(store, "theirs", "q", "r", model="a/one", owner="web")
    add_session(store, "other", "q", "r", model="b/two", age=1)
    add_session(store, "mine", "q", "r", model="a/one", age=2)
    add_session(store, "old", "q", "r", model="a/one", age=3)
    assert session_choice.choose("a/one", None, True, False) == found("a/one", "mine")
    assert session_choice.choose(None, None, True, False) == found("b/two", "other", True)
    chosen = session_choice.choose("c/three", None, True, False)
    assert (chosen.model, chosen.name, chosen.found) == ("c/three", "other", True)
    assert chosen.note.startswith("no session used c/three; other, the most recent one, ")


def test_continue_without_a_session_creates_one(store):
    add_session(store, "empty")
    chosen = session_choice.choose(None, None, True, False)
    assert (chosen.model, chosen.name, chosen.found) == (None, None, False)
    assert "a new one starts" in chosen.note


def test_a_session_whose_first_reply_was_cut_off_is_not_empty(store):
    add_session(store, "before", "q", "r", age=5)
    record = add_session(store, "first")
    user = Turn(1, None, "user", "q", {"role": "user", "content": "q"}, token_ids=(1,), length=1)
    store.begin(record, TurnStart(None, 0, 2, {}, user=user))
    store.close()  # as a death does: the journal stays
    assert session_choice.choose(None, None, True, False).name == "first"


def test_a_named_session_has_its_model_unless_one_is_named(store):
    add_session(store, "trip", "q", "r", model="a/one")
    add_session(store, "fresh")
    changed = "the last model of trip was a/one; now it uses b/two"
    for model, name, expected in [
        (None, "trip", found("a/one", "trip", True)),
        ("a/one", "trip", found("a/one", "trip")),
        ("b/two", "trip", found("b/two", "trip", note=changed)),
        (None, "fresh", found(None, "fresh")),
        (None, "nobody", session_choice.Choice(None, "nobody")),
    ]:
        assert session_choice.choose(model, name, False, False) == expected


def test_a_model_that_only_an_archive_names_is_not_opened_unasked(store):
    add_session(store, "trip", "q", "r", model="a/one", imported=True)
    for name, latest in (("trip", False), (None, True)):
        chosen = session_choice.choose(None, name, latest, False)
        assert chosen == found("a/one", "trip", True, True)
        message = (
            "session 'trip' was imported, and its archive names the model 'a/one', which the "
            "command line does not name; lmchat chat a/one --session trip opens it"
        )
        with pytest.raises(InvalidRequest, match=f"^{message}$"):
            session_choice.check_imported(chosen, None)
        question = message.split(", which")[0] + ". Open it?"
        session_choice.check_imported(chosen, question.__eq__)
        with pytest.raises(InvalidRequest, match="lmchat chat MODEL --session trip uses another"):
            session_choice.check_imported(chosen, lambda text: False)
    assert not session_choice.choose("a/one", None, True, False).imported
    session_choice.check_imported(session_choice.choose("a/one", "trip", False, False), None)


def test_the_model_that_ships_is_never_a_strangers(store, tmp_path, monkeypatch):
    add_session(store, "trip", "q", "r", model="memo", imported=True)
    (tmp_path / "memo").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name is another model
    chosen = session_choice.choose(None, "trip", False, False)
    assert (chosen.model, chosen.imported) == (None, False)
    session_choice.check_imported(chosen, None)


def test_an_archive_cannot_inject_into_the_suggested_command(store):
    for model, shown in [("$(rm x)", "lmchat chat '$(rm x)' --session 'a b'"),
                        ("a\x1b[2J\nb", "lmchat chat MODEL --session 'a b'")]:  # fmt: skip
        record = add_session(store, "a b", "q", "r", model=model, imported=True)
        with pytest.raises(InvalidRequest) as refused:
            session_choice.check_imported(session_choice.choose(None, "a b", False, False), None)
        assert f"; {shown} opens it" in str(refused.value)
        assert str(refused.value).isprintable()
        store.remove(record)


def test_a_model_folder_is_recognised_by_its_place(tmp_path, monkeypatch, model):
    monkeypatch.chdir(os.path.dirname(model))
    assert session_choice.same_model(model, "./endless")
    assert session_choice.same_model("memo", str(bundled.FOLDER))
    assert session_choice.same_model("", "memo")
    assert not session_choice.same_model("memo", model)
    assert not session_choice.same_model("a/one", "a/two")


def test_options_that_exclude_each_other_are_refused(data_dir, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir))
    with pytest.raises(InvalidRequest, match="--session and --continue are given, expected one"):
        session_choice.choose(None, "trip", True, False)
    with pytest.raises(InvalidRequest, match="--continue and --no-store are given"):
        session_choice.choose(None, None, True, True)
    assert session_choice.choose(None, "trip", False, True) == session_choice.Choice(None, "trip")
    assert not data_dir.exists()
    data_dir.write_text("no folder")
    with pytest.raises(StoreError, match="; --no-store chats without storing anything$"):
        session_choice.choose(None, None, True, False)


# --- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, "window"])
def test_a_killed_chat_goes_on_mid_thought(start, model, data_dir, how):
    with start("--plain", "--max-new-tokens", "15000") as terminal:
        ChatUser(terminal).begin("hello")
        raw = terminal.raw
        if how == "window":
            terminal.hang_up()
        else:
            os.kill(terminal.pid, how)
        assert terminal.wait_end() != 0
        raw = terminal.raw if how == signal.SIGKILL else raw
    with start("--continue") as terminal:
        user = ChatUser(terminal)
        terminal.wait_prompt()
        assert "── chat-1 · 1 round · hello ──\n1> hello\n" in terminal.everything
        first, killed = reply_of(data_dir), how == signal.SIGKILL
        assert (INTERRUPTED if killed else "(stopped)") in terminal.everything.split("\n")
        assert "\n/continue goes on\n" in terminal.everything
        assert first.finish_reason == ("interrupted" if killed else "cancelled")
        assert 0 < len(first.token_ids) < 15000
        shown = raw.decode(errors="ignore").replace("\r\n", "\n").rpartition("\x1b[?2004l")[2]
        assert len(shown) > 20
        shown = shown.removeprefix("\x1b[?2004h")  # what is pasted during a reply is one draft
        assert clean(first.text).startswith(shown.rstrip("\ufffd\n"))
        user.begin("/continue")
        terminal.key("ctrl-c")
        terminal.wait("stopped; /continue goes on")
        user.leave()
    second = reply_of(data_dir)
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert len(second.token_ids) > len(first.token_ids)
    with lmchat.ChatEngine(model, store="memory", cache_memory="32MiB", threads=1) as reference:
        whole = reference.session().send("hello", max_new_tokens=len(second.token_ids))
        assert tuple(whole.token_ids) == second.token_ids


def test_a_chat_killed_in_its_first_reply_goes_on_with_its_model(start):
    with start("--max-new-tokens", "15000") as terminal:
        ChatUser(terminal).begin("hello")
        os.kill(terminal.pid, signal.SIGKILL)
        terminal.wait_end()
    with start("--continue", about=()) as terminal:
        terminal.wait_prompt()
        assert "endless answers" in terminal.everything
        assert INTERRUPTED in terminal.everything


def test_a_question_that_a_kill_left_without_an_answer_is_on_the_line(
    start, store, model, data_dir
):
    add_session(store, "before", "q", "r", age=5)
    record = add_session(store, "first", model=model)
    message = {"role": "user", "content": "/why?"}
    user = Turn(1, None, "user", "/why?", message, token_ids=(1,), length=1)
    store.begin(record, TurnStart(None, 0, 2, {}, user=user))
    store.close()  # as a death does: the journal stays
    with start("--continue", "--max-new-tokens", "4", about=()) as terminal:
        terminal.wait("your last question was not answered; Enter asks it again")
        user = ChatUser(terminal, '> """/why?"""')
        user.type("", "TTFT", prompt="> ")
        user.leave()
    record = stored_session(data_dir, "first")
    assert [turn.text for turn in record.tree.path(record.leaf)][:-1] == ["/why?"]


def test_computed_pages_are_loaded_from_disk_after_a_kill(start):
    with start("--session", "trip", "--max-new-tokens", "6") as terminal:
        user = ChatUser(terminal)
        user.type("hello " * 40, "TTFT")
        user.leave()
    with start("--continue", "--max-new-tokens", "6") as terminal:
        user = ChatUser(terminal)
        saved = re.compile(r"\n\d+ tokens, KV on disk\n")
        terminal.wait(lambda: saved.search(terminal.everything))
        shown = user.type("more", "TTFT")  # typing has warmed it up, wholly or in part
        new, cached = map(int, re.search(r"(\d+) new \+ (\d+) cached", shown).groups())
        assert new < 40 < cached
        user.leave()


def test_a_kill_at_an_empty_prompt_leaves_no_session(start, data_dir):
    with start("--temperature", "0.5", "--system", "Be kind.") as terminal:
        terminal.wait_prompt()
        os.kill(terminal.pid, signal.SIGKILL)
        terminal.wait_end()
    store = SqliteStore(data_dir)
    assert store.summaries() == []
    store.close()
    with start("--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        assert "* chat-1 " in user.type("/sessions", "* chat-")
        user.leave()


def test_an_imported_session_asks_for_its_model(start, script, model, tmp_path):
    archive = tmp_path / "trip.zip"
    with start("--session", "trip", "--max-new-tokens", "4", columns=200) as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        user.type(f"/export {archive}", "written")
        user.type(f"/import {archive} copy", "session copy, context", prompt="copy> ")
        user.leave()
    short = ["--max-new-tokens", "4"]
    done = script("-p", "x", "--session", "copy", *short)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"lmchat chat {model} --session copy opens it\n" in done.stderr
    with start("--session", "copy", about=(), columns=200) as terminal:
        terminal.wait(f"its archive names the model '{model}'. Open it? [y/N]:")
        terminal.key("enter")
        assert terminal.wait_end() == 2
        assert "the model was not opened; lmchat chat MODEL --session copy uses" in terminal.text
    with start("--session", "copy", *short, about=(), columns=200) as terminal:
        terminal.wait("Open it? [y/N]:")
        terminal.type("y\r")
        user = ChatUser(terminal)
        user.type("more", "TTFT")
        user.leave()
    assert script("-p", "x", "--session", "copy", *short).returncode == 0  # it was used here


# --- two terminals -------------------------------------------------------------------------------


def test_two_terminals_see_each_others_turns_of_one_session(start, data_dir):
    with start("--session", "trip", "--max-new-tokens", "6") as one:
        first = ChatUser(one)
        one.wait("session trip begins")
        first.type("hello", "TTFT")
        with start("--session", "trip") as two:
            second = ChatUser(two)
            two.wait("── trip · 1 round · hello ──")
            first.type("/set max_new_tokens default", "max_new_tokens")
            first.begin("write")
            question = "Delete session trip with 2 rounds permanently? [y/N] "  # the one that comes
            second.type("/delete", prompt=question)
            second.type("y", "try again when that has ended", prompt="> ")
            second.type("and me?", f"process {one.pid}", prompt="> and me?")
            one.key("ctrl-c")
            one.wait("stopped; /continue goes on")
            first.type("/set max_new_tokens 6", "max_new_tokens: 6")
            second.type("", "2 messages came from elsewhere before this", prompt="> ")
            first.type("once more", "2 messages came from elsewhere before this")
            assert "before this" not in first.type("last", "TTFT")
            assert "from elsewhere" in second.type("/title ours", "title: ours")
            assert "from elsewhere" not in second.type("/title ours", "title: ours")
            second.type("/show", "4> once more", "5> last")
            second.leave()
        first.leave()
    record = stored_session(data_dir, "trip")
    questions = [t.text for t in record.tree.path(record.leaf) if t.role == "user"]
    assert questions == ["hello", "write", "and me?", "once more", "last"]


def test_a_verb_refuses_a_turn_that_was_not_shown(start, script, data_dir):
    with start("--session", "trip", "--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        asked = ["hello"]
        for number, verb in enumerate(("/undo", "/retry", "/edit 1 other", "/continue"), 2):
            asked.append(f"unseen {number}")
            assert script("-p", asked[-1], "--session", "trip").returncode == 0
            user.type(verb, "not done: the conversation was continued", f"{number}> unseen")
            record = stored_session(data_dir, "trip")
            path = record.tree.path(record.leaf)
            assert [turn.text for turn in path if turn.role == "user"] == asked
            assert len(record.tree) == len(path) == 2 * number
        user.type("/undo", "taken back", prompt="> unseen 5")  # which was seen now
        terminal.key("ctrl-c")
        user.prompt = "> "
        user.leave()


def test_a_turn_counts_as_seen_only_once_it_is_shown(start, script, data_dir):
    """Neither an error nor a command that only counts turns shows them."""
    with start("--session", "trip", "--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        for number, (line, message) in enumerate(
            (("/set temperature -1", "error: "), ("/title ours", "2 messages came from")), 2
        ):
            assert script("-p", f"unseen {number}", "--session", "trip").returncode == 0
            user.type(line, message)
            user.type("/undo", "not done: the conversation was continued", f"{number}> unseen")
        user.leave()
    assert len(stored_session(data_dir, "trip").tree) == 6


def test_two_terminals_have_separate_sessions(start, data_dir):
    short = ["--max-new-tokens", "4"]
    with start(*short) as one, start(*short) as two:
        users = ChatUser(one), ChatUser(two)
        for user in users:
            user.type("hello", "TTFT")
        names = {user.type("/sessions", "* chat-").split("* ")[1].split()[0] for user in users}
        assert names == {"chat-1", "chat-2"}
        for user in users:
            user.leave()


# --- the prompt, and commands on the store -------------------------------------------------------


def test_the_prompt_has_a_name_once_two_sessions_are_in_use(start, data_dir):
    with start("--session", "old", "--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("the old one", "TTFT")
        user.leave()
    with start("--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        user.type("/sessions", "* chat-", "  old", "the old one")
        user.type("/search OLD", "old  the old one  1 turn, ", "/switch NAME opens one")
        user.type("/search old", "  the old one")
        user.type("/search nowhere", "no session contains nowhere")
        terminal.type("/switch o")
        terminal.wait(lambda: re.search(r"> /switch o\n +old +the old one", terminal.text))
        terminal.key("tab")
        terminal.wait("> /switch old")
        terminal.key("enter")
        terminal.wait("session old, context")
        user.prompt = "old> "
        user.type("more", "TTFT")
        user.leave()
    record = stored_session(data_dir, "old")
    assert sum(turn.role == "user" for turn in record.tree.path(record.leaf)) == 2


def test_every_verb_of_a_stored_session_works_in_the_chat(start, data_dir, tmp_path):
    archive = tmp_path / "my trip.zip"
    with start("--session", "trip", "--max-new-tokens", "4", columns=160) as terminal:
        user = ChatUser(terminal)
        user.type("/title", "title: none yet")
        user.type("hello", "TTFT")
        user.type("/title A week in Kyoto", "title: A week in Kyoto")
        user.type("/tag", "tags: none")
        user.type("/tag travel japan", "tags: travel, japan")
        user.type("/tag -travel", "tags: japan")
        user.type("/tag -food", "error: there is no tag 'food', expected japan")
        user.type("/pin", "session trip is pinned: ")
        user.type("/pin no", "error: /pin no: expected nothing after it, or off")
        user.type("/sessions", "* trip", "pinned", "A week in Kyoto")
        user.type("/pin off", "session trip is not pinned")
        user.type("/save", f"Not needed: every message is stored in {data_dir}")
        user.type(f"/export {archive}", "my trip.zip: 2 messages of all branches written")
        user.type(f"/export {archive}", "--force replaces it")
        user.type(f"/export {archive} --force", "2 messages of all branches written")
        user.type(f"/export {tmp_path}/x.md --pages", "error: ", "expected a name that ends in")
        user.type("/fork", "continues from here; trip is unchanged", prompt="chat-1> ")
        user.type("/delete nobody", "error: there is no session 'nobody'")
        terminal.type("/delete trip")
        terminal.key("enter")
        terminal.wait("Delete session trip with 1 round permanently? [y/N]")
        terminal.key("enter")
        terminal.wait("not deleted")
        terminal.wait_prompt(user.prompt)
        terminal.type("/delete trip")
        terminal.key("enter")
        terminal.wait_prompt("Delete session trip with 1 round permanently? [y/N] ")
        terminal.type("y")
        terminal.key("enter")
        user.prompt = "> "
        terminal.wait("session trip is deleted")
        user.type(f"/import {archive}", "session trip, context", "1> hello", prompt="trip> ")
        user.type("/title", "title: A week in Kyoto")
        user.type("/delete", "[y/N]", prompt="Delete session trip with 1 round permanently? [y/N] ")
        user.type("yes", "session trip is deleted; session chat-2 begins", prompt="chat-2> ")
        user.leave()
    store = SqliteStore(data_dir)
    assert [summary.name for summary in store.summaries()] == ["chat-1"]  # not the empty one
    store.close()


def test_an_export_includes_the_computed_pages(start, tmp_path):
    with start("--session", "trip", "--max-new-tokens", "4", columns=160) as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        terminal.type(f"/export {tmp_path}/trip.zip --pages")
        terminal.key("enter")
        terminal.wait(lambda: "written" in terminal.text or "error" in terminal.text)
        assert "2 messages of all branches, 1 page written" in terminal.text
        user.type(f"/import {tmp_path}/trip.zip copy", "session copy, ", prompt="copy> ")
        user.leave()


def test_without_a_store_nothing_is_written(start, data_dir, tmp_path):
    with start("--no-store", "--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        terminal.wait("This chat is not stored.")
        user.type("a secret", "TTFT")
        user.type("/save", "this chat is not stored; /export FILE writes it")
        user.type("/fork copy", "session copy continues", prompt="copy> ")
        user.leave()
    assert not data_dir.exists() or not list(data_dir.iterdir())


def test_an_unusable_store_is_a_clear_error(start, data_dir, script, model):
    data_dir.write_text("no folder")
    done = script(model, "-p", "hello", "--session", "trip", "--max-new-tokens", "4")
    assert done.returncode == 1
    assert done.stderr.startswith("lmchat: ")
    assert done.stderr.endswith("; --no-store chats without storing anything\n")
    assert done.stderr.count("\n") == 1
    for options in ([], ["--session", "trip", "--no-store"]):  # both store nothing
        assert script(model, "-p", "hello", "--max-new-tokens", "4", *options).returncode == 0
    with start("--no-store", "--max-new-tokens", "4") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "TTFT")
        user.leave()
