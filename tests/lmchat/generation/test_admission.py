"""The queue in front of the engine: bounded, fair between owners, live turns first."""

import random
import threading
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmchat.errors import InternalError, Overloaded
from lmchat.generation.admission import LIVE_IN_A_ROW, Admission
from lmchat.generation.ticket import LIVE, ORDINARY, PAUSED, Ticket


class Engine:
    """Records which tickets were started and refused, and checks that none is twice."""

    def __init__(self, capacity, max_queue, **options):
        self.admission = Admission(capacity, max_queue, **options)
        self.started = []
        self.inside = set()
        self.refused = []

    def ticket(self, owner="o", live=False, cost=1, choices=1):
        def start():
            assert ticket not in self.started
            assert ticket not in self.refused
            self.started.append(ticket)
            self.inside.add(ticket)

        def refused(error):
            assert ticket not in self.started
            assert error.retry_after > 0
            self.refused.append(ticket)

        ticket = Ticket(owner, live, cost, start, refused=refused, choices=choices)
        return ticket

    def enter(self, *args, **named):
        ticket = self.ticket(*args, **named)
        self.admission.enter(ticket)
        return ticket

    def leave(self, ticket):
        self.inside.discard(ticket)
        self.admission.leave(ticket)

    def slots(self):
        """Returns the slots that are held, by owner."""
        held = Counter()
        for ticket in self.inside:
            if ticket.priority != PAUSED:
                held[ticket.owner] += ticket.slots
        return held

    def serve_next(self):
        """Frees the oldest place and returns who got it."""
        before = len(self.started)
        self.leave(next(t for t in self.started if t in self.inside))
        return self.started[before] if len(self.started) > before else None


class Reference:
    """Which requests an engine must refuse, by lists alone."""

    def __init__(self, capacity, max_queue):
        self.capacity, self.max_queue = capacity, max_queue

    def check(self, engine, waiting):
        """Checks the shares of slots and the bounds of the queue."""
        slots = engine.slots()
        paused = Counter(t.owner for t in engine.inside if t.priority == PAUSED)
        wanting = paused + Counter(t.owner for t in waiting)
        assert slots.total() <= self.capacity
        assert not wanting or slots.total() == self.capacity
        for one in wanting:
            for other, count in slots.items():
                assert count <= slots[one] + 1, (one, other, slots)
        assert len(waiting) <= self.max_queue

    def refuses(self, engine, waiting, owner, live):
        """Returns whether a request of the owner is refused, and which ones may be refused in its
        place (at least one of the two is None)."""
        slots, inside = engine.slots(), Counter(t.owner for t in engine.inside)
        paused = any(t.owner == owner and t.priority == PAUSED for t in engine.inside)
        wants = paused or any(t.owner == owner for t in waiting)
        most = max(slots.values(), default=0)
        if not wants and (slots.total() < self.capacity or most > slots[owner] + 1):
            return False, None
        ahead = any(t.owner == owner and t.live for t in waiting) or any(
            t.owner == owner and t.live and t.priority == PAUSED for t in engine.inside
        )
        if live and not ahead and engine.admission._displaced(owner) is not None:
            return False, None  # it takes that one's slot
        if len(waiting) < self.max_queue:
            return False, None
        places = inside + Counter(t.owner for t in waiting)
        above = max((places[t.owner] for t in waiting), default=0)
        if above <= places[owner] + 1:
            return True, None
        return False, {
            ([t for t in waiting if t.owner == o and not t.live]
             or [t for t in waiting if t.owner == o])[-1]
            for o in places
            if places[o] == above and any(t.owner == o for t in waiting)
        }  # fmt: skip


def test_a_live_turn_behind_a_paused_one_of_its_owner_counts_towards_the_queue():
    """The slot that it displaces another from goes to the paused turn."""
    engine = Engine(4, max_queue=0)
    for owner, live in (("b", True), ("b", True), ("a", False), ("a", False), ("c", False)):
        engine.enter(owner, live)
    assert [t.owner for t in engine.inside if t.priority == PAUSED] == ["b"]
    with pytest.raises(Overloaded, match="max_queue=0"):
        engine.enter("b", live=True)
    assert engine.admission.waiting == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_arrivals_keep_shares_and_bounds(data):
    """Any sequence of arrivals, ends and withdrawals gives what the reference gives."""
    capacity, max_queue = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    engine, reference = Engine(capacity, max_queue), Reference(capacity, max_queue)
    admission, waiting = engine.admission, []
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["enter", "enter", "leave", "withdraw", "charge"]))
        if action == "enter":
            owner, live = data.draw(st.sampled_from("aaabc")), data.draw(st.booleans())
            refused, others = reference.refuses(engine, waiting, owner, live)
            ticket = engine.ticket(owner, live, data.draw(st.integers(0, 9)))
            if refused:
                with pytest.raises(Overloaded, match=f"max_queue={max_queue}; .* are running"):
                    admission.check(owner, live=live)
                with pytest.raises(Overloaded):
                    admission.enter(ticket)
                assert not admission.withdraw(ticket)
            else:
                before = len(engine.refused)
                admission.check(owner, live=live)
                if data.draw(st.booleans()):
                    admission.reserve(ticket)
                admission.enter(ticket)
                waiting.append(ticket)
                gone = engine.refused[before:]
                assert len(gone) == (others is not None)
                assert not gone or gone[0] in others
        elif action == "leave" and engine.inside:
            engine.leave(
                data.draw(st.sampled_from(sorted(engine.inside, key=engine.started.index)))
            )
        elif action == "charge" and engine.inside:
            ticket = data.draw(st.sampled_from(sorted(engine.inside, key=engine.started.index)))
            admission.charge(ticket, data.draw(st.integers(1, 20)), 1.0)
        elif action == "withdraw" and waiting:
            ticket = data.draw(st.sampled_from(waiting))
            assert admission.withdraw(ticket)
            assert not admission.withdraw(ticket)
            admission.leave(ticket)
            waiting.remove(ticket)
        waiting = [t for t in waiting if t not in engine.started and t not in engine.refused]
        assert admission.running == len(engine.inside)
        assert admission.waiting == len(waiting)
        reference.check(engine, waiting)
    while engine.inside:
        engine.serve_next()
    assert set(waiting) <= set(engine.started)
    assert admission.waiting == admission.running == 0
    assert admission.admitted == len(engine.started)
    assert admission.is_idle


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_owners_share_by_tokens(data):
    """While all wait, no owner is served more than another by over two of its tickets."""
    engine = Engine(1, 1000)
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
    """On a single slot the one that lost it continues after some live turns."""
    engine = Engine(1, 100)
    stranger = engine.enter("stranger", cost=6000)
    changes = []
    stranger.reprioritize = changes.append
    turns = [engine.enter("chatty", live=True) for _ in range(LIVE_IN_A_ROW + 5)]
    assert (engine.started, changes) == ([stranger, turns[0]], [PAUSED])
    for turn in turns[:LIVE_IN_A_ROW]:
        assert (turn.priority, changes) == (LIVE, [PAUSED])
        engine.leave(turn)
    assert changes == [PAUSED, ORDINARY]
    assert engine.started == [stranger, *turns[:LIVE_IN_A_ROW]]
    engine.leave(stranger)
    assert engine.started[-1] == turns[LIVE_IN_A_ROW]


def test_a_live_turn_takes_a_slot_of_its_own_owner():
    engine = Engine(4, 4)
    replies = [engine.enter() for _ in range(6)]
    turns = [engine.enter(live=True) for _ in range(5)]
    assert engine.started == [*replies[:4], *turns[:3]]
    assert [t.priority for t in replies[:4]] == [ORDINARY, PAUSED, PAUSED, PAUSED]
    assert engine.admission.stats().preempted_for_live == 3
    assert engine.admission.stats().waiting_live == 2
    for live in (False, True):  # the queue is full
        with pytest.raises(Overloaded, match="4 requests are waiting"):
            engine.enter(live=live)


def test_a_live_turn_needs_no_place_in_a_full_queue_if_it_gets_a_slot():
    engine = Engine(4, 2)
    for _ in range(6):
        engine.enter()
    turns = [engine.enter(live=True) for _ in range(3)]
    assert engine.started[-3:] == turns
    with pytest.raises(Overloaded):
        engine.enter(live=True)


def test_queued_live_turns_of_a_large_owner_give_way():
    engine = Engine(2, 4)
    queued = [engine.enter("large", live=True) for _ in range(6)][2:]
    small = [engine.enter("small", live=live) for live in (True, False, True)]
    assert engine.started[-1] is small[0]
    assert engine.refused == [queued[3], queued[2]]


def test_an_owner_takes_its_share_of_slots_and_gives_it_back():
    engine = Engine(4, 0)
    greedy = [engine.enter("greedy") for _ in range(4)]
    late = [engine.enter("late"), engine.enter("late", live=True)]
    assert engine.slots() == {"greedy": 2, "late": 2}
    assert [t.priority for t in greedy] == [ORDINARY, ORDINARY, PAUSED, PAUSED]
    with pytest.raises(Overloaded):
        engine.enter("late")
    assert engine.admission.stats().preempted_for_share == 2
    for ticket in late:
        engine.leave(ticket)
    assert [t.priority for t in greedy] == [ORDINARY] * 4
    assert engine.admission.stats().paused == 0


def test_live_turns_of_one_owner_leave_the_share_of_another():
    """However many sessions an owner has, a turn of another owner is started at once."""
    engine = Engine(8, 1000)
    for _ in range(1000):
        engine.enter("many", live=True)
    turns = [engine.enter("few", live=True) for _ in range(4)]
    assert engine.started[-4:] == turns
    assert [t.priority for t in turns] == [LIVE] * 4
    assert engine.slots() == {"many": 4, "few": 4}


def test_generated_tokens_count_while_they_are_produced():
    engine = Engine(1, 10)
    running = engine.enter("talks", cost=10)
    engine.admission.charge(running, 500, 1.0)
    mine = engine.enter("talks", cost=10)
    others = [engine.enter("asks", cost=100) for _ in range(5)]
    for ticket in (running, *others):
        engine.leave(ticket)
    assert engine.started == [running, *others, mine]


def test_a_reservation_is_kept_and_released():
    engine = Engine(1, 1)
    engine.enter()
    first = engine.ticket()
    engine.admission.reserve(first)
    with pytest.raises(Overloaded):
        engine.admission.check("o")
    with pytest.raises(Overloaded):
        engine.enter()
    assert (engine.admission.waiting, engine.admission.is_idle) == (0, False)
    engine.admission.release(first)
    engine.admission.check("o")
    second = engine.enter()
    assert engine.serve_next() is second
    engine.admission.release(second)  # it has entered: nothing happens
    assert engine.admission.running == 1


def test_the_newest_queued_request_of_the_largest_owner_gives_way():
    engine = Engine(1, 3)
    engine.enter("large")
    queued = [engine.enter("large") for _ in range(3)]
    small = engine.enter("small")
    assert engine.refused == [queued[2]]
    engine.leave(queued[2])  # as its generation does when it ends
    assert engine.admission.stats().refused_queued == 1
    assert engine.serve_next() is small


def loaded(max_wait):
    """Returns an engine of two slots whose replies take 10 tokens of a second each."""
    engine = Engine(2, 100, max_wait=max_wait, clock=lambda: 0.0)
    for _ in range(3):
        ticket = engine.enter(cost=1)
        for second in range(1, 11):
            engine.admission.charge(ticket, 1, float(second))
        engine.leave(ticket)
    return engine


def test_the_predicted_wait_bounds_the_queue():
    engine = loaded(max_wait=25)
    for _ in range(6):  # four of them wait: 10, 10, 20 and 20 seconds
        engine.enter()
    with pytest.raises(Overloaded, match="max_wait=25") as caught:
        engine.enter()
    assert caught.value.retry_after == pytest.approx(30 + 1 - 25, abs=2)
    engine.admission.check("another owner")
    engine.admission.check("o", live=True)
    assert engine.enter("another owner") in engine.started


def test_scores_count_towards_the_predicted_wait():
    now = [0.0]
    engine = Engine(1, 100, max_wait=25, clock=lambda: now[0])

    def score(cost, owner="o"):
        ticket = engine.ticket(owner, cost=cost)
        ticket.limit = 0
        engine.admission.enter(ticket)
        return ticket

    first = score(100)
    now[0] = 10.0
    engine.admission.scored(first)
    engine.leave(first)
    running, queued = score(100), score(50)  # 10 and 5 seconds
    engine.admission.check("o")
    last = score(50)
    with pytest.raises(Overloaded, match=r"is expected in 30\.0 seconds, .* max_wait=25"):
        score(100)
    for ticket in (last, queued, running):
        engine.leave(ticket)
    assert score(400) in engine.started  # there is a slot for it


def test_nothing_is_refused_for_its_wait_before_there_are_measurements():
    engine = Engine(1, 100, max_wait=1e-9)
    for _ in range(101):
        engine.enter()
    with pytest.raises(Overloaded, match="max_queue") as caught:
        engine.enter()
    assert caught.value.retry_after > 0


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
    assert len(engine.admission._shares._times) < 1500
    assert len(engine.admission._shares) <= backlog + 1


def test_many_threads_never_exceed_the_slots():
    admission = Admission(3, 50)
    lock = threading.Lock()
    inside, counts, refused = set(), Counter(), []
    ended = threading.Semaphore(0)

    def start(ticket):
        with lock:
            counts[ticket] += 1
            inside.add(ticket)
            with admission._lock:  # else a slot that moves is seen twice
                assert sum(t.priority != PAUSED for t in inside) <= 3
        threading.Thread(target=finish, args=(ticket,)).start()

    def finish(ticket):
        with lock:
            inside.discard(ticket)
        admission.leave(ticket)
        ended.release()

    def refuse(ticket):
        refused.append(ticket)
        ended.release()

    def client(seed):
        rng = random.Random(seed)
        for _ in range(40):
            ticket = Ticket(str(seed % 3), rng.random() < 0.5, rng.randrange(100), lambda: None)
            ticket.start = lambda ticket=ticket: start(ticket)
            ticket.refused = lambda _, ticket=ticket: refuse(ticket)
            try:
                admission.enter(ticket)
            except Overloaded:
                refuse(ticket)
                continue
            if rng.random() < 0.2 and admission.withdraw(ticket):
                refuse(ticket)

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


# --- requests of several choices ----------------------------------------------------------------


def test_each_choice_takes_a_slot_until_it_ends():
    engine = Engine(4, 9)
    wide = engine.enter("a", choices=3)
    one, two = engine.enter("a"), engine.enter("a")
    assert engine.started == [wide, one]
    engine.admission.choice_ended(wide)
    assert engine.started == [wide, one, two]
    engine.admission.choice_ended(wide)  # the last one goes on
    engine.leave(wide)
    assert engine.slots() == {"a": 2}


def test_a_request_of_more_choices_than_slots_takes_all_of_them():
    engine = Engine(2, 9)
    wide, other = engine.enter("a", choices=8), engine.enter("a")
    for _ in range(6):
        engine.admission.choice_ended(wide)
        assert engine.started == [wide]
    engine.admission.choice_ended(wide)
    assert engine.started == [wide, other]


def test_a_request_of_many_choices_is_not_overtaken_for_ever():
    engine = Engine(3, 9)
    running = [engine.enter("a") for _ in range(3)]
    wide = engine.enter("a", choices=3)
    later = engine.enter("a")
    engine.leave(running[0])
    engine.leave(running[1])
    assert engine.started == running
    engine.leave(running[2])
    assert engine.started == [*running, wide]
    engine.leave(wide)
    assert engine.started[-1] is later


def test_a_live_turn_passes_a_request_that_waits_for_many_slots():
    engine = Engine(3, 9)
    running = [engine.enter("a") for _ in range(3)]
    engine.enter("a", choices=3)
    engine.leave(running[0])
    live = engine.enter("b", live=True)
    assert engine.started == [*running, live]
    assert all(ticket.priority != PAUSED for ticket in running)


def test_an_owner_of_many_choices_gives_slots_to_others():
    engine = Engine(8, 9)
    wide = engine.enter("a", choices=8)
    others = [engine.enter("b") for _ in range(6)]
    assert engine.started == [wide, *others[:4]]
    assert wide.priority == PAUSED  # it goes on in the engine, in the slots that are left
    for ticket in others:
        engine.leave(ticket)
    assert engine.started == [wide, *others]
    assert wide.priority == ORDINARY


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_requests_of_several_choices_all_get_their_turn(data):
    """No slot is given twice, none is free that the next ticket could use, and all are served."""
    capacity = data.draw(st.integers(1, 6))
    engine = Engine(capacity, 100)
    entered = []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["enter", "enter", "leave", "withdraw", "choice"]))
        running = sorted(engine.inside, key=engine.started.index)
        if action == "enter":
            choices, live = data.draw(st.integers(1, 8)), data.draw(st.booleans())
            entered.append(engine.enter(data.draw(st.sampled_from("abc")), live, 1, choices))
        elif action == "leave" and running:
            engine.leave(data.draw(st.sampled_from(running)))
        elif action == "choice" and (wide := [t for t in running if t.choices > 1]):
            engine.admission.choice_ended(data.draw(st.sampled_from(wide)))
        elif action == "withdraw":
            waiting = [t for t in entered if t not in engine.started]
            if waiting:
                engine.admission.withdraw(data.draw(st.sampled_from(waiting)))
        held = engine.slots()
        assert held.total() <= capacity
        paused = [t for t in engine.inside if t.priority == PAUSED]
        if engine.admission.waiting or paused:
            assert held
    while engine.inside:
        engine.leave(next(t for t in engine.started if t in engine.inside))
    assert engine.admission.is_idle
    assert (engine.admission.running, engine.admission.waiting) == (0, 0)
