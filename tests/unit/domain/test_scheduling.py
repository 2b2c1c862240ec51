"""The scheduler by simulation: a fake clock, invented requests, workers that are only numbers."""

import tracemalloc
from collections import Counter

import attrs
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.scheduling import Scheduler
from bge_m3_server.domain.testing import FakeClock
from hypothesis import given
from hypothesis import strategies as st

BUDGET = CostModel(1.0, 0.0, 200)
"""Two hundred positions per chunk."""

UNLIMITED = CostModel(0.0, 0.0, 0)

lengths = st.lists(st.integers(2, 300), min_size=1, max_size=30)
requests = st.builds(
    dict,
    lengths=lengths,
    group=st.sampled_from(["dense", "sparse"]),
    deadline=st.none() | st.floats(0, 60),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("advance"), st.floats(0, 5)),
        st.tuples(st.just("take"), st.none() | st.integers(1, 400)),
    ),
    max_size=60,
)


@attrs.define
class Simulation:
    """Every text ends in exactly one of these."""

    clock: FakeClock = attrs.field(factory=FakeClock)
    scheduler: Scheduler = attrs.field(init=False)
    submitted: Counter = attrs.field(factory=Counter)
    groups: dict = attrs.field(factory=dict)
    deadlines: dict = attrs.field(factory=dict)
    taken: Counter = attrs.field(factory=Counter)
    cancelled: set = attrs.field(factory=set)
    expired: set = attrs.field(factory=set)

    def __attrs_post_init__(self):
        self.scheduler = Scheduler(self.clock)

    def submit(self, lengths, group, deadline):
        number = self.scheduler.submit(lengths, group=group, deadline=deadline)
        self.groups[number], self.deadlines[number] = group, deadline
        self.submitted.update((number, index, tokens) for index, tokens in enumerate(lengths))

    def cancel(self, number):
        if number in self.groups:
            self.cancelled.add(number)
        self.scheduler.cancel(number)

    def advance(self, seconds):
        self.clock.advance(seconds)
        self.expired.update(self.scheduler.expire())

    def take(self, max_positions):
        self.expired.update(self.scheduler.expire())
        waiting = self.scheduler.waiting_texts
        chunk = self.scheduler.take(BUDGET, max_positions)
        assert (chunk is None) == (waiting == 0)
        if chunk is None:
            return False
        assert chunk.max_tokens == max(text.tokens for text in chunk.texts)
        assert len({self.groups[text.request] for text in chunk.texts}) == 1
        if len(chunk) > 1:
            assert BUDGET.fits(len(chunk), chunk.max_tokens)
            assert max_positions is None or len(chunk) * chunk.max_tokens <= max_positions
        for text in chunk.texts:
            assert text.request not in self.cancelled
            deadline = self.deadlines[text.request]
            assert deadline is None or deadline > self.clock()
            self.taken[text.request, text.index, text.tokens] += 1
        return True


@given(events)
def test_nothing_is_lost_or_done_twice_and_budgets_hold(events):
    """Every text is taken once, or gone with its cancelled or expired request."""
    simulation = Simulation()
    for name, argument in events:
        if name == "submit":
            simulation.submit(**argument)
        else:
            getattr(simulation, name)(argument)
        scheduler = simulation.scheduler
        assert (scheduler.waiting_texts == 0) == (scheduler.waiting_tokens == 0)
    while simulation.take(None):
        pass

    gone = simulation.cancelled | simulation.expired
    assert set(simulation.taken.values()) <= {1}
    assert simulation.taken.keys() <= simulation.submitted.keys()
    assert all(text[0] in gone for text in simulation.submitted.keys() - simulation.taken.keys())
    assert simulation.scheduler.waiting_tokens == 0


@given(events)
def test_the_same_events_give_the_same_chunks(events):
    """No choice depends on chance."""

    def run():
        simulation, chunks = Simulation(), []
        for name, argument in events:
            if name == "submit":
                simulation.submit(**argument)
            elif name == "take":
                chunks.append(simulation.scheduler.take(BUDGET, argument))
            else:
                getattr(simulation, name)(argument)
        return chunks

    assert run() == run()


@given(st.lists(lengths, min_size=1, max_size=8))
def test_rows_of_a_chunk_have_nearly_the_same_length(requests):
    """Padding stays within a quarter and a few tokens."""
    scheduler = Scheduler(FakeClock())
    for request in requests:
        scheduler.submit(request)
    while chunk := scheduler.take(BUDGET):
        shortest = min(text.tokens for text in chunk.texts)
        assert chunk.max_tokens <= shortest * 1.25 + 16


@given(
    bulk=st.lists(st.integers(100, 300), min_size=50, max_size=200),
    rounds=st.integers(0, 100),
    interactive=st.integers(2, 60),
)
def test_a_short_request_is_not_starved_by_bulk(bulk, rounds, interactive):
    """Whenever it comes, it is in one of the next two chunks."""
    clock = FakeClock()
    scheduler = Scheduler(clock)
    scheduler.submit(bulk)
    for _ in range(rounds):
        scheduler.take(BUDGET)
        clock.advance(1)
    number = scheduler.submit([interactive])
    soon = filter(None, [scheduler.take(BUDGET), scheduler.take(BUDGET)])

    assert number in {text.request for chunk in soon for text in chunk.texts}


@given(bulk=st.lists(st.integers(2, 300), min_size=1, max_size=40), rivals=st.integers(1, 4))
def test_bulk_progresses_under_an_endless_stream_of_short_requests(bulk, rivals):
    """Where others keep up, it is served at least once per aging time and two chunks."""
    clock = FakeClock()
    scheduler = Scheduler(clock, aging_seconds=2.0)
    number = scheduler.submit(bulk)
    served_at, left = 0.0, len(bulk)
    while left:
        for _ in range(rivals):
            scheduler.submit([2])
        chunk = scheduler.take(BUDGET)
        of_bulk = sum(text.request == number for text in chunk.texts)
        left -= of_bulk
        served_at = clock() if of_bulk else served_at
        assert clock() - served_at <= 2.0 + 2 * 0.5
        clock.advance(0.5)


@given(st.lists(st.integers(2, 300), min_size=1, max_size=20))
def test_nobody_starves_under_overload(lengths):
    """When work arrives faster than it is done, a request waits for older ones only."""
    clock = FakeClock()
    scheduler = Scheduler(clock, aging_seconds=2.0)
    for _ in range(10):
        scheduler.submit([300, 300])
    number, chunks = scheduler.submit(lengths), 0
    while not (chunk := scheduler.take(BUDGET)) or number not in {t.request for t in chunk.texts}:
        scheduler.submit([2])
        scheduler.submit([300])
        clock.advance(0.5)
        chunks += 1

    assert chunks <= 4 + 2 * 10 + 1


def test_bulk_has_its_share_without_any_help_of_age():
    """Tokens count, not arrivals: newcomers are not always first."""
    scheduler = Scheduler(FakeClock(), aging_seconds=float("inf"))
    number = scheduler.submit([30] * 20)
    led = 0
    for _ in range(40):
        scheduler.submit([100])
        scheduler.submit([100])
        led += scheduler.take(BUDGET).texts[0].request == number

    assert led >= 4


def test_a_long_request_alone_fills_its_chunks():
    """Where nobody else waits, only the budget counts."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([100] * 100)

    chunks = [scheduler.take(CostModel(1.0, 0.0, 2500)) for _ in range(4)]
    assert [len(chunk) for chunk in chunks] == [25] * 4


def test_texts_beyond_the_share_only_top_up():
    """A short request is not held up by a chunk full of a long one's texts."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([100] * 100)
    short = scheduler.submit([90])
    chunk = scheduler.take(UNLIMITED, top_up_positions=500)

    assert short in {text.request for text in chunk.texts}
    assert len(chunk) == 5


def test_a_passed_deadline_needs_nobody_to_look():
    """A worker never gets a text for which nobody waits any more."""
    clock = FakeClock()
    scheduler = Scheduler(clock)
    scheduler.submit([10], deadline=5.0)
    clock.advance(5)

    assert scheduler.take(BUDGET) is None
    assert scheduler.waiting_tokens == 0


def test_two_long_requests_share_by_tokens():
    """One of short texts and one of long texts progress at the same rate in tokens."""
    clock = FakeClock()
    scheduler = Scheduler(clock)
    short, long = scheduler.submit([50] * 200), scheduler.submit([200] * 50)
    served = Counter()
    for _ in range(40):
        for text in scheduler.take(BUDGET).texts:
            served[text.request] += text.tokens

    assert abs(served[short] - served[long]) <= 400


def test_requests_share_a_chunk():
    """Texts of different requests fill one forward pass."""
    scheduler = Scheduler(FakeClock())
    numbers = {scheduler.submit([10]) for _ in range(5)}

    assert {text.request for text in scheduler.take(BUDGET).texts} == numbers
    assert scheduler.take(BUDGET) is None


def test_urgent_texts_go_before_everything():
    """Neither tags nor age come before a health check, and it runs alone in its group."""
    clock = FakeClock()
    scheduler = Scheduler(clock)
    scheduler.submit([2] * 10)
    clock.advance(100)
    urgent = scheduler.submit([8], group="canary", urgent=True)

    assert [text.request for text in scheduler.take(BUDGET).texts] == [urgent]


def test_a_text_that_fits_nowhere_runs_alone():
    """Nothing is dropped for being long."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([5000, 5000])

    assert [len(scheduler.take(BUDGET)) for _ in range(2)] == [1, 1]


def test_an_empty_request_leaves_nothing_behind():
    """No texts, no waiting."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([])

    assert scheduler.take(BUDGET) is None


def test_served_requests_leave_no_deadlines_behind():
    """A server with far deadlines does not grow with every request that it answers."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([5], deadline=1e9)

    def serve(count):
        for _ in range(count):
            number = scheduler.submit([2], deadline=1e9)
            scheduler.cancel(number)

    serve(200)  # the lists have their size
    tracemalloc.start()
    try:
        serve(5000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 100 * 200


def test_deadlines_still_hold_after_many_served_requests():
    """Only entries of requests that are gone are forgotten."""
    clock = FakeClock()
    scheduler = Scheduler(clock)
    numbers = [scheduler.submit([10], deadline=10.0 + number) for number in range(3)]
    for _ in range(500):
        scheduler.cancel(scheduler.submit([5], deadline=5.0))
    clock.advance(11.5)

    assert scheduler.expire() == numbers[:2]
    assert scheduler.waiting_texts == 1


def test_urgent_texts_are_told():
    """Whoever may begin nothing else can see that one waits."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit([5])
    assert not scheduler.has_urgent
    urgent = scheduler.submit([5], urgent=True)
    assert scheduler.has_urgent
    scheduler.cancel(urgent)
    assert not scheduler.has_urgent


def test_cancelling_a_request_leaves_others_alone():
    """Only its own waiting texts go, and only once."""
    scheduler = Scheduler(FakeClock())
    kept, gone = scheduler.submit([10]), scheduler.submit([10, 10])

    assert scheduler.cancel(gone) == 2
    assert scheduler.cancel(gone) == 0
    assert (scheduler.waiting_texts, scheduler.waiting_tokens) == (1, 10)
    assert [text.request for text in scheduler.take(BUDGET).texts] == [kept]
