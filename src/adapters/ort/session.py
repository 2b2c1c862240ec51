"""One model on ONNX Runtime: options that all execution providers share, loading, running."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs
import onnxruntime
from attrs.validators import ge
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf

from ...domain.errors import (
    CacheDirectoryError,
    CorruptFileError,
    InferenceError,
    ModelError,
    OutOfMemoryError,
    ProviderError,
)
from ...domain.types import Floats, HeadProjections, ModelContract, TokenBatch
from ..models.contract import TensorSpec, read_contract
from ..models.inputs import graph_inputs
from ..models.onnx_file import check_external_data, inspect_graph
from ..out_of_memory import is_out_of_memory

ENGINE_VERSION: str = onnxruntime.__version__

_ORT_WARNING = 2


@attrs.frozen
class SessionSettings:
    """What configuration says about a session; None leaves a limit to the engine.

    `cache_dir`: where providers keep what they compile.
    `has_int8_products`: the processor multiplies int8 matrices. On an x86-64 that does not, ONNX
    Runtime's usual kernels add pairs of products in 16 bits, which overflow.
    """

    intra_threads: int = attrs.field(validator=ge(1))
    cache_dir: Path
    has_int8_products: bool = False
    device_id: int = 0
    gpu_mem_limit_bytes: int | None = None
    trt_max_workspace_bytes: int | None = None
    coreml_strategy: Literal["FastPrediction", "Default"] = "FastPrediction"


@attrs.frozen
class Provider:
    """An execution provider by ONNX Runtime's name, with its options.

    `directories`: what must exist before a session is made.
    `install_hint`: how to get the provider.
    """

    name: str
    options: Mapping[str, str] = attrs.field(factory=dict)
    directories: tuple[Path, ...] = ()
    install_hint: str = "pip install onnxruntime"


@attrs.define(eq=False)
class OrtBackend:
    """An `InferenceBackend` on ONNX Runtime; runs of several threads share the one session."""

    contract: ModelContract
    projections: HeadProjections
    _session: onnxruntime.InferenceSession | None
    _run_options: onnxruntime.RunOptions | None = None

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """Run the graph and hand over only `outputs`; no other output is copied.

        The whole graph is computed all the same: builds of ONNX Runtime for inference ignore
        ``only_execute_path_to_fetches`` (https://github.com/microsoft/onnxruntime/issues/16013).

        Raises:
            OutOfMemoryError: there was not enough memory.
            InferenceError: the engine failed otherwise, or the backend is closed.
        """
        session = self._session
        if session is None:
            raise InferenceError("the model was closed; load it again before running it")
        if not outputs:  # which ONNX Runtime takes for all of them
            return {}
        feeds = graph_inputs(self.contract.input_names, batch)
        try:
            values = session.run(list(outputs), feeds, self._run_options)
        except Exception as error:  # the engine's exceptions share no other base class
            kind = OutOfMemoryError if is_out_of_memory(error) else InferenceError
            raise kind(
                f"onnxruntime failed on a batch of shape {batch.ids.shape}: {error}"
            ) from error
        return dict(zip(outputs, values, strict=True))

    def release(self) -> None:
        """Do nothing: at the end of each run the arena has been given back."""

    def close(self) -> None:
        """Drop the session: its memory is returned when the last run in progress ends."""
        self._session = None


def load_backend(
    graph_path: Path,
    projections: HeadProjections,
    settings: SessionSettings,
    providers: Sequence[Provider],
    precision: str | None = None,
) -> OrtBackend:
    """Load a graph and read its contract.

    `precision` overrules what the graph's weights tell.

    Raises:
        ModelError: as `open_session`.
        ContractError: the graph fits no known layout.
    """
    session = open_session(graph_path, settings, providers)
    contract = read_contract(
        _specs(session.get_inputs()),
        _specs(session.get_outputs()),
        inspect_graph(graph_path),
        projections,
        precision,
    )
    return OrtBackend(contract, projections, session, run_options(providers))


def open_session(
    graph_path: Path, settings: SessionSettings, providers: Sequence[Provider]
) -> onnxruntime.InferenceSession:
    """A session that runs on all of `providers`, in their order, and on nothing else.

    Raises:
        ProviderError: a provider is not installed, or did not start.
        CacheDirectoryError: a provider's directory cannot be made.
        CorruptFileError: a file of the model is damaged or missing.
        ModelError: the engine cannot load the graph for another reason.
    """
    require_installed(providers)
    if not graph_path.is_file():
        raise ModelError(f"there is no model graph at {graph_path}: fetch the model first")
    check_external_data(graph_path)
    for directory in (path for provider in providers for path in provider.directories):
        _make_directory(directory)
    names = [provider.name for provider in providers]
    try:
        session = onnxruntime.InferenceSession(
            str(graph_path),
            session_options(settings, has_arena=_is_cpu(providers)),
            providers=[(provider.name, dict(provider.options)) for provider in providers],
            enable_fallback=0,  # or a provider that fails is quietly replaced by the CPU
        )
    except InvalidProtobuf as error:
        raise CorruptFileError(
            f"{graph_path} is damaged ({error}): delete it and fetch it again"
        ) from error
    except Exception as error:  # the engine's exceptions share no other base class
        raise ModelError(
            f"onnxruntime {onnxruntime.__version__} cannot load {graph_path} "
            f"for {', '.join(names)}: {error}"
        ) from error
    require_providers(
        providers,
        session.get_providers(),
        "its libraries (see onnxruntime's messages above) did not load, the session has",
    )
    return session


def session_options(settings: SessionSettings, *, has_arena: bool) -> onnxruntime.SessionOptions:
    """All graph optimisations, a fixed number of threads, none of which spins while it waits.

    Threads are left to the scheduler: pinned ones fight over cores with those of other workers.
    `has_arena`: the engine lays tensors out itself, in memory that `run_options` make it give back.
    glibc reuses freed pieces of a few MiB so badly that a prepared model takes three times as much.
    The patterns that the arena can be laid out by stay off: they are remembered for every shape.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = settings.intra_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = has_arena
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if not settings.has_int8_products:
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = _ORT_WARNING
    return options


def run_options(providers: Sequence[Provider]) -> onnxruntime.RunOptions | None:
    """Give the arena back after each run, else what the largest pass took would stay for good.

    https://onnxruntime.ai/docs/get-started/with-c.html, "memory arena shrinkage"
    """
    if not _is_cpu(providers):
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _is_cpu(providers: Sequence[Provider]) -> bool:
    return [provider.name for provider in providers] == ["CPUExecutionProvider"]


def require_installed(providers: Sequence[Provider]) -> None:
    """Raise `ProviderError` unless this ONNX Runtime was built with all of `providers`."""
    require_providers(
        providers,
        onnxruntime.get_available_providers(),
        f"onnxruntime {onnxruntime.__version__} offers",
    )


def require_providers(asked: Sequence[Provider], present: Sequence[str], found: str) -> None:
    """Raise `ProviderError` unless all `asked` are `present`; `found` introduces what is there."""
    for provider in asked:
        if provider.name not in present:
            raise ProviderError(
                f"the execution provider {provider.name} was asked for and is not available: "
                f"{found} {', '.join(present)}. To get it: {provider.install_hint}"
            )


def _specs(nodes: Sequence[onnxruntime.NodeArg]) -> Mapping[str, TensorSpec]:
    return {node.name: TensorSpec(tuple(node.shape), node.type) for node in nodes}


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot create {directory} for compiled models: {error.strerror}; "
            "point the cache at a writable directory"
        ) from error
