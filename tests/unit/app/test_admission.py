"""How much may wait, and when those who are refused are told to come back."""

import heapq
import random
import statistics

import attrs
import pytest
from bge_m3_server.app.admission import Admission, guessed_tokens, size_bytes
from bge_m3_server.app.service import ModelInfo
from bge_m3_server.domain.errors import QueueFullError
from bge_m3_server.domain.types import Heads

SPEED = 5000.0


@attrs.define
class Time:
    """A clock that stands still until it is set."""

    now: float = 0.0

    def __call__(self):
        return self.now


def refusal(admission, needed_tokens, waiting_tokens, tokens_per_second):
    with pytest.raises(QueueFullError) as caught:
        admission.require_tokens(needed_tokens, waiting_tokens, tokens_per_second)
    return caught.value.retry_after_seconds


@pytest.mark.parametrize(
    ("tokens_per_second", "seconds"), [(100.0, 0.5), (None, 1.0), (0.001, 50.0), (1e6, 0.1)]
)
def test_the_time_to_come_back_follows_from_the_drain_rate(tokens_per_second, seconds):
    """The excess over the speed; a second where nobody knows, neither too soon nor too late."""
    admission = Admission(1000, 1, Time(), chance=lambda: 0.0)

    assert refusal(admission, 150, 900, tokens_per_second) == pytest.approx(seconds)


@pytest.mark.parametrize("tokens_per_second", [100.0, None, 0.001, 1e6])
def test_jitter_makes_the_wait_longer_up_to_a_minute(tokens_per_second):
    """Clients that are refused together do not come back together; none comes in vain."""
    waits = [
        refusal(Admission(1000, 1, Time(), chance=lambda at=at: at), 150, 900, tokens_per_second)
        for at in (0.0, 0.5, 1.0)
    ]

    assert waits == sorted(set(waits))
    assert waits[-1] == pytest.approx(1.2 * waits[0])
    assert waits[-1] <= 60


def test_who_was_refused_first_comes_back_first():
    """Refused work counts as waiting until the time that it was told has passed."""
    time = Time()
    admission = Admission(1000, 1, time, chance=lambda: 0.0)
    waits = [refusal(admission, 500, 1000, 1000.0) for _ in range(3)]
    time.now = 1.0

    assert waits == pytest.approx([0.5, 1.0, 1.5])
    assert refusal(admission, 500, 1000, 1000.0) == pytest.approx(1.0)
    time.now = 100.0
    assert refusal(admission, 500, 1000, 1000.0) == pytest.approx(0.5)


def test_a_full_queue_counts_also_what_was_not_tokenised():
    """A request that is refused before its texts are read is guessed from its characters."""
    admission = Admission(1000, 10**6, Time(), chance=lambda: 0.0)
    model = ModelInfo("m", Heads.DENSE, dimensions=1024, max_tokens=202)
    tokens = guessed_tokens(["word " * 120], model)
    waits = []
    for _ in range(2):
        with pytest.raises(QueueFullError) as caught, admission.arriving(tokens, 1000, 1000.0):
            pass
        waits.append(caught.value.retry_after_seconds)

    assert tokens == 202 == guessed_tokens(["word " * 500], model)
    assert waits == pytest.approx([0.202, 0.404])


def test_no_refusal_says_that_more_is_taken_than_there_is():
    """What is still being tokenised is a guess, and told apart from what waits."""
    admission = Admission(3000, 500, Time(), chance=lambda: 0.0)
    refused = pytest.raises(QueueFullError)
    with admission.hold(400, 0, 0, None), admission.arriving(2696, 0, None):
        with refused as by_guess, admission.arriving(10, 2414, None):
            pass
        with refused as by_bytes, admission.hold(101, 10, 2414, None):
            pass
        with refused as by_tokens:
            admission.require_tokens(587, 2414, None)

    def told(caught):
        return (
            str(caught.value).removeprefix("the queue is full: ").removesuffix("; retry in 1.000 s")
        )

    assert told(by_guess) == (
        "2414 of 3000 tokens are taken, about 2696 more are arriving, and this request has about 10"
    )
    assert told(by_bytes) == "400 of 500 bytes are taken, and this request needs 101"
    assert told(by_tokens) == "2414 of 3000 tokens are taken, and this request has 587"


@pytest.mark.parametrize("needed_tokens", [300, 1000, 1900])
@pytest.mark.parametrize("believed_speed", [0.7, 1.0, 1.3])
def test_few_tries_suffice_when_many_come_at_once(needed_tokens, believed_speed):
    """Of 40 clients at a queue of 2000 tokens most get in at the second try, soon enough.

    That holds also where the speed is believed to be higher or lower than it is.
    """
    tries, seconds = rush(40, needed_tokens, 2000, believed_speed)

    assert statistics.median(tries) <= 3
    assert max(tries) <= 12
    assert seconds <= 2.5 * 40 * needed_tokens / SPEED


def rush(clients, needed_tokens, limit_tokens, believed_speed):
    """Tries of each client until it was let in, and when the last one was."""
    time, chance = Time(), random.Random(1)
    admission = Admission(limit_tokens, 1, time, chance.random)
    tries, waiting_tokens = [0] * clients, 0.0
    coming = [(0.0, client) for client in range(clients)]
    while coming:
        then, client = heapq.heappop(coming)
        waiting_tokens = max(waiting_tokens - (then - time.now) * SPEED, 0.0)
        time.now = then
        tries[client] += 1
        try:
            admission.require_tokens(needed_tokens, waiting_tokens, believed_speed * SPEED)
        except QueueFullError as error:
            heapq.heappush(coming, (then + error.retry_after_seconds, client))
        else:
            waiting_tokens += needed_tokens
    return tries, time.now


def test_multi_vectors_weigh_more_than_dense_ones():
    """What a request holds depends on what it asks for."""
    model = ModelInfo("m", Heads.DENSE | Heads.COLBERT, dimensions=1024, max_tokens=8192)
    dense = size_bytes(["x" * 1000], Heads.DENSE, model)

    assert 4096 < dense < 20_000
    assert size_bytes(["x" * 1000], Heads.COLBERT, model) > 1000 * 4096
