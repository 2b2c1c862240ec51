"""Where the cost model comes from, and how it changes while the server runs."""

import logging
import threading

import attrs
import pytest
from bge_m3_server.app.metering import MeteredBackend, probe_batch
from bge_m3_server.app.service import ProbeStatus
from bge_m3_server.app.tuning import Tuner
from bge_m3_server.app.tuning_state import Situation
from bge_m3_server.domain.budget import Budget
from bge_m3_server.domain.budget_override import Pins
from bge_m3_server.domain.errors import ConfigError, InferenceError
from bge_m3_server.domain.probe_fit import Coefficients, Fit, FitQuality
from bge_m3_server.domain.testing import FakeBackend, FakeClock
from bge_m3_server.domain.types import MemoryLimit, ProbeKey, ResidentMemory

MIB = 1024**2
GIB = 1024**3
CONSERVATIVE = Coefficients(98_304.0, 192.0)
TRUE = Coefficients(80_000.0, 180.0)
REMEMBERED = Fit(Coefficients(90_000.0, 200.0), FitQuality(0.99, 0.05, 1.1, 8))
KEY = ProbeKey(
    server_version="1", model_id="bge-m3", model_fingerprint="f", precision="fp32", engine="ort",
    engine_version="1", intra_threads=1, max_tokens=8192, cpu_model="c", architecture="a",
)  # fmt: skip
BUDGET = Budget(available_bytes=64 * GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)


@attrs.define
class FakeStore:
    """Coefficients in a dict."""

    kept: dict = attrs.field(factory=dict)
    problem: str | None = None

    def load(self, key):
        return self.kept.get(key, "there is nothing yet")

    def save(self, key, fit):
        if self.problem is None:
            self.kept[key] = fit
        return self.problem


@attrs.define
class FakeMemory:
    """A process whose peak is what its backend says."""

    risen: int = 0

    def resident(self):
        return ResidentMemory(2 * GIB, 0)

    def reset_peak(self):
        self.risen = 0

    def peak_bytes(self):
        return 2 * GIB + self.risen


@attrs.define
class CostlyBackend(FakeBackend):
    """A fake model that needs what `true` says; `hold` blocks passes of `hold_from`
    tokens or more.
    """

    memory: FakeMemory = attrs.field(factory=FakeMemory)
    true: Coefficients = TRUE
    hold: threading.Event | None = None
    hold_from: int = 64
    shapes: list = attrs.field(factory=list)

    def run(self, batch, outputs):
        self.shapes.append(batch.ids.shape)
        if self.hold is not None and batch.ids.shape[1] >= self.hold_from:
            assert self.hold.wait(30)
        if self.error is not None:
            raise self.error
        self.memory.risen = max(self.memory.risen, round(self.true.cost_bytes(*batch.ids.shape)))
        return {}


@attrs.define
class Setup:
    """A tuner, its surroundings, and what it published."""

    store: FakeStore = attrs.field(factory=FakeStore)
    backend: CostlyBackend = attrs.field(factory=CostlyBackend)
    published: list = attrs.field(factory=list)
    tuner: Tuner = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.tuner = Tuner(self.store, FakeClock())

    def situation(self, **changes):
        usual = {
            "memory": MemoryLimit(BUDGET.available_bytes, "cgroup_v2"),
            "budget": BUDGET,
            "pins": Pins(),
            "conservative": CONSERVATIVE,
            "max_tokens": 8192,
            "peaks": self.backend.memory,
            "trim": lambda: None,
            "key": KEY,
        }
        return Situation(**usual | changes)

    def prepare(self, **changes):
        return self.tuner.prepare(self.situation(**changes), self.backend)

    def start(self):
        self.tuner.start(lambda *news: self.published.append(news))

    def wait_for_probe(self):
        for thread in threading.enumerate():
            if thread.name == "probe":
                thread.join(30)
                assert not thread.is_alive()


@pytest.fixture
def setup():
    made = Setup()
    yield made
    if made.backend.hold is not None:
        made.backend.hold.set()
    made.tuner.stop()


def test_the_first_start_measures(setup):
    """Conservative figures serve until the probe ends; its fit is published and remembered."""
    cost_model, tuning, _ = setup.prepare()
    assert cost_model == CONSERVATIVE.cost_model(BUDGET.workspace_bytes // 3)
    assert tuning.probe_status is ProbeStatus.RUNNING
    assert setup.backend.shapes == []

    setup.start()
    setup.wait_for_probe()
    ((found, account),) = setup.published

    assert account.probe_status is ProbeStatus.COMPLETE
    assert found.max_workspace_bytes == BUDGET.workspace_bytes_per_worker
    assert found.a_bytes_per_token == pytest.approx(1.1 * TRUE.a_bytes_per_token, rel=0.01)
    assert found.b_bytes_per_token_sq == pytest.approx(1.1 * TRUE.b_bytes_per_token_sq, rel=0.01)
    assert setup.store.kept[KEY].coefficients.a_bytes_per_token == found.a_bytes_per_token
    detail = setup.tuner.detail()
    assert detail.coefficients_source == "probe"
    assert detail.quality.points == len(detail.probe.peaks)
    assert detail.longest_text_tokens == 8192


def test_the_account_of_the_memory(setup):
    """Every figure of the tuning block follows from the budget."""
    _, tuning, _ = setup.prepare()

    assert tuning.memory_source == "cgroup_v2"
    assert tuning.available_bytes == 64 * GIB
    assert tuning.model_rss_bytes_per_worker == GIB
    assert tuning.worst_case_peak_bytes == BUDGET.worst_case_peak_bytes(tuning.max_workspace_bytes)
    assert 0 < tuning.utilization_pct < 100


def test_a_second_start_remembers(setup):
    """A cache hit serves with full shares at once, and measures nothing."""
    setup.store.kept[KEY] = REMEMBERED
    cost_model, tuning, _ = setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert cost_model == REMEMBERED.coefficients.cost_model(BUDGET.workspace_bytes_per_worker)
    assert tuning.probe_status is ProbeStatus.CACHE_HIT
    assert setup.backend.shapes == []
    assert setup.published == []
    assert setup.tuner.detail().quality == REMEMBERED.quality


def test_a_fresh_probe_can_be_asked_for(setup):
    """What is remembered is not used, and replaced by what is measured."""
    setup.store.kept[KEY] = REMEMBERED
    _, tuning, _ = setup.prepare(use_cache=False)
    setup.start()
    setup.wait_for_probe()

    assert tuning.probe_status is ProbeStatus.RUNNING
    assert setup.store.kept[KEY].quality == setup.tuner.detail().quality != REMEMBERED.quality


@pytest.mark.parametrize(
    "pins", [Pins(token_budget=8192), Pins(disable_auto_budget=True), Pins(is_gpu=True)]
)
def test_pinned_models_are_not_measured(setup, pins):
    """An override counts as it is, in memory of any size."""
    small = Budget(available_bytes=GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)
    _, tuning, _ = setup.prepare(pins=pins, budget=small)
    setup.start()
    setup.wait_for_probe()

    assert tuning.probe_status is ProbeStatus.DISABLED
    assert setup.backend.shapes == []
    assert setup.tuner.detail().coefficients_source.startswith("BGE_M3_")


def test_a_gpu_has_no_account_of_host_memory(setup):
    """Host figures beside a device's workspace would mean nothing, and its backend is left be."""
    _, tuning, backend = setup.prepare(pins=Pins(is_gpu=True))

    assert tuning.worst_case_peak_bytes is None
    assert tuning.utilization_pct is None
    assert backend is setup.backend


def test_a_pin_beyond_the_memory_is_warned_about(setup, caplog):
    """The operator's word counts, but not silently."""
    setup.prepare(pins=Pins(token_budget=1_000_000))

    assert "larger than this memory has room for" in caplog.text


def test_the_old_variable_is_warned_about(setup, caplog):
    """A deprecated setting works and says what replaces it."""
    setup.prepare(pins=Pins(onnx_batch_size=16))

    assert "BGE_M3_ONNX_BATCH_SIZE is deprecated" in caplog.text
    assert setup.tuner.detail().coefficients_source == "BGE_M3_TOKEN_BUDGET"


def test_memory_that_does_not_suffice(setup):
    """The start stops before any request can be killed."""
    small = Budget(available_bytes=GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)
    with pytest.raises(ConfigError, match="memory does not suffice"):
        setup.prepare(budget=small)


def test_a_platform_without_peaks(setup):
    """Where peaks cannot be seen, conservative figures stay, and the reason is kept."""
    cost_model, tuning, backend = setup.prepare(peaks="no /proc here")
    setup.start()
    setup.wait_for_probe()

    assert cost_model == CONSERVATIVE.cost_model(BUDGET.workspace_bytes_per_worker)
    assert tuning.probe_status is ProbeStatus.DISABLED
    assert setup.tuner.detail().reason == "no /proc here"
    assert backend is setup.backend


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


@attrs.define
class SlowClock:
    """Ten seconds go by between any two looks at it."""

    now: float = 0.0

    def __call__(self):
        self.now += 10.0
        return self.now


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


def told(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_nothing_starts_after_shutdown(setup):
    """A model that finishes loading during shutdown is not measured."""
    setup.prepare()
    setup.tuner.stop()
    setup.start()

    assert setup.backend.shapes == []


def test_a_model_loaded_again_keeps_what_was_found(setup):
    """After an idle time the model comes back with its measured figures, without a probe."""
    setup.prepare()
    setup.start()
    setup.wait_for_probe()
    runs = len(setup.backend.shapes)
    cost_model, tuning, _ = setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert cost_model == setup.published[0][0]
    assert tuning.probe_status is ProbeStatus.COMPLETE
    assert len(setup.backend.shapes) == runs


def test_a_record_that_cannot_be_written(setup, caplog):
    """The fit is used all the same."""
    setup.store.problem = "disk full"
    setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert setup.published[0][1].probe_status is ProbeStatus.COMPLETE
    assert "coefficients are not remembered" in caplog.text


def test_a_pass_that_needs_more_than_estimated_raises_the_model(setup, caplog):
    """Real work is compared with its estimate; the raise is published, logged and remembered."""
    setup.store.kept[KEY] = REMEMBERED
    _, _, backend = setup.prepare()
    setup.start()
    setup.backend.true = REMEMBERED.coefficients.scaled(1.5)
    backend.run(probe_batch(4, 512), ["last_hidden_state"])
    ((cost_model, _),) = setup.published

    assert cost_model.a_bytes_per_token == pytest.approx(135_000.0, rel=1e-6)
    assert cost_model.b_bytes_per_token_sq == pytest.approx(300.0, rel=1e-6)
    assert setup.tuner.detail().excess_passes == 1
    assert setup.store.kept[KEY].coefficients.b_bytes_per_token_sq == pytest.approx(300.0)
    assert "needed more memory than estimated" in caplog.text
    backend.run(probe_batch(4, 512), ["last_hidden_state"])
    assert len(setup.published) == 1


def test_one_pass_raises_the_model_twofold_at_most(setup):
    """A small pass during a large allocation of somebody else must not ruin the cost model."""
    setup.store.kept[KEY] = REMEMBERED
    setup.prepare()
    setup.start()
    setup.tuner.observe(1, 64, GIB)
    ((cost_model, _),) = setup.published

    assert cost_model.a_bytes_per_token == 180_000.0


@pytest.mark.parametrize(("factor", "shape"), [(1.19, (4, 512)), (3.0, (1, 64))])
def test_small_excesses_change_nothing(setup, factor, shape):
    """Below 20 %, or below 32 MiB, it is noise."""
    setup.store.kept[KEY] = REMEMBERED
    _, _, backend = setup.prepare()
    setup.start()
    setup.backend.true = REMEMBERED.coefficients.scaled(factor)
    backend.run(probe_batch(*shape), ["last_hidden_state"])

    assert setup.published == []
    assert setup.tuner.detail().excess_passes == 0


def test_pinned_models_are_not_raised(setup, caplog):
    """The excess is counted and logged; the operator's figures stay."""
    cost_model, _, backend = setup.prepare(pins=Pins(token_budget=8192))
    setup.start()
    setup.backend.true = CONSERVATIVE.scaled(2.0)
    backend.run(probe_batch(4, 512), ["last_hidden_state"])

    assert setup.published[0][0] == cost_model
    assert setup.tuner.detail().excess_passes == 1


def test_requests_are_metered(setup):
    """The backend that serves is the one that is watched."""
    _, _, backend = setup.prepare()

    assert isinstance(backend, MeteredBackend)


def test_nothing_to_tell_before_the_model_is_loaded(setup):
    """Without a model there is no account, and observing is harmless."""
    assert setup.tuner.detail() is None
    setup.tuner.observe(1, 64, 10**12)
    setup.start()

    assert setup.published == []


@pytest.fixture(autouse=True)
def _show_all_log_lines(caplog):
    caplog.set_level(logging.INFO)
