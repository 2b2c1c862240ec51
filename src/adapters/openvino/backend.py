"""One model on OpenVINO's CPU plugin: options, loading, running."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from attrs.validators import ge

from ...domain.errors import (
    CorruptFileError,
    EngineError,
    InferenceError,
    ModelError,
    OutOfMemoryError,
)
from ...domain.types import Attention, Floats, HeadProjections, ModelContract, TokenBatch
from ..memory.mapped import drop_mapped_pages
from ..models.contract import TensorSpec, read_contract
from ..models.inputs import graph_inputs
from ..models.onnx_file import GraphDescription, check_external_data, inspect_graph
from ..out_of_memory import is_out_of_memory
from .ir import describe_ir, element_type
from .links import without_links
from .package import import_openvino, reason

Precision = Literal["bf16", "f32"]

_DEVICE = "CPU"

_KEPT_KERNELS = 128
"""Per stream, those of the 35 latest shapes or so. The engine's own 5000 grow to several hundred
megabytes; remaking those of a shape takes 14 ms of CPU time."""

_DAMAGED = "Model can't be parsed"
"""What OpenVINO says of an ONNX file that is no protobuf, and of no other that it refuses."""


@attrs.frozen
class OpenVinoSettings:
    """What configuration says about a loaded model.

    `intra_threads`: threads of one forward pass.
    `streams`: forward passes that run at once; one per worker.
    `precision_hint`: what matrices are multiplied in; None for bf16 where the processor has it.
    `dynamic_quantization_group_size`: values of an activation that share a scale where the weights
    are 8-bit; 0 leaves activations as they are.
    `cache_dir`: where compiled models are kept; None keeps none.
    """

    intra_threads: int = attrs.field(validator=ge(1))
    streams: int = attrs.field(default=1, validator=ge(1))
    precision_hint: Precision | None = None
    dynamic_quantization_group_size: int = attrs.field(default=128, validator=ge(0))
    cache_dir: Path | None = None


@attrs.define(eq=False)
class OpenVinoBackend:
    """An `InferenceBackend` on OpenVINO; runs of several threads share the one compiled model.

    A compiled model in which a run failed is not used again: shapes of the failed run stay in it,
    and spoil the next run of the shape before. The next run compiles the model anew.

    Between runs the engine keeps the buffers of the largest one. Where a larger one comes, they are
    given back first: while a buffer grows, the engine holds the old and the new one.

    `after_first_run` is called once: the plugin packs weights its own way in the first run, and
    looks at the file no more but for rows of the embedding table.
    """

    contract: ModelContract
    projections: HeadProjections
    _compile: Callable[[], Any] | None
    _compiled: Any
    _after_first_run: Callable[[], None] | None = None
    _largest_positions: int = attrs.field(default=0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """Run the graph and hand over copies of only `outputs`.

        Each run has a request of its own: making one takes 10 µs, and what it holds goes with it.
        It runs asynchronously even though nothing is done meanwhile: ``infer`` loses errors where
        the engine has one thread, and gives empty outputs instead.

        Raises:
            OutOfMemoryError: there was not enough memory.
            InferenceError: the engine failed otherwise, or the backend is closed.
        """
        compiled = self._usable_model()
        if not outputs:
            return {}
        if self._has_outgrown(batch.ids.size):
            _release(compiled)
        inputs = graph_inputs(self.contract.input_names, batch)
        try:
            request = compiled.create_infer_request()
            request.start_async(inputs, share_inputs=True)
            request.wait()
            results = {name: np.array(request.get_tensor(name).data) for name in outputs}
        except Exception as error:  # what the engine raises is not documented
            self._drop(compiled)
            kind = OutOfMemoryError if is_out_of_memory(error) else InferenceError
            raise kind(
                f"openvino failed on a batch of shape {batch.ids.shape}: {reason(error)}; "
                "if it keeps failing, choose another engine"
            ) from error
        with self._lock:
            after_first_run, self._after_first_run = self._after_first_run, None
        if after_first_run is not None:
            after_first_run()
        return results

    def release(self) -> None:
        """Give back the buffers of the largest run, unless something runs."""
        with self._lock:
            compiled, self._largest_positions = self._compiled, 0
        if compiled is not None:
            _release(compiled)

    def close(self) -> None:
        """Drop the model: its memory is returned when the last run in progress ends."""
        with self._lock:
            self._compile = self._compiled = None

    def _usable_model(self) -> Any:  # noqa: ANN401  (the package has no types)
        with self._lock:
            if self._compile is None:
                raise InferenceError("the model was closed; load it again before running it")
            if self._compiled is None:
                try:
                    self._compiled = self._compile()
                except ModelError as error:
                    raise InferenceError(
                        f"the model cannot be loaded again after a run failed: {error}"
                    ) from error
            return self._compiled

    def _has_outgrown(self, positions: int) -> bool:
        with self._lock:
            largest = self._largest_positions
            self._largest_positions = max(largest, positions)
        return 0 < largest < positions

    def _drop(self, compiled: Any) -> None:  # noqa: ANN401  (the package has no types)
        with self._lock:
            if self._compiled is compiled:
                self._compiled = None


def _release(compiled: Any) -> None:  # noqa: ANN401  (the package has no types)
    with contextlib.suppress(RuntimeError):  # the engine refuses while something runs
        compiled.release_memory()


def load_openvino_backend(
    graph_path: Path,
    projections: HeadProjections,
    settings: OpenVinoSettings,
    precision: str | None = None,
) -> OpenVinoBackend:
    """Load a graph, an IR (``.xml``) or ONNX file, and read its contract.

    `precision` overrules what the graph's weights tell.

    Raises:
        ProviderError: OpenVINO is not installed.
        CorruptFileError: a file of the model is damaged or missing.
        ModelError: there is no such file.
        EngineError: the engine cannot read or compile it.
        ContractError: the graph fits no known layout.
    """
    core = import_openvino().Core()
    model, description = _read(core, graph_path)
    contract = read_contract(
        {port.get_any_name(): _spec(port) for port in model.inputs},
        {name: _spec(port) for port in model.outputs for name in sorted(port.get_names())},
        description,
        projections,
        precision,
    )
    # It finds attention in a graph by itself, and computes it block by block.
    contract = attrs.evolve(contract, attention=Attention.BLOCKWISE)
    options = compile_options(settings, core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES"))

    def compile_again() -> Any:  # noqa: ANN401  (the package has no types)
        again, _ = _read(core, graph_path)
        return _compile(core, again, options)

    return OpenVinoBackend(
        contract,
        projections,
        compile_again,
        _compile(core, model, options),
        after_first_run=partial(drop_mapped_pages, [graph_path.with_suffix(".bin")]),
    )


def compile_options(
    settings: OpenVinoSettings, capabilities: Collection[str]
) -> dict[str, str | int | bool]:
    """OpenVINO's options for `settings` on a processor of these optimisation capabilities.

    Threads are left to the scheduler: pinned ones fight over cores with those of other processes.
    All CPUs of this process count, be they halves of a core or not.
    """
    options: dict[str, str | int | bool] = {
        "NUM_STREAMS": settings.streams,
        "INFERENCE_NUM_THREADS": settings.intra_threads * settings.streams,
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": True,
        "SCHEDULING_CORE_TYPE": "ANY_CORE",
        "INFERENCE_PRECISION_HINT": settings.precision_hint
        or ("bf16" if "BF16" in capabilities else "f32"),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings.dynamic_quantization_group_size,
        "CPU_RUNTIME_CACHE_CAPACITY": _KEPT_KERNELS,
    }
    if settings.cache_dir is not None:
        options["CACHE_DIR"] = str(settings.cache_dir)
    return options


def _read(core: Any, graph_path: Path) -> tuple[Any, GraphDescription]:  # noqa: ANN401  (the package has no types)
    if not graph_path.is_file():
        raise ModelError(f"there is no model graph at {graph_path}: fetch the model first")
    is_ir = graph_path.suffix == ".xml"
    if not is_ir:
        check_external_data(graph_path)
    try:
        with contextlib.nullcontext(graph_path) if is_ir else without_links(graph_path) as path:
            model = core.read_model(path)
    except RuntimeError as error:
        if is_ir or _DAMAGED in str(error):
            raise CorruptFileError(
                f"{graph_path} or a file beside it is damaged ({reason(error)}): "
                "delete the model and get it again"
            ) from error
        raise EngineError(
            f"openvino cannot read {graph_path}: {reason(error)}; "
            "choose another engine with BGE_M3_EP"
        ) from error
    return model, describe_ir(model) if is_ir else inspect_graph(graph_path)


def _compile(core: Any, model: Any, options: Mapping[str, str | int | bool]) -> Any:  # noqa: ANN401  (the package has no types)
    try:
        return core.compile_model(model, _DEVICE, options)
    except RuntimeError as error:
        raise EngineError(
            f"openvino cannot compile the model for this processor: {reason(error)}; "
            "choose another engine with BGE_M3_EP"
        ) from error


def _spec(port: Any) -> TensorSpec:  # noqa: ANN401  (the package has no types)
    axes: Iterable[Any] = port.partial_shape
    shape = tuple(axis.get_length() if axis.is_static else None for axis in axes)
    return TensorSpec(shape, element_type(port.element_type))
