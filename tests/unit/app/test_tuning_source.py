"""Where the cost model comes from: a probe, what is remembered, or the operator."""

import attrs
import pytest
from bge_m3_server.app.service import ProbeStatus
from bge_m3_server.domain.budget import Budget
from bge_m3_server.domain.budget_override import Pins
from bge_m3_server.domain.errors import ConfigError

from tests.support.tuner_setup import BUDGET, CONSERVATIVE, GIB, KEY, REMEMBERED, TRUE, Setup


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.close()


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
    with_probe = (BUDGET.workers + 1) * tuning.max_workspace_bytes
    assert tuning.worst_case_peak_bytes == BUDGET.worst_case_peak_bytes(with_probe)
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


def test_remembered_figures_that_leave_no_room_are_measured_again(setup):
    """They would make the server refuse every text for ever."""
    absurd = attrs.evolve(REMEMBERED.coefficients, fixed_bytes=float(64 * GIB))
    setup.store.kept[KEY] = attrs.evolve(REMEMBERED, coefficients=absurd)
    _, tuning, _ = setup.prepare()
    setup.start()
    setup.wait_for_probe()

    assert tuning.probe_status is ProbeStatus.RUNNING
    assert setup.store.kept[KEY].coefficients.fixed_bytes < GIB


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
    assert setup.tuner.detail().coefficients_source == "BGE_M3_ONNX_BATCH_SIZE"


def test_a_pin_is_no_leave_to_exceed_the_memory(setup):
    """A text that is longer than the pin may run alone, in what memory there is and no more.

    The worst case tells of it.
    """
    small = Budget(available_bytes=4 * GIB, model_bytes=GIB, workers=2, safety_factor=0.7)
    cost_model, tuning, _ = setup.prepare(pins=Pins(token_budget=512), budget=small)
    longest_bytes = cost_model.chunk_cost_bytes(1, tuning.longest_text_tokens)

    assert tuning.total_workspace_bytes == small.workspace_bytes
    assert 512 < tuning.longest_text_tokens < 8192
    assert tuning.max_workspace_bytes * 2 < longest_bytes <= small.workspace_bytes
    assert tuning.worst_case_peak_bytes == pytest.approx(
        small.worst_case_peak_bytes(longest_bytes), abs=8
    )


def test_a_larger_pin_than_the_memory_is_obeyed(setup):
    """Then texts up to all workers' pins are accepted."""
    small = Budget(available_bytes=GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)
    _, tuning, _ = setup.prepare(pins=Pins(token_budget=8192), budget=small)

    assert tuning.total_workspace_bytes == 2 * tuning.max_workspace_bytes
    assert tuning.longest_text_tokens == 8192
    assert tuning.utilization_pct > 100


def test_a_probe_that_little_memory_cut_short_is_repeated_with_more(setup):
    """A raised limit would otherwise never be made use of."""
    budget = Budget(available_bytes=8 * GIB, model_bytes=GIB, workers=1, safety_factor=0.7)
    partial = attrs.evolve(REMEMBERED, limited_to_bytes=budget.probe_workspace_bytes)
    for kept, status in (
        (partial, ProbeStatus.CACHE_HIT),
        (attrs.evolve(partial, limited_to_bytes=GIB), ProbeStatus.RUNNING),
    ):
        made = Setup()
        made.store.kept[KEY] = kept
        _, tuning, _ = made.prepare(budget=budget)
        made.close()

        assert tuning.probe_status is status


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
