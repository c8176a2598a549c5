"""What the page does, without a browser: notices with remedies, the panel, the form, owners."""

import asyncio
import json

import pytest

import lmchat
from lmchat.server.session_limit import SessionLimit
from lmchat.store.memory_store import MemoryStore
from lmchat.webui.chat import Chat, Visitor
from lmchat.webui.form import HELP, NEW, values_of
from lmchat.webui.marks import Mark

SHORT = {"max_new_tokens": "8", "temperature": "0"}


class Page:
    """A tab of the page without a browser."""

    def __init__(self, chat, engine, owner="ann", most=100):
        self.chat, self.engine = chat, engine
        limit = SessionLimit(engine.sync, most, lambda owner, count: 0)
        self.visitor = Visitor(owner, chat.tabs.of(owner, f"tab {id(self)}"), limit)
        self.mark, self.parts = "", {}

    def take(self, parts):
        self.parts |= parts
        self.mark = parts.get("mark", self.mark)
        return parts

    async def show(self):
        async for parts in self.chat.show(self.mark, self.visitor):
            self.take(parts)

    async def send(self, text):
        self.take(await self.chat.send(text, self.mark, self.visitor))
        await self.show()

    async def act(self, verb, **values):
        asked = json.dumps({"verb": verb, **values})
        self.take(await self.chat.act(asked, self.mark, self.visitor))
        await self.show()

    async def save(self, **values):
        given = {**self.parts.get("form", NEW), **values}
        found = self.take(await self.chat.save(given, self.mark, self.visitor))
        await self.show()
        return found["refusals"]

    async def session(self):
        mark = Mark.parse(self.mark)
        return await self.engine.session_by_id(mark.session, owner=self.visitor.owner)

    @property
    def notice(self):
        return json.loads(self.parts["notice"])["text"] if "notice" in self.parts else None

    @property
    def view(self):
        return json.loads(self.parts["view"])

    async def panel(self, words=""):
        parts = self.take(await self.chat.search(words, self.visitor))
        return json.loads(parts.get("sessions") or self.parts["sessions"])


def on_page(run, **options):
    async def main():
        async with lmchat.AsyncChatEngine(
            "memo", store=MemoryStore(), threads=1, cache_memory="32MiB", **options
        ) as engine:
            await run(Page(Chat(engine), engine), engine)

    asyncio.run(main())


def test_dropped_rounds_stay_in_view():
    async def run(page, engine):
        await page.save(max_new_tokens="8", temperature="0")
        asked = []
        while len(asked) < 40:
            asked.append(f"{len(asked)} " + "word " * 8)
            await page.send(asked[-1])
            rounds = page.view["rounds"]
            if rounds[0]["number"] < 0:
                break
        chat = await page.session()
        assert chat.overflow == "drop"  # one rule with the terminal
        above = sum(one["number"] < 0 for one in rounds)
        assert 0 < above < len(asked)
        assert [one["question"] for one in rounds] == asked
        assert [one["number"] for one in rounds] == [-1] * above + list(range(len(asked) - above))
        assert page.view["title"] == asked[0].strip()
        assert not any(one["branch"] for one in rounds[:above])
        await page.act("edit", turn=0, text="Other words")
        assert [one["question"] for one in page.view["rounds"]] == [*asked[:above], "Other words"]
        await page.save(overflow="refuse", max_new_tokens="")
        assert chat.overflow == "refuse"
        await chat.set(ignore_eos=True)
        await page.act("retry")  # up to the end of the context
        assert page.view["status"].startswith("Cut, because the context is full. Edit a question")
        assert not page.view["ending"]  # nothing is left to continue into

    on_page(run, max_context_tokens=256)


def test_a_turn_with_its_figures_and_its_branches():
    async def run(page, engine):
        await page.save(**SHORT, system="Be brief.")
        await page.send("Hello!")
        chat = await page.session()
        assert (chat.settings, await chat.system()) == (
            {"max_new_tokens": 8, "temperature": 0}, "Be brief.",
        )  # fmt: skip
        (one,) = page.view["rounds"]
        assert "tok/s" in one["figures"]
        assert "context" in one["figures"]
        await page.act("retry")
        assert page.view["rounds"][0]["branch"] == [1, 2]
        await page.act("switch", turn=0, index=0)
        assert page.view["rounds"][0]["branch"] == [0, 2]
        await page.act("edit", turn=0, text="Good day!")
        assert page.view["rounds"][0]["question"] == "Good day!"
        await page.act("edit_reply", turn=0, text="<b>")
        assert page.parts["last"][-1]["content"] == "&lt;b>"
        await page.act("fork", turn=0)
        assert (await page.session()).id != chat.id
        await page.act("delete")
        assert page.mark == ""
        assert page.parts["last"] == []

    on_page(run)


def test_refusals_are_beside_their_fields_and_the_rest_is_saved():
    async def run(page, engine):
        await page.save(**SHORT)
        await page.send("Hello!")
        refusals = await page.save(
            title="Greetings", tags="a, b", pinned=True, temperature="hot", top_p="2",
            thinking="on", stop_strings="END", max_new_tokens="",
        )  # fmt: skip
        assert set(refusals) == {"temperature", "top_p", "thinking"}
        assert "'hot'" in refusals["temperature"]
        chat = await page.session()
        assert (chat.tags, chat.pinned, await chat.title()) == (("a", "b"), True, "Greetings")
        assert chat.settings == {"temperature": 0, "stop_strings": ["END"]}
        assert page.parts["form"] == await values_of(engine, chat)
        assert set(page.parts["form"]) == set(HELP) == set(NEW)
        assert page.notice == "Not everything was saved: see the fields."
        page.mark = ""
        await page.save(temperature="hot")
        await page.send("Hello!")
        assert "'hot'" in page.notice
        assert len(await engine.sessions("ann")) == 1  # the refused chat was not stored

    on_page(run)


def test_a_full_context_names_the_remedy():
    async def run(page, engine):
        await page.save(**SHORT)
        await page.send("Hello!")
        await page.send("word " * 200)
        assert page.notice.endswith("Edit an earlier question, or set Overflow to drop")
        assert len(page.view["rounds"]) == 1

    on_page(run, max_context_tokens=128)


def test_a_full_queue_and_a_full_account_are_refused_with_what_to_do():
    async def run(page, engine):
        await page.save(max_new_tokens="1000", temperature="0")
        running = await engine.session("a", owner="bob", settings={"ignore_eos": True})
        generations = [await running.start_send("Tell me")]
        waiting = await engine.session("b", owner="ann", settings={"ignore_eos": True})
        generations.append(await waiting.start_send("Tell me"))
        await page.send("Hello!")
        assert "Try again in" in page.notice
        for one in generations:
            one.cancel()
        assert page.mark == ""
        full = Page(page.chat, engine, "ann", most=1)
        await full.send("Hello!")
        assert "which is the limit; delete some" in full.notice
        await running.stop()
        await waiting.stop()

    on_page(run, max_batch_size=1, max_queue=1)


def test_the_panel_has_days_pins_pages_and_a_search():
    async def run(page, engine):
        for number in range(22):
            chat = await engine.session(owner="ann")
            text = "a needle <b>" if number == 3 else f"message {number}"
            await chat.append([{"role": "user", "content": text},
                               {"role": "assistant", "content": "yes"}])  # fmt: skip
            if number == 5:
                await chat.pin()
        await engine.session("foreign", owner="bob")
        panel = await page.panel()
        assert [group["name"] for group in panel["groups"]] == ["Pinned", "Today"]
        assert sum(len(group["sessions"]) for group in panel["groups"]) == 20
        assert panel["more"]
        await page.act("more")
        panel = await page.panel()
        assert sum(len(group["sessions"]) for group in panel["groups"]) == 22
        assert not panel["more"]
        (group,) = (await page.panel("needle"))["groups"]
        assert [one["title"] for one in group["sessions"]] == ["a needle <b>"]

    on_page(run)


@pytest.mark.parametrize(
    "request_text",
    ["", "x", "[]", "{}", '{"verb": "none"}', '{"verb": ["open"]}', '{"verb": "switch"}',
     '{"verb": "fork", "turn": "0"}', '{"verb": "open", "session": 5}', "[" * 100_000,
     '{"verb": "edit", "turn": true, "text": "x"}', '{"verb": "open", "session": "../x"}'],
)  # fmt: skip
def test_a_malformed_request_changes_nothing(request_text):
    async def run(page, engine):
        await page.save(**SHORT)
        await page.send("Hello!")
        before = (await page.session()).revision, page.mark
        parts = await page.chat.act(request_text, page.mark, page.visitor)
        assert list(parts) == ["notice"] or parts == {"notice": parts["notice"], "mark": ""}
        assert (await page.session()).revision == before[0]

    on_page(run)


def test_another_owner_s_session_is_answered_as_unknown():
    async def run(page, engine):
        await page.save(**SHORT)
        await page.send("Hello!")
        mark, chat = page.mark, await page.session()
        before = chat.revision
        other = Page(page.chat, engine, "bob")
        answers = set()
        for session in (chat.id, "0" * 32):
            await other.act("open", session=session)
            answers.add(other.notice.replace(session, "ID"))
        assert len(answers) == 1
        for verb in ("retry", "continue", "edit", "edit_reply", "switch", "fork", "delete"):
            other.mark = mark
            await other.act(verb, turn=0, index=0, text="x")
            assert "o session of the id" in other.notice
            assert other.mark == ""
        for call in (other.chat.stop, other.chat.tick):
            found = await call(mark, other.visitor)
            assert found["mark"] == ""
        other.mark = mark
        await other.show()
        assert other.mark == ""
        assert "Hello!" not in json.dumps(other.parts.get("last", ""))
        given = await other.chat.save({**NEW, "title": "mine"}, mark, other.visitor)
        assert "o session of the id" in json.loads(given["notice"])["text"]
        assert chat.revision == before

    on_page(run)
