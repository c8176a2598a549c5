"""What the page does: shows what a mark stands for, and starts the verbs of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from lmchat.aio.engine import AsyncChatEngine
from lmchat.aio.session import AsyncSession
from lmchat.aio.stream import AsyncFollower
from lmchat.aio.threads import shared
from lmchat.errors import ContextFull, Error, InvalidRequest, NotFound, Overloaded, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.interface.session import Branch
from lmchat.public_text import public_message, public_notice
from lmchat.server.errors import HttpError, log_failure
from lmchat.server.forecasts import forecasts_by_id
from lmchat.server.session_limit import SessionLimit

from .form import NEW, changed, values_of
from .marks import LISTED, ROUNDS, Mark, Tab, Tabs
from .views import ENDINGS, FULL, Answer, Round, facts_of, listed, messages, rounds

Asked = dict[str, Any]
"""What the page's JavaScript asks for."""

Parts = dict[str, Any]
"""New values of parts of the page, by name. A part that is not there stays as it is."""

INTERVAL = 0.12
"""Seconds between two updates of a reply in one tab."""
UPDATES = 16  # a second of all tabs, at most: each takes the server milliseconds
COSTS_SECONDS = 10.0
"""Seconds between two looks at where the KV of listed sessions is."""
_LOOK = 0.25  # seconds after which a generator without news looks for a newer mark


@dataclass(frozen=True)
class Visitor:
    """Who uses a tab.

    Attributes:
        owner: owner of the sessions that the tab may see.
        tab: what the tab has been sent.
        limit: bound of the owner's sessions.
    """

    owner: str
    tab: Tab
    limit: SessionLimit


class Chat:
    """The page's work on sessions. All methods run on the server's loop.

    Args:
        engine: the engine, started before the first call.
    """

    def __init__(self, engine: AsyncChatEngine) -> None:
        self._engine = engine
        self.tabs = Tabs()
        """The tabs of all owners."""
        self._streaming = 0  # tabs in which a reply runs

    # --- showing ----------------------------------------------------------------------------------

    async def show(self, text: str, visitor: Visitor) -> AsyncIterator[Parts]:
        """Shows what a mark stands for, until nothing runs or the tab has a newer mark."""
        tab, mark = visitor.tab, Mark.parse(text)
        text = str(mark)
        if tab.shown != text:
            tab.mark = text
            async with tab.lock:  # the last one has ended: Gradio would send its values later
                async for parts in self._show(text, visitor):
                    yield parts
        yield {}  # Gradio sends the last value again at the end

    async def _show(self, text: str, visitor: Visitor) -> AsyncIterator[Parts]:
        tab, mark = visitor.tab, Mark.parse(text)
        tab.shown = None
        try:
            session = await self._session(mark, visitor) if mark.session else None
            back = ""
            while tab.mark == text:
                follower = None if session is None else await running(session)
                if session is None or follower is None:
                    yield await self._still(tab, session, mark, back)
                    return
                try:
                    self._streaming += 1
                    async with follower:
                        async for parts in self._following(tab, session, mark, follower):
                            yield parts
                except Error as error:  # it failed before its first token
                    back = tab.question
                    yield {"notice": notice(error)}
                finally:
                    self._streaming -= 1
        except Error as error:
            yield {"notice": notice(error), **left(tab, error)}

    async def _still(self, tab: Tab, session: AsyncSession | None, mark: Mark, back: str) -> Parts:
        """Returns the page of a session in which nothing runs."""
        if session is None:
            tab.shown = ""
            form = {"form": {**NEW, **tab.form}} if tab.changed("form", {**NEW, **tab.form}) else {}
            return {**self._parts(tab, facts_of(None, [], 0), [], []), **form}
        mark = replace(mark, revision=session.revision, reply=None)  # before the turns are read
        turns, dropped = await session.turns(), await session.dropped()
        found = rounds(turns, self._engine.max_context, dropped)
        facts = facts_of(session, found, mark.rounds)
        numbers = [fact["number"] for fact in facts["rounds"]]
        lists = await asyncio.gather(*(_branches(session, n) for n in numbers))
        for fact, branches in zip(facts["rounds"], lists, strict=True):
            active = [one.index for one in branches if one.active]
            fact["branch"] = [*active[:1], len(branches)] if len(branches) > 1 else None
        facts["title"] = await session.title()
        facts["unanswered"] = session.unanswered or back
        if found and found[-1].answer is not None:
            why = ENDINGS.get(turns[-1].finish_reason, "")
            is_full = session.length >= self._engine.max_context
            facts["ending"] = bool(why) and not is_full
            if turns[-1].finish_reason == "length" and is_full:
                why = FULL[session.overflow]
            facts["status"] = " ".join((why, *map(public_notice, tab.notices))).strip()
        tab.notices = ()
        form = await values_of(self._engine, session)
        tab.mark = tab.shown = str(mark)
        part = found[-mark.rounds :]
        last = messages(part[-1]) if part else []
        parts = {**self._parts(tab, facts, history(part), last), "mark": tab.mark}
        return {**parts, "form": form} if tab.changed("form", form) else parts

    async def _following(
        self, tab: Tab, session: AsyncSession, mark: Mark, follower: AsyncFollower
    ) -> AsyncIterator[Parts]:
        """Yields the page while a reply runs."""
        found = await shared.run(self._before, follower)
        if not found:  # it has ended meanwhile
            return
        tab.question = found[-1].question.text
        facts = {**facts_of(session, found, mark.rounds), "running": True}
        facts["title"] = await session.title()
        earlier = history(found[-mark.rounds :])
        answer = Answer(is_running=True)
        current, parts = replace(found[-1], answer=answer), await soon(follower)
        while tab.mark == str(mark) and (parts is None or parts):
            begun = time.monotonic()
            answer.take(parts or ())
            facts["status"] = answer.status
            yield self._parts(tab, facts, earlier, messages(current))
            parts = await soon(follower)
            pause = min(max(INTERVAL, self._streaming / UPDATES), 1.0)
            await asyncio.sleep(max(0.0, begun + pause - time.monotonic()))
        if follower.done:
            # It raises if it failed before its first token.
            tab.notices = (await follower.result()).notices

    def _before(self, follower: AsyncFollower) -> list[Round]:
        """Returns the rounds before a running reply, and its own one."""
        dropped = follower.dropped
        return rounds(follower.preceding, self._engine.max_context, dropped)

    def _parts(self, tab: Tab, facts: dict[str, Any], earlier: list[Any], last: list[Any]) -> Parts:
        values: Parts = {"history": earlier, "last": last, "view": json.dumps(facts)}
        values["is_running"] = facts["running"]
        return {name: value for name, value in values.items() if tab.changed(name, value)}

    # --- changes made elsewhere -------------------------------------------------------------------

    async def tick(self, text: str, visitor: Visitor) -> Parts:
        """Returns the mark of the tab's session as it is now, and the side panel."""
        tab, mark, parts = visitor.tab, Mark.parse(text), Parts()
        before = tab.mark
        sessions = await self._listed(visitor)
        if tab.changed("sessions", sessions):
            parts["sessions"] = sessions
        if not mark.session:
            return parts
        try:
            session = await self._session(mark, visitor)
            follower = await running(session)
            reply = None if follower is None else follower.turn_id
            if follower is not None:
                follower.close()
            now = replace(mark, revision=session.revision, reply=reply)
        except Error as error:
            return {**parts, "notice": notice(error), **left(tab, error)}
        if tab.mark == before and str(now) != text:  # no verb was faster
            tab.mark = parts["mark"] = str(now)
        return parts

    async def _listed(self, visitor: Visitor) -> str:
        """Returns the side panel."""
        tab, words = visitor.tab, visitor.tab.search.strip() or None
        found = await self._engine.sessions(visitor.owner, search=words, limit=tab.listed + 1)
        shown = found[: tab.listed]
        if time.monotonic() >= tab.costs_due:
            tab.costs_due = time.monotonic() + COSTS_SECONDS
            with contextlib.suppress(Error):
                ids = [one.id for one in shown]
                tab.costs = await shared.run(forecasts_by_id, self._engine.sync, ids, visitor.owner)
        return listed(shown, tab.costs, len(found) > len(shown))

    async def search(self, words: str, visitor: Visitor) -> Parts:
        """Filters the side panel by words of messages and titles."""
        visitor.tab.search = words[:500]
        return await self.tick("", visitor)

    async def save(self, values: dict[str, Any], text: str, visitor: Visitor) -> Parts:
        """Changes the session's fields that have other values. Returns the refusals by field. A new
        chat gets them with its first message."""
        mark, tab = Mark.parse(text), visitor.tab
        if not mark.session:
            tab.form = {name: value for name, value in values.items() if value != NEW[name]}
            return {"refusals": {}, "notice": told("Saved for the first message of the chat.")}

        try:
            session = await self._session(mark, visitor)
            refusals = await self._save(session, values)
        except Error as error:
            return {"notice": notice(error), **left(tab, error)}
        tab.sent.pop("form", None)
        tab.mark = str(replace(mark, revision=session.revision))
        done = "Not everything was saved: see the fields." if refusals else "Saved."
        return {"refusals": refusals, "notice": told(done), "mark": tab.mark}

    async def _save(self, session: AsyncSession, values: dict[str, Any]) -> dict[str, str]:
        """Gives the session's fields other values. Returns the refusals by field."""
        before, refusals = await values_of(self._engine, session), {}
        for name, value in values.items():
            try:
                if value != before[name]:
                    await session.update(**changed(self._engine.template_info, name, value))
            except Error as error:
                refusals[name] = public_message(error)
        return refusals

    # --- verbs ------------------------------------------------------------------------------------

    async def act(self, request: str, text: str, visitor: Visitor) -> Parts:
        """Does what the page's JavaScript asks for, as JSON: {"verb": name, ...}."""
        try:
            asked = json.loads(request)
        except (ValueError, RecursionError):
            asked = None
        values = asked if isinstance(asked, dict) else {}
        return await self._done(visitor, self._act(values, Mark.parse(text), visitor))

    async def send(self, message: str, text: str, visitor: Visitor) -> Parts:
        """Sends the message. A new chat is stored together with it."""
        if not message.strip():
            return {}
        parts = await self._done(visitor, self._send(Mark.parse(text), visitor, message))
        return {**parts, "box": ""} if "mark" in parts else parts

    async def stop(self, text: str, visitor: Visitor) -> Parts:
        """Stops the running reply."""
        return await self._done(visitor, self._stop(Mark.parse(text), visitor))

    async def _done(self, visitor: Visitor, work: Any) -> Parts:
        """Awaits a verb. Returns its mark, or a notice of its error."""
        try:
            mark = str(await work)
        except Exception as error:
            if not isinstance(error, (Error, HttpError)):
                log_failure("the page failed", error)
            return {"notice": notice(error), **left(visitor.tab, error)}
        visitor.tab.mark = mark
        return {"mark": mark}

    async def _act(self, asked: Asked, mark: Mark, visitor: Visitor) -> Mark:
        verb = str(asked.get("verb"))
        if verb == "open":
            return await self._open(mark, visitor, asked.get("session"))
        if verb == "more":
            visitor.tab.listed += LISTED
            return mark
        if verb == "earlier":
            return replace(mark, rounds=mark.rounds + ROUNDS)
        if verb not in VERBS:
            raise InvalidRequest(f"the verb is {verb[:100]!r}, expected one of the page")
        session = await self._session(mark, visitor)
        return await VERBS[verb](session, asked, mark, visitor)

    async def _open(self, mark: Mark, visitor: Visitor, session_id: Any) -> Mark:
        if not session_id:
            return Mark()
        session = await self._engine.session_by_id(session_id, owner=visitor.owner)
        if session.id == mark.session:
            return mark
        with contextlib.suppress(Error):  # it is only faster
            await session.warm()
        return Mark(session.id, session.revision)

    async def _send(self, mark: Mark, visitor: Visitor, message: str) -> Mark:
        if mark.session:
            session = await self._session(mark, visitor)
            return moved(session, mark, await session.start_send(message))
        async with visitor.limit.async_room(visitor.owner):
            session = await self._engine.session(owner=visitor.owner, overflow=NEW["overflow"])
        try:
            for name, value in visitor.tab.form.items():
                await session.update(**changed(self._engine.template_info, name, value))
            generation = await session.start_send(message)
        except BaseException:
            await session.delete()
            raise
        visitor.tab.form = {}
        return moved(session, mark, generation)

    async def _stop(self, mark: Mark, visitor: Visitor) -> Mark:
        session = await self._session(mark, visitor)
        await session.stop()
        return moved(session, mark, None)

    async def _session(self, mark: Mark, visitor: Visitor) -> AsyncSession:
        if not mark.session:
            raise InvalidRequest("there is no chat yet, send a message first")
        return await self._engine.session_by_id(mark.session, owner=visitor.owner)


def moved(session: AsyncSession, mark: Mark, generation: Generation | None) -> Mark:
    """Returns the mark of a session in which a reply has begun, or nothing runs."""
    reply = None if generation is None else generation.turn_id
    return replace(mark, session=session.id, revision=session.revision, reply=reply)


def number(asked: Asked, name: str) -> int:
    """Returns a number of a request."""
    value = asked.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {str(value)[:100]!r}, expected a number")
    return value


async def _branches(session: AsyncSession, turn: int) -> list[Branch]:
    """Returns the branches at a user turn; none at one that was dropped from the prompt."""
    return [] if turn < 0 else await session.branches(turn)


async def running(session: AsyncSession) -> AsyncFollower | None:
    """Returns a reader of the running reply, also of another process. None: all is stored."""
    try:
        follower = await session.follow()
    except NotFound:  # there is no reply yet, or no session
        with contextlib.suppress(SessionBusy):
            await session.refresh()
        return None
    if follower.done:
        follower.close()
        return None
    return follower


async def soon(follower: AsyncFollower) -> list[Any] | None:
    """Returns the next parts of a reply, an empty list at its end, None if none come soon."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(follower.take(), _LOOK)
    return None


def history(found: list[Round]) -> list[dict[str, Any]]:
    """Returns the messages of all rounds but the last one."""
    return [message for one in found[:-1] for message in messages(one)]


def notice(error: BaseException) -> str:
    """Returns an error as JSON for the page, with what to do."""
    text = str(error) if isinstance(error, HttpError) else public_message(error)
    if isinstance(error, ContextFull):
        text += ". Edit an earlier question, or set Overflow to drop"
    if isinstance(error, Overloaded):
        text += f". Try again in {max(1, round(error.retry_after))} s"
    return told(text[:1].upper() + text[1:])


def told(text: str) -> str:
    """Returns a sentence for the user as JSON. Its number makes each one a new value."""
    return json.dumps({"number": time.monotonic_ns(), "text": text})


def left(tab: Tab, error: BaseException) -> Parts:
    """Returns the mark of a new chat if the tab's session does not exist."""
    if not isinstance(error, NotFound):
        return {}
    tab.mark = ""
    return {"mark": ""}


async def _retry(session: AsyncSession, _: Asked, mark: Mark, __: Visitor) -> Mark:
    return moved(session, mark, await session.start_retry())


async def _continue(session: AsyncSession, _: Asked, mark: Mark, __: Visitor) -> Mark:
    return moved(session, mark, await session.start_continue())


async def _edit(session: AsyncSession, asked: Asked, mark: Mark, _: Visitor) -> Mark:
    generation = await session.start_edit(number(asked, "turn"), str(asked.get("text")))
    return moved(session, mark, generation)


async def _edit_reply(session: AsyncSession, asked: Asked, mark: Mark, _: Visitor) -> Mark:
    await session.edit_reply(number(asked, "turn"), str(asked.get("text")))
    return moved(session, mark, None)


async def _switch(session: AsyncSession, asked: Asked, mark: Mark, _: Visitor) -> Mark:
    await session.switch(number(asked, "turn"), number(asked, "index"))
    return moved(session, mark, None)


async def _fork(session: AsyncSession, asked: Asked, mark: Mark, visitor: Visitor) -> Mark:
    """Goes to a copy of the session that ends with the reply of a user turn."""
    async with visitor.limit.async_room(visitor.owner):
        copy = await session.fork(at=number(asked, "turn") + 1)
    copy.fresh = False
    return moved(copy, mark, None)


async def _delete(session: AsyncSession, _: Asked, __: Mark, ___: Visitor) -> Mark:
    await session.delete()
    return Mark()


VERBS = {
    "retry": _retry,
    "continue": _continue,
    "edit": _edit,
    "edit_reply": _edit_reply,
    "switch": _switch,
    "fork": _fork,
    "delete": _delete,
}
"""Verb of a session that the page's JavaScript may ask for -> what does it."""
