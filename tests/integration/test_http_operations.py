"""Overload, deadlines and the state of the server as HTTP shows them."""

import attrs
import pytest
from bge_m3_server.app.service import CanaryReport, QueueStatus
from bge_m3_server.domain.errors import (
    DeadlineExceededError,
    InferenceError,
    NotReadyError,
    NoWorkersError,
    QueueFullError,
    RequestTooLargeError,
)

from tests.support.fake_service import FAIL, IDLE, LOADING, OK, WARN

pytest_plugins = ["tests.support.http_fixtures"]

QUEUE = QueueStatus(
    waiting_texts=3, waiting_tokens=540, limit_tokens=1000, held_bytes=7, limit_bytes=9
)
DRAINING = attrs.evolve(OK, draining=True)
BROKEN = attrs.evolve(IDLE, failure="the model failed on a harmless text and is being loaded again")
LATE = attrs.evolve(IDLE, delay="the model is being loaded again, for 4 s so far")


def embed(http, **headers):
    return http.post("/v1/embeddings", json={"input": "a"}, headers=headers)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(http, service):
    """Whole seconds for every client, milliseconds for OpenAI's."""
    service.failure = QueueFullError("the queue is full", retry_after_seconds=1.2345)
    answer = embed(http)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1235")


def test_a_request_that_can_never_fit_is_a_413(http, service):
    """The figures reach the caller."""
    service.failure = RequestTooLargeError("needs 12 tokens", param="input")
    answer = embed(http)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "needs 12 tokens"
    assert answer.json()["error"]["param"] == "input"


def test_a_passed_deadline_is_a_504(http, service):
    """The client is told not to ask again for the same."""
    service.failure = DeadlineExceededError("not finished within 2 s")
    answer = embed(http)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert answer.headers["x-should-retry"] == "false"


def test_a_text_that_breaks_the_engine_is_named(http, service):
    """Its place is told, the engine's words are not, and a client does not send it again."""
    service.failure = InferenceError("input[3]: kernel /secret/path", index=3)
    answer = embed(http)
    assert answer.status_code == 500
    assert "input[3]" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert answer.headers["x-should-retry"] == "false"


def test_the_clients_deadline_reaches_the_engine(http, service):
    """Milliseconds in the header; without it, the server decides."""
    embed(http, **{"x-request-timeout-ms": "1500"})
    embed(http)
    assert service.timeouts == [1.5, None]


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "٣", "9" * 5000])
def test_a_deadline_that_makes_no_sense_is_a_400(http, service, value):
    """Nothing is guessed."""
    answer = embed(http, **{"x-request-timeout-ms": value.encode()})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout-ms"
    assert service.calls == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (OK, None),
        (WARN, None),
        (IDLE, None),
        (LOADING, "the model is loading"),
        (DRAINING, "the server is stopping"),
        (FAIL, "no worker is alive"),
        (BROKEN, BROKEN.failure),
        (LATE, LATE.delay),
    ],
    ids=["ok", "warn", "idle", "loading", "draining", "fail", "broken", "late"],
)
def test_ready(http, service, state, reason):
    """200 exactly while work should come here; 503 says why not."""
    service.state = state
    answer = http.get("/ready")
    if reason is None:
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    else:
        assert answer.status_code == 503
        assert answer.json() == {"status": "not ready", "reason": reason}


def test_health_shows_queue_and_workers(http, service):
    """An operator sees how much waits, against which bound, and who works."""
    service.state = attrs.evolve(
        OK, queue=QUEUE, busy_workers=2, suspect_workers=1, replaced_workers=4
    )
    report = http.get("/health").json()
    assert report["status"] == "warn"
    assert report["reason"] == "1 of 2 workers take far longer than expected"
    assert report["workers"] == {"live": 2, "total": 2, "busy": 2, "suspect": 1, "replaced": 4}
    assert report["queue"] == attrs.asdict(QUEUE)


def test_health_while_draining(http, service):
    """A server that is about to stop is not healthy for a load balancer, and is served still."""
    service.state = DRAINING
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "fail")
    assert answer.json()["reason"] == "the server is stopping"
    assert embed(http).status_code == 200


def test_an_idle_model_that_does_not_come_back_is_loading(http, service):
    """`/health` says why, and still what waits; the work that comes all the same is taken."""
    service.state = attrs.evolve(LATE, queue=QUEUE)
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "loading")
    assert answer.json()["reason"] == LATE.delay
    assert answer.json()["queue"] == attrs.asdict(QUEUE)
    assert embed(http).status_code == 200


@pytest.mark.parametrize("state", [LOADING, DRAINING, LATE, attrs.evolve(IDLE, draining=True)])
@pytest.mark.parametrize("path", ["/ready", "/health", "/health/deep"])
def test_a_passing_503_says_when_to_ask_again(http, service, state, path):
    """While the server loads or stops every probe is a 503 with a time, whatever the model does."""
    service.state = state
    answer = http.get(path)
    assert answer.status_code == 503
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("5", "5000")
    assert answer.json()["status"] in {"loading", "fail", "not ready"}


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_a_request_that_comes_too_soon_or_too_late_says_when_to_try_again(http, service, seconds):
    """Loading and stopping pass."""
    service.failure = NotReadyError("model not ready", retry_after_seconds=seconds)
    answer = embed(http)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == str(int(seconds or 5))


def test_a_server_that_has_given_up_names_no_time(http, service):
    """Nothing will be better in five seconds."""
    service.state = FAIL
    assert http.get("/health").status_code == 503
    assert "retry-after" not in http.get("/health").headers
    assert "retry-after" not in embed(http).headers


def test_deep_health_reports_the_canary(http, service):
    """Real work was answered."""
    answer = http.get("/health/deep")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "elapsed_ms": 1.5})


def test_deep_health_fails_with_the_canary(http, service):
    """Living workers are not enough."""
    service.canary_report = CanaryReport(is_healthy=False, reason="no answer within 10 s")
    answer = http.get("/health/deep")
    assert answer.status_code == 503
    assert answer.json() == {"status": "fail", "reason": "no answer within 10 s"}


def test_deep_health_of_an_idle_server(http, service):
    """It does not wake the model."""
    service.state = IDLE
    service.canary_report = CanaryReport(is_healthy=True, reason="the model is unloaded")
    answer = http.get("/health/deep")
    assert (answer.status_code, answer.json()["status"]) == (200, "idle")


@pytest.mark.parametrize(
    ("state", "status"), [(LOADING, "loading"), (LATE, "loading"), (BROKEN, "fail"), (FAIL, "fail")]
)
def test_deep_health_without_a_model_to_ask(http, service, state, status):
    """An unloaded model is not healthy for being unloaded: the reasons of `/ready` count."""
    service.state = state
    answer = http.get("/health/deep")
    assert (answer.status_code, answer.json()["status"]) == (503, status)
    assert answer.json()["reason"] == http.get("/ready").json()["reason"]


def test_deep_health_of_an_engine_that_is_given_up_meanwhile(http, service):
    """What the canary is told counts, too."""
    service.failure = NoWorkersError("no workers available")
    answer = http.get("/health/deep")
    assert (answer.status_code, answer.json()["status"]) == (503, "fail")
