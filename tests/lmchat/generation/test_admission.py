"""The queue in front of the engine: bounded, fair between owners, live turns first."""

import random
import threading
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmchat.errors import InternalError, Overloaded
from lmchat.generation.admission import LIVE_IN_A_ROW, Admission, Ticket, priority


class Engine:
    """Records who was started, and checks that no one is twice."""

    def __init__(self, capacity, max_queue):
        self.admission = Admission(capacity, max_queue)
        self.started = []
        self.inside = set()

    def ticket(self, owner="o", live=False, cost=1):
        def start():
            assert ticket not in self.started
            self.started.append(ticket)
            self.inside.add(ticket)
            assert len(self.inside) <= self.admission.capacity

        ticket = Ticket(owner, live, cost, start)
        return ticket

    def enter(self, *args, **named):
        ticket = self.ticket(*args, **named)
        self.admission.enter(ticket)
        return ticket

    def leave(self, ticket):
        self.inside.discard(ticket)
        self.admission.leave(ticket)

    def serve_next(self):
        """Frees the oldest place and returns who got it."""
        before = len(self.started)
        self.leave(next(t for t in self.started if t in self.inside))
        return self.started[before] if len(self.started) > before else None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_arrivals_keep_the_limits_of_the_queue(data):
    capacity, max_queue = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    engine = Engine(capacity, max_queue)
    admission = engine.admission
    waiting, gone = [], set()
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["enter", "enter", "leave", "withdraw", "fail"]))
        if action == "enter":
            ticket = engine.ticket(
                data.draw(st.sampled_from("abc")),
                data.draw(st.booleans()),
                data.draw(st.integers(0, 9)),
            )
            full = len(engine.inside) == capacity and len(waiting) == max_queue
            if full:
                with pytest.raises(
                    Overloaded, match=f"max_queue={max_queue}.* {capacity} are running"
                ):
                    admission.enter(ticket)
                gone.add(ticket)
            else:
                admission.enter(ticket)
                waiting.append(ticket)
        elif action == "leave" and engine.inside:
            engine.leave(
                data.draw(st.sampled_from(sorted(engine.inside, key=engine.started.index)))
            )
        elif action == "withdraw" and engine.started:
            assert not admission.withdraw(data.draw(st.sampled_from(engine.started)))
        elif waiting and action in ("withdraw", "fail"):
            ticket = data.draw(st.sampled_from(waiting))
            if action == "withdraw":
                assert admission.withdraw(ticket)
            admission.leave(ticket)
            gone.add(ticket)
        waiting = [t for t in waiting if t not in engine.started and t not in gone]
        assert admission.running == len(engine.inside)
        assert admission.waiting == len(waiting)
        assert not waiting or len(engine.inside) == capacity
    assert gone.isdisjoint(engine.started)
    while engine.inside:
        engine.serve_next()
    assert set(waiting) <= set(engine.started)
    assert admission.waiting == admission.running == 0
    assert admission.admitted == len(engine.started)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_owners_share_by_tokens(data):
    """While all wait, no owner is served more than another by over two of its tickets."""
    engine = Engine(data.draw(st.integers(1, 3)), 1000)
    live = data.draw(st.booleans())
    biggest = {o: data.draw(st.integers(1, 50)) for o in "abc"}
    left = []
    for owner in "abc":
        left += [
            engine.ticket(owner, live, data.draw(st.integers(1, biggest[owner]))) for _ in range(30)
        ]
    data.draw(st.randoms(use_true_random=False)).shuffle(left)
    first = engine.enter("z", live, 5)  # so that all wait before the race begins
    blockers = [engine.enter("z", live, 5) for _ in range(engine.admission.capacity - 1)]
    for ticket in left:
        engine.admission.enter(ticket)
    for ticket in [first, *blockers]:
        engine.leave(ticket)
    waiting = Counter(t.owner for t in left if t not in engine.started)
    while min(waiting[o] for o in "abc"):
        engine.serve_next()
        waiting = Counter(t.owner for t in left if t not in engine.started)
        served = Counter()
        for ticket in engine.started:
            served[ticket.owner] += ticket.cost
        for one in "abc":
            for other in "abc":
                assert served[one] - served[other] <= biggest[one] + biggest[other]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_owners_tickets_of_one_kind_are_served_in_their_order(data):
    engine = Engine(1, 1000)
    entered = defaultdict(list)
    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.integers(0, 2)):
            owner, live = data.draw(st.sampled_from("ab")), data.draw(st.booleans())
            entered[owner, live].append(engine.enter(owner, live, data.draw(st.integers(1, 20))))
        elif engine.inside:
            engine.serve_next()
    while engine.inside:
        engine.serve_next()
    for (owner, live), tickets in entered.items():
        assert [t for t in engine.started if (t.owner, t.live) == (owner, live)] == tickets


def test_one_owner_cannot_fill_the_line_before_another():
    engine = Engine(1, 100)
    engine.enter("greedy", cost=10)
    for _ in range(20):
        engine.enter("greedy", cost=10)
    small = engine.enter("small", cost=10)
    assert small in [engine.serve_next(), engine.serve_next()]


def test_an_idle_owner_saves_nothing_up():
    engine = Engine(1, 100)
    engine.enter("busy", cost=10)
    for _ in range(50):
        engine.enter("busy", cost=10)
        engine.serve_next()
    for _ in range(10):
        engine.enter("idle", cost=10)
        engine.enter("busy", cost=10)
    order = [engine.serve_next().owner for _ in range(12)]
    assert abs(order.count("idle") - order.count("busy")) <= 2


def test_live_turns_pass_but_not_for_ever():
    engine = Engine(1, 100)
    engine.enter()
    stranger = engine.enter("stranger", cost=6000)
    for _ in range(LIVE_IN_A_ROW + 5):
        engine.enter("chatty", live=True)
    served = [engine.serve_next() for _ in range(LIVE_IN_A_ROW + 3)]
    assert served.index(stranger) == LIVE_IN_A_ROW
    assert [priority(t) for t in served[:2]] == [0, 0]
    assert priority(stranger) == 1


def test_what_is_withdrawn_costs_its_owner_nothing():
    engine = Engine(1, 100)
    engine.enter("z")
    big = engine.enter("a", cost=1000)
    assert engine.admission.withdraw(big)
    assert not engine.admission.withdraw(big)
    other = engine.enter("b", cost=5)
    mine = engine.enter("a", cost=5)
    assert [engine.serve_next(), engine.serve_next()] == [other, mine]
    engine.leave(big)
    assert engine.admission.running == 1


def test_a_ticket_enters_once():
    engine = Engine(1, 5)
    for ticket in (engine.enter(), engine.enter()):
        with pytest.raises(InternalError, match="once"):
            engine.admission.enter(ticket)


def test_a_start_that_fails_frees_its_place():
    admission = Admission(1, 10)
    errors, started = [], []

    def broken():
        raise ValueError("no")

    first = Ticket("a", False, 1, lambda: started.append("first"))
    admission.enter(first)
    admission.enter(Ticket("a", False, 1, broken, errors.append))
    admission.enter(Ticket("a", False, 1, lambda: started.append("last")))
    admission.leave(first)
    assert started == ["first", "last"]
    assert [str(error) for error in errors] == ["no"]
    assert (admission.running, admission.waiting) == (1, 0)


def test_an_error_no_one_asked_for_is_logged(caplog):
    Admission(1, 0).enter(Ticket("a", False, 1, lambda: 1 / 0))
    assert "could not be started" in caplog.text


def test_an_interrupt_is_raised_after_the_others_have_started():
    admission = Admission(2, 10)
    started, errors = [], []

    def interrupted():
        raise KeyboardInterrupt

    places = [Ticket("a", False, 1, lambda: None) for _ in range(2)]
    for ticket in places:
        admission.enter(ticket)
    admission.enter(Ticket("a", False, 1, interrupted, errors.append))
    admission.enter(Ticket("a", False, 1, lambda: started.append(1)))
    with pytest.raises(KeyboardInterrupt):
        admission.leave(places[0])
    assert (started, len(errors), admission.running) == ([1], 1, 2)


def test_no_one_is_left_behind_when_the_report_of_a_failure_fails():
    admission = Admission(2, 10)
    started = []

    def broken(error):
        raise RuntimeError("worse") from error

    places = [Ticket("a", False, 1, lambda: None) for _ in range(2)]
    for ticket in places:
        admission.enter(ticket)
    admission.enter(Ticket("a", False, 1, lambda: 1 / 0, broken))
    admission.enter(Ticket("a", False, 1, lambda: started.append(1)))
    with pytest.raises(RuntimeError, match="worse"):
        admission.leave(places[0])
    assert (started, admission.running) == ([1], 2)


def test_a_thousand_that_end_at_once_do_not_nest():
    """A start may leave again on the spot, as a cancelled request does."""
    admission = Admission(1, 2000)
    first = Ticket("a", False, 1, lambda: None)
    admission.enter(first)
    ended, errors = [], []

    def add():
        def start():
            ended.append(ticket)
            admission.leave(ticket)

        ticket = Ticket("a", False, 1, start, errors.append)
        admission.enter(ticket)

    for _ in range(2000):
        add()
    admission.leave(first)
    assert len(ended) == 2000
    assert not errors
    assert (admission.running, admission.waiting) == (0, 0)


def test_what_ran_long_ago_does_not_count():
    engine = Engine(2, 100)
    engine.enter("keeps the engine busy")
    engine.leave(engine.enter("a", cost=6000))
    blocker = engine.enter("z")
    mine, other = engine.enter("a", cost=5), engine.enter("b", cost=5)
    engine.leave(blocker)
    engine.leave(mine)
    assert engine.started[-2:] == [mine, other]


def test_what_runs_now_counts():
    engine = Engine(1, 100)
    running = engine.enter("a", cost=6000)
    mine = engine.enter("a", cost=5)
    others = [engine.enter("b", cost=5) for _ in range(2)]
    for ticket in (running, *others):
        engine.leave(ticket)
    assert engine.started == [running, *others, mine]


@pytest.mark.parametrize("backlog", [0, 5])
def test_the_memory_of_owners_is_bounded(backlog):
    engine = Engine(1, 10)
    for _ in range(backlog):
        engine.enter("first")
    for number in range(5000):
        engine.enter(f"owner {number}", cost=number)
        engine.serve_next()
    lane = engine.admission._others
    assert len(lane._ends) < 1500
    assert len(lane._queues) == len(lane._starts) <= backlog


def test_many_threads_never_exceed_the_slots():
    admission = Admission(3, 50)
    lock = threading.Lock()
    inside, counts, refused = set(), Counter(), []
    ended = threading.Semaphore(0)

    def start(ticket):
        with lock:
            counts[ticket] += 1
            inside.add(ticket)
            assert len(inside) <= 3
        threading.Thread(target=finish, args=(ticket,)).start()

    def finish(ticket):
        with lock:
            inside.discard(ticket)
        admission.leave(ticket)
        ended.release()

    def client(seed):
        rng = random.Random(seed)
        for _ in range(40):
            ticket = Ticket(str(seed % 3), rng.random() < 0.5, rng.randrange(100), lambda: None)
            ticket.start = lambda ticket=ticket: start(ticket)
            try:
                admission.enter(ticket)
            except Overloaded:
                refused.append(ticket)
                ended.release()
                continue
            if rng.random() < 0.2 and admission.withdraw(ticket):
                refused.append(ticket)
                ended.release()

    clients = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    for _ in range(8 * 40):
        assert ended.acquire(timeout=60)
    assert set(counts.values()) == {1}
    assert len(counts) + len(refused) == 8 * 40
    assert not set(counts) & set(refused)
    assert (admission.running, admission.waiting) == (0, 0)
    assert admission.admitted == len(counts)


def test_who_works_in_idle_time_hears_of_it():
    """Before anything begins, and once nothing runs or waits."""
    events = []
    admission = Admission(1, 1, lambda: events.append("busy"), lambda: events.append("idle"))
    one, two = (Ticket("o", False, 1, lambda: events.append("start")) for _ in range(2))
    admission.enter(one)
    assert events == ["busy", "start"]
    admission.enter(two)
    with pytest.raises(Overloaded):
        admission.enter(Ticket("o", False, 1, lambda: None))
    assert not admission.is_idle
    admission.leave(one)
    assert events == ["busy", "start", "busy", "start"]
    assert not admission.is_idle
    admission.leave(two)
    assert events[4:] == ["idle"]
    assert admission.is_idle
