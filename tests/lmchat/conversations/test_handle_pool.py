"""Which handle a request gets, and what becomes of it."""

import pytest

from lmchat.conversations.handle_pool import HandlePool


class Core:
    """Opens handles that hold nothing and count themselves."""

    def __init__(self):
        self.open_handles = []

    def open(self, salt, priority):
        handle = Handle(self)
        self.open_handles.append(handle)
        return handle


class Handle:
    def __init__(self, core):
        self.core = core

    def fork(self, priority, wait):
        assert self in self.core.open_handles
        return self.core.open("", priority)

    def close(self):
        if self in self.core.open_handles:
            self.core.open_handles.remove(self)


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def pool(core):
    return HandlePool(core, 1000)


PROMPT, REPLY = list(range(20)), [90, 91, 92]


def run(pool, prompt, reply=REPLY, owner="a"):
    reservation = pool.reserve(owner, prompt)
    handle, prefix = pool.begin(reservation)
    pool.finish(reservation, reply, len(prompt) + len(reply) - 1)
    return handle, prefix


def test_an_extended_conversation_keeps_its_handle(pool, core):
    handle, prefix = run(pool, PROMPT)
    assert prefix == 0
    assert run(pool, [*PROMPT, *REPLY, 5]) == (handle, 23)
    assert len(core.open_handles) == 1


def test_a_request_continues_a_conversation_if_it_shares_a_reply(pool):
    def continues(prompt, **options):
        reservation = pool.reserve("a", prompt)
        found = reservation.continues
        pool.begin(reservation)
        pool.finish(reservation, [80], len(prompt))
        return found

    assert not continues(PROMPT)
    assert not continues(PROMPT)  # the same question again
    assert not continues([*PROMPT[:15], 7, 8, 9])  # of one template
    longer = [*PROMPT, 80, 5, 6]
    assert continues(longer)
    assert continues([*longer, 80, 5])
    assert continues([*PROMPT, 80, 7])  # another question in place of the second one
    assert not continues([5, *longer])
    reservation = pool.reserve("a", [*longer, 80, 5, 80])
    assert reservation.continues
    pool.begin(reservation)
    pool.lost(reservation)
    assert not reservation.continues


def test_a_branch_gets_a_fork_and_the_old_one_stays(pool, core):
    handle, _ = run(pool, PROMPT)
    other, prefix = run(pool, [*PROMPT[:15], 7])
    assert other is not handle
    assert prefix == 15
    assert len(core.open_handles) == len(pool) == 2
    assert run(pool, [*PROMPT, *REPLY, 5]) == (handle, 23)


def test_a_second_request_forks_what_the_first_one_leaves_unchanged(pool):
    run(pool, PROMPT)
    longer = [*PROMPT, *REPLY, 5]
    first, second = pool.reserve("a", longer), pool.reserve("a", [*longer, 6])
    assert first.extends
    assert not second.extends
    assert first.prefix == second.prefix == 23
    assert second.held == 22
    second_handle, _ = pool.begin(second)  # before the first one has begun
    assert second_handle is not pool.begin(first)[0]
    third = pool.reserve("a", [*longer, 6, 7])
    assert third.prefix == 25  # the prompt of the second one, which stays
    pool.abandon(third)
    pool.finish(first, [1], 24)
    pool.finish(second, [2], 25)
    assert len(pool) == 2


def test_a_second_request_does_not_count_on_tokens_that_the_first_one_drops(pool):
    run(pool, PROMPT)  # the last token of the reply has no KV
    first = pool.reserve("a", [*PROMPT, *REPLY[:2], 5])
    second = pool.reserve("a", [*PROMPT, *REPLY, 6])
    assert first.extends
    assert second.prefix == first.prefix == 22


def test_a_request_that_was_never_sent_leaves_the_handle_as_it_was(pool, core):
    handle, _ = run(pool, PROMPT)
    for prompt in ([*PROMPT, *REPLY, 5], PROMPT[:9], [500]):
        pool.abandon(pool.reserve("a", prompt))
    assert run(pool, [*PROMPT, *REPLY, 5]) == (handle, 23)
    assert len(core.open_handles) == 1


def test_a_cancelled_prompt_keeps_what_was_computed(pool):
    reservation = pool.reserve("a", PROMPT)
    pool.begin(reservation)
    pool.finish(reservation, (), 12)
    again = pool.reserve("a", PROMPT)
    assert (again.extends, again.prefix, again.held) == (True, 20, 12)


def test_a_failed_request_keeps_only_what_it_did_not_change(pool):
    run(pool, PROMPT)
    reservation = pool.reserve("a", [*PROMPT, *REPLY, 5])
    pool.begin(reservation)
    pool.abandon(reservation)
    again = pool.reserve("a", [*PROMPT, *REPLY, 5])
    assert (again.prefix, again.held) == (23, 22)


def test_a_lost_handle_is_forgotten(pool, core):
    run(pool, PROMPT)
    reservation = pool.reserve("a", [*PROMPT, *REPLY, 5])
    lost, _ = pool.begin(reservation)
    pool.lost(reservation)
    handle, prefix = pool.begin(reservation)
    assert handle is not lost
    assert prefix == 0
    pool.finish(reservation, [8], 24)
    assert core.open_handles == [handle]


def test_a_handle_lost_with_its_fork_is_forgotten_too(pool, core):
    run(pool, PROMPT)
    reservation = pool.reserve("a", PROMPT[:9])
    pool.begin(reservation)
    pool.lost(reservation)
    assert len(pool) == 0
    assert core.open_handles == []


def test_owners_have_handles_of_their_own(pool):
    run(pool, PROMPT, owner="a")
    assert pool.reserve("b", PROMPT).source is None


def test_tokens_are_bounded_and_handles_in_use_stay(pool, core):
    run(pool, PROMPT)
    used = pool.reserve("a", [*PROMPT, *REPLY, 5])
    for i in range(60):
        run(pool, [1000 + i] * 50, owner="b")
    assert len(core.open_handles) < 25
    handle, prefix = pool.begin(used)
    assert prefix == 23
    assert handle in core.open_handles
    pool.finish(used, [1], 24)


def test_a_source_dropped_before_its_fork_begins_is_closed_after_it(pool, core):
    run(pool, PROMPT)
    fork = pool.reserve("a", PROMPT[:9])
    pool.close()
    assert len(core.open_handles) == 1
    pool.begin(fork)
    pool.finish(fork, [1], 9)
    assert core.open_handles == []
    assert len(pool) == 0
