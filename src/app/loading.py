"""The model as the engine needs it, and the ways to have one and to be rid of it."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import attrs

from ..domain.cost_model import CostModel
from ..domain.errors import SelfTestError
from ..domain.padding import GPU_PADDING, PaddingRule
from ..domain.ports import InferenceBackend, Tokenizer
from .service import ModelInfo, Tuning

_Result = TypeVar("_Result")


def _nothing() -> None:
    return None


@attrs.frozen
class LoadedModel:
    """Everything the pool needs to serve: worker i uses backend i modulo their number.

    Whoever makes one has tested every backend. `padding`: which lengths may share a chunk.
    `seconds_per_position`: of a short pass; without it a hang in the first chunk would go unnoticed
    for long, because nobody knows how long a chunk should take.
    `rest`: called after a spell of work, lets go of what the next one can have again at once.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    backends: tuple[InferenceBackend, ...]
    cost_model: CostModel
    tuning: Tuning
    padding: PaddingRule = GPU_PADDING
    seconds_per_position: float | None = None
    rest: Callable[[], None] = _nothing


@attrs.frozen
class ProcessMemory:
    """What the system tells and takes about this process's memory; by default, nothing.

    `trim` returns what the allocator keeps for later.
    """

    trim: Callable[[], None] = _nothing
    resident_bytes: Callable[[], int | None] = _nothing


def run_self_test(test: Callable[[], _Result], limit_seconds: float) -> _Result:
    """What `test` returns, run in a thread of its own: an engine that hangs, or ends it, fails.

    Raises:
        SelfTestError: `test` raised it, ended its thread, or took longer than `limit_seconds`.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(test())
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="self-test", daemon=True).start()
    try:
        return outcome.result(limit_seconds)
    except TimeoutError:
        raise SelfTestError(
            f"the model did not answer its self-test within {limit_seconds:g} s, the limit of "
            "BGE_M3_HANG_TIMEOUT_SECS: is the engine stuck, or the machine that slow?"
        ) from None
    except Exception:
        raise
    except BaseException as error:
        raise SelfTestError(f"the engine ended the thread of its self-test: {error!r}") from error


def close(model: LoadedModel, memory: ProcessMemory) -> None:
    """Give the model's memory back to the system."""
    for backend in model.backends:
        backend.close()
    gc.collect()
    memory.trim()
