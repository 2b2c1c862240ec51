"""A probe that fails, is slow or is cancelled: what is told, used and remembered then."""

import logging
import threading

import attrs
import pytest
from bge_m3_server.app.service import ProbeStatus
from bge_m3_server.app.tuning import Tuner
from bge_m3_server.domain.budget import Budget
from bge_m3_server.domain.errors import InferenceError

from tests.support.tuner_setup import BUDGET, CONSERVATIVE, GIB, KEY, Setup


def told(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@attrs.define
class SlowClock:
    """Ten seconds go by between any two looks at it."""

    now: float = 0.0

    def __call__(self):
        self.now += 10.0
        return self.now


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _show_all_log_lines(caplog):
    caplog.set_level(logging.INFO)


def test_an_engine_that_fails(setup, caplog):
    """The server goes on with conservative figures, and says why."""
    setup.backend.error = InferenceError("broken")
    setup.prepare()
    setup.start()
    setup.wait_for_probe()
    ((cost_model, tuning),) = setup.published

    assert tuning.probe_status is ProbeStatus.FAILED
    assert cost_model == CONSERVATIVE.cost_model(BUDGET.workspace_bytes_per_worker)
    assert "broken" in setup.tuner.detail().reason
    assert setup.store.kept == {}


def test_a_fault_in_the_probe_ends_as_a_failed_probe(setup, caplog):
    """Whatever goes wrong in the background is logged and told, never lost with its thread."""
    setup.backend.error = ZeroDivisionError("surprise")
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert setup.published[0][1].probe_status is ProbeStatus.FAILED
    assert "the probe failed" in caplog.text


def test_a_slow_probe_is_used_but_not_remembered(setup):
    """What ran out of time on a busy machine serves this start; the next one measures again."""
    setup.tuner = Tuner(setup.store, SlowClock())
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert setup.published[0][1].probe_status is ProbeStatus.COMPLETE
    assert "would not end within the 300 s" in setup.published[0][1].reason
    assert setup.store.kept == {}


def test_one_probe_at_a_time(setup):
    """Starting again while a probe runs starts nothing."""
    setup.backend.hold = threading.Event()
    setup.prepare()
    setup.start()
    setup.start()

    assert sum(thread.name == "probe" for thread in threading.enumerate()) == 1


@pytest.mark.parametrize("last", [(1, 64), (1, 1024)])
def test_shutdown_cancels_the_probe(setup, last, caplog):
    """The pass that runs is waited for, and half a measurement is not remembered."""
    setup.backend.hold, setup.backend.hold_from = threading.Event(), last[1]
    setup.prepare()
    setup.start()
    while last not in setup.backend.shapes:
        threading.Event().wait(0.001)
    stopper = threading.Thread(target=setup.tuner.stop)
    stopper.start()
    while not setup.tuner.is_stopping:
        threading.Event().wait(0.001)
    setup.backend.hold.set()
    stopper.join(30)

    assert setup.backend.shapes[-1] == last
    assert setup.published[0][1].probe_status is ProbeStatus.FAILED
    assert setup.published[0][1].reason.startswith("cancelled by shutdown")
    assert setup.store.kept == {}
    assert ("INFO", "probe cancelled by shutdown") in told(caplog)
    assert not any(level == "WARNING" for level, _ in told(caplog))


def test_an_engine_that_closes_during_shutdown_is_no_fault(setup, caplog):
    """A probe whose model goes away under it was cancelled."""
    setup.backend.hold = threading.Event()
    setup.prepare()
    setup.start()
    while (1, 64) not in setup.backend.shapes:
        threading.Event().wait(0.001)
    setup.tuner.cancel()
    setup.backend.error = InferenceError("the model was closed")
    setup.backend.hold.set()
    setup.wait_for_probe()

    assert setup.published[0][1].reason == "cancelled by shutdown"
    assert not any(level == "WARNING" for level, _ in told(caplog))


def test_nothing_starts_after_shutdown(setup):
    """A model that finishes loading during shutdown is not measured."""
    setup.prepare()
    setup.tuner.stop()
    setup.start()

    assert setup.backend.shapes == []


def test_a_record_that_cannot_be_written(setup, caplog):
    """The fit is used all the same."""
    setup.store.problem = "disk full"
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert setup.published[0][1].probe_status is ProbeStatus.COMPLETE
    assert "coefficients are not remembered" in caplog.text


def test_a_probe_in_little_memory_remembers_what_limited_it(setup):
    """So that a start with more measures again."""
    little = Budget(available_bytes=4 * GIB, model_bytes=GIB, workers=2, safety_factor=0.7)
    setup.prepare(budget=little)
    setup.start()
    setup.wait_for_probe()

    assert (1, 8192) not in setup.backend.shapes
    assert setup.store.kept[KEY].limited_to_bytes == little.probe_workspace_bytes


def test_a_probe_that_measured_everything_was_not_limited(setup):
    """Its fit is good for any memory."""
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert (1, 8192) in setup.backend.shapes
    assert setup.store.kept[KEY].limited_to_bytes is None


def test_nothing_of_the_last_measurement_stays(setup):
    """The engine gives back what it keeps before anything is served with the outcome."""
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert setup.backend.releases_at_last_run < setup.backend.releases
