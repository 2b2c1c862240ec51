"""How the cost model grows when a pass of the running server needs more than estimated."""

import pytest
from bge_m3_server.app.metering import MeteredBackend, probe_batch
from bge_m3_server.domain.budget_override import Pins

from tests.support.tuner_setup import CONSERVATIVE, GIB, KEY, REMEMBERED, Setup


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.close()


def test_a_pass_that_needs_more_than_estimated_raises_the_model(setup, caplog):
    """Real work is compared with its estimate; the raise is published and logged.

    What is remembered is what was measured.
    """
    setup.store.kept[KEY] = REMEMBERED
    _, _, backend = setup.prepare()
    setup.start()
    setup.backend.true = REMEMBERED.coefficients.scaled(1.5)
    backend.run(probe_batch(4, 512), ["last_hidden_state"])
    ((cost_model, _),) = setup.published

    assert cost_model.a_bytes_per_token == pytest.approx(135_000.0, rel=1e-6)
    assert cost_model.b_bytes_per_token_sq == pytest.approx(300.0, rel=1e-6)
    assert setup.tuner.detail().excess_passes == 1
    assert setup.store.kept[KEY] == REMEMBERED
    assert "needed more memory than estimated" in caplog.text
    backend.run(probe_batch(4, 512), ["last_hidden_state"])
    assert len(setup.published) == 1


def test_passes_raise_the_model_twofold_at_most(setup):
    """Small passes during large allocations of somebody else must not ruin the cost model."""
    setup.store.kept[KEY] = REMEMBERED
    setup.prepare()
    setup.start()
    for _ in range(3):
        setup.tuner.observe(1, 64, GIB)
    cost_model, _ = setup.published[-1]

    assert cost_model.a_bytes_per_token == 180_000.0
    assert setup.tuner.detail().excess_passes == 3


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
