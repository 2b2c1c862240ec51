"""The model as the engine needs it, and the ways to have one and to be rid of it."""

import gc
from collections.abc import Callable

import attrs

from ..domain.cost_model import CostModel
from ..domain.padding import GPU_PADDING, PaddingRule
from ..domain.ports import InferenceBackend, Tokenizer
from ..domain.self_test import self_test
from .service import ModelInfo, Tuning


@attrs.frozen
class LoadedModel:
    """Everything the pool needs to serve: worker i uses backend i modulo their number.

    `padding`: which lengths may share a chunk.
    `is_verified_bge_m3`: the files are the published ones, so their golden numbers must come out.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    backends: tuple[InferenceBackend, ...]
    cost_model: CostModel
    tuning: Tuning
    padding: PaddingRule = GPU_PADDING
    is_verified_bge_m3: bool = False


def _nothing() -> None:
    return None


@attrs.frozen
class ProcessMemory:
    """What the system tells and takes about this process's memory; by default, nothing.

    `trim` returns what the allocator keeps for later.
    """

    trim: Callable[[], None] = _nothing
    resident_bytes: Callable[[], int | None] = _nothing


def load_tested(load_model: Callable[[], LoadedModel]) -> LoadedModel:
    """Load the model and test every backend.

    Raises:
        ModelError: the model cannot be obtained, or fails its self-test.
    """
    model = load_model()
    for backend in model.backends:
        self_test(model.tokenizer, backend, is_bge_m3=model.is_verified_bge_m3)
    return model


def close(model: LoadedModel, memory: ProcessMemory) -> None:
    """Give the model's memory back to the system."""
    for backend in model.backends:
        backend.close()
    gc.collect()
    memory.trim()
