"""Which of several settings decides the cost model."""

import pytest
from bge_m3_server.domain.budget import Budget
from bge_m3_server.domain.budget_override import Pins, resolve
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.errors import ConfigError
from bge_m3_server.domain.probe_fit import Coefficients

GIB = 1024**3
LOW = Coefficients(16384.0, 8.0)
ROOMY = Budget(available_bytes=64 * GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)
TIGHT = Budget(available_bytes=4 * GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)


def pinned(pins, budget=ROOMY, max_tokens=8192):
    return resolve(pins, LOW, max_tokens, budget).override


def test_nothing_is_pinned():
    """Without any setting the probe decides."""
    resolution = resolve(Pins(), LOW, 8192, ROOMY)

    assert resolution.override is None
    assert resolution.warnings == ()


def test_a_gpu_beats_everything():
    """Host memory says nothing about a device."""
    everything = Pins(
        is_gpu=True,
        disable_auto_budget=True,
        token_budget=1,
        cost_model_a=1.0,
        cost_model_b=1.0,
    )
    assert pinned(everything).cost_model == CostModel(16384.0, 8.0, 10 * GIB)
    with_budget = Pins(is_gpu=True, vram_budget_bytes=8 * GIB)
    assert pinned(with_budget).cost_model.max_workspace_bytes == 8 * GIB


def test_no_auto_budget_beats_the_rest():
    """Conservative coefficients and 2 GiB, or the worker's share where that is less."""
    pins = Pins(disable_auto_budget=True, token_budget=8192, cost_model_a=1.0, cost_model_b=1.0)

    assert pinned(pins).cost_model == CostModel(16384.0, 8.0, 2 * GIB)
    assert pinned(pins).source == "BGE_M3_DISABLE_AUTO_BUDGET"
    assert pinned(pins, TIGHT).cost_model.max_workspace_bytes == TIGHT.workspace_bytes_per_worker


def test_stated_memory_is_shared_between_workers():
    """Whoever states the memory gets all of it, divided as usual and not cut at 2 GiB."""
    pins = Pins(disable_auto_budget=True, available_memory_bytes=64 * GIB)

    assert pinned(pins).cost_model.max_workspace_bytes == ROOMY.workspace_bytes_per_worker
    assert ROOMY.workspace_bytes_per_worker > 2 * GIB


def test_token_budget():
    """8192 tokens are one text of 8192 tokens."""
    override = pinned(Pins(token_budget=8192, cost_model_a=1.0, cost_model_b=1.0))

    assert override.cost_model == CostModel(16384.0, 8.0, 671_088_640)
    assert override.source == "BGE_M3_TOKEN_BUDGET"
    assert override.cost_model.fits(1, 8192)
    assert not override.cost_model.fits(2, 8192)


def test_coefficients():
    """Pinned coefficients keep to the same ceiling as conservative ones."""
    override = pinned(Pins(cost_model_a=20_000.0, cost_model_b=5.0))

    assert override.cost_model == CostModel(20_000.0, 5.0, 2 * GIB)


@pytest.mark.parametrize("pins", [Pins(cost_model_a=1.0), Pins(cost_model_b=1.0)])
def test_half_a_pair_is_ignored(pins):
    """One coefficient alone pins nothing, and that is said."""
    resolution = resolve(pins, LOW, 8192, ROOMY)

    assert resolution.override is None
    assert "count only together" in resolution.warnings[0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_coefficients(bad):
    """Coefficients that cannot be compared with a ceiling stop the start, by name."""
    with pytest.raises(ConfigError, match="BGE_M3_COST_MODEL_A and BGE_M3_COST_MODEL_B"):
        pinned(Pins(cost_model_a=1.0, cost_model_b=bad))


def test_the_old_batch_size_is_translated():
    """16 texts a call are 16 × 512 tokens, and the warning says so."""
    resolution = resolve(Pins(onnx_batch_size=16), LOW, 8192, ROOMY)

    assert resolution.override.cost_model == pinned(Pins(token_budget=8192)).cost_model
    assert resolution.override.source == "BGE_M3_ONNX_BATCH_SIZE"
    assert resolution.warnings == (
        "BGE_M3_ONNX_BATCH_SIZE is deprecated: set BGE_M3_TOKEN_BUDGET=8192 instead",
    )


def test_the_old_batch_size_with_short_texts():
    """Texts are never taken for longer than they can be."""
    assert pinned(Pins(onnx_batch_size=16), max_tokens=128).cost_model.fits(16, 128)
    assert not pinned(Pins(onnx_batch_size=16), max_tokens=128).cost_model.fits(17, 128)


def test_the_new_setting_beats_the_old_batch_size():
    """Both set: the token budget counts, and the warning names it."""
    resolution = resolve(Pins(onnx_batch_size=99, token_budget=512), LOW, 8192, ROOMY)

    assert resolution.override == pinned(Pins(token_budget=512))
    assert "BGE_M3_ONNX_BATCH_SIZE is overruled by BGE_M3_TOKEN_BUDGET" in resolution.warnings


def test_what_does_not_count_is_said():
    """Of several settings one decides; each of the others is named with it."""
    pins = Pins(disable_auto_budget=True, token_budget=1, cost_model_a=1.0, cost_model_b=1.0)

    assert resolve(pins, LOW, 8192, ROOMY).warnings == (
        "BGE_M3_TOKEN_BUDGET is overruled by BGE_M3_DISABLE_AUTO_BUDGET",
        "BGE_M3_COST_MODEL_A and _B is overruled by BGE_M3_DISABLE_AUTO_BUDGET",
    )
