"""The model that is served: as it was fetched, or in its prepared form."""

import gc
import logging
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs

from ...adapters.memory.trim import trim_heap
from ...adapters.models.contract import ATTENTION_HEADS_KEY, ATTENTION_KEY, MAX_TOKENS_KEY
from ...adapters.models.files import ModelFiles
from ...adapters.models.hub import fetch_model
from ...adapters.models.local import local_model
from ...adapters.models.onnx_file import inspect_graph
from ...adapters.models.prepare import PRECISION, Source, prepare
from ...adapters.models.prepare import Engine as PreparedEngine
from ...adapters.models.preview import build_preview
from ...adapters.models.torch_weights import read_heads
from ...adapters.openvino.choice import usable_flags
from ...adapters.openvino.ir import write_ir
from ...adapters.processor import ARITHMETIC_FLAGS, may_multiply_int8, read_cpu_flags
from ...adapters.tokenizer import load_tokenizer
from ...domain.errors import CacheDirectoryError, PreparationError
from ...domain.types import HeadProjections
from ..config import Config, ExecutionProvider, ModelVariant
from .engines import Engine, engine_for, intra_threads, reference_engine, require_engine

logger = logging.getLogger(__name__)

_BAR_CELLS = 20

_PREPARABLE = {"fp32", None}
"""What the source calls itself; None leaves it to the graph, as ``model.onnx`` does."""


def find_files(config: Config) -> ModelFiles:
    """Where the configured model lies, after downloading or building it if need be.

    Raises:
        ModelError: the model cannot be obtained.
    """
    if config.model_dir:
        named = {ModelVariant.AUTO: None, ModelVariant.W8: "fp32"}
        variant = named.get(config.model, config.model.value)
        return local_model(config.model_dir, variant)
    if config.hub_variant is ModelVariant.PREVIEW:
        return build_preview(config.cache_dir)
    return fetch_model(config.hub_variant.value, config.cache_dir, progress=sys.stderr.isatty())


def is_prepared(config: Config, files: ModelFiles, cpu_flags: Collection[str]) -> bool:
    """Whether the 8-bit form is served: on CPUs where it is the faster one, or was asked for.

    `cpu_flags`: those that the engine may use.
    """
    if config.model is ModelVariant.W8:
        return True
    is_by_default = config.model is ModelVariant.AUTO and files.precision in _PREPARABLE
    return is_by_default and config.execution_provider.is_cpu and may_multiply_int8(cpu_flags)


def engine_flags(config: Config) -> frozenset[str]:
    """Flags of the processor that the configured engine may use."""
    is_openvino = config.execution_provider is ExecutionProvider.OPENVINO
    return usable_flags(read_cpu_flags(), config.onednn_max_isa if is_openvino else "")


@attrs.frozen
class ServedModel:
    """Files, and the heads that are not in the graph."""

    files: ModelFiles
    projections: HeadProjections


def prepare_model(config: Config, workers: int) -> ModelFiles:
    """Obtain the configured model and its prepared form.

    Raises:
        ModelError: it cannot be obtained or prepared.
    """
    require_engine(config)
    threads = intra_threads(config, workers)
    return served_model(config, engine_for(config, threads, workers), threads).files


def served_model(config: Config, engine: Engine, threads: int) -> ServedModel:
    """What the configuration asks for, fetched, and prepared where that is faster.

    Raises:
        ModelError: the model cannot be obtained, or `w8` was asked for and cannot be prepared.
    """
    files = find_files(config)
    cpu_flags = engine_flags(config)
    _tell_of_slow_int8(config, files, cpu_flags)
    if not is_prepared(config, files, cpu_flags):
        return ServedModel(files, read_heads(files))
    reference = reference_engine(config, threads)
    try:
        prepared = prepare(
            Source(
                files,
                lambda max_tokens: load_tokenizer(files.tokenizer_path, max_tokens),
                lambda: reference.load(files.graph_path, read_heads(files), 0, files.precision),
            ),
            _target(config, engine),
            config.cache_dir,
            _draw_progress if sys.stderr.isatty() else _log_progress,
        )
    except (PreparationError, CacheDirectoryError) as error:
        if config.model is ModelVariant.W8:
            raise
        logger.warning("the model is served as it is: %s", error)
        return ServedModel(files, read_heads(files))
    finally:  # else what preparing took would count as the model's
        gc.collect()
        trim_heap()
    return ServedModel(prepared, HeadProjections())


def _tell_of_slow_int8(config: Config, files: ModelFiles, cpu_flags: Collection[str]) -> None:
    if not config.execution_provider.is_cpu or may_multiply_int8(cpu_flags):
        return
    if config.model is ModelVariant.W8:
        logger.warning(
            "this processor has no instructions for 8-bit products: w8 needs less than half the "
            "memory of fp32, but has %s its speed",
            "0.85 to 1.1 times"
            if config.execution_provider is ExecutionProvider.OPENVINO
            else "0.7 to 1 times",
        )
    elif config.model is ModelVariant.AUTO and files.precision in _PREPARABLE:
        logger.info(
            "fp32 is served, for this processor has no instructions for 8-bit products; "
            "BGE_M3_MODEL=w8 is slower, in less than half the memory"
        )


def _target(config: Config, engine: Engine) -> PreparedEngine:
    is_openvino = config.execution_provider is ExecutionProvider.OPENVINO
    return PreparedEngine(
        name=config.execution_provider.value,
        environment=rounding_environment(engine.version, engine_flags(config)),
        is_fused=not is_openvino,
        convert=_to_ir if is_openvino else _as_it_is,
        load=lambda graph: engine.load(graph, HeadProjections(), 0, PRECISION),
    )


def rounding_environment(engine_version: str, cpu_flags: Collection[str]) -> str:
    """What decides how an engine rounds: its version, and the instructions that it may use."""
    arithmetic = sorted(ARITHMETIC_FLAGS.intersection(cpu_flags))
    return " ".join((engine_version, platform.machine(), *arithmetic))


def _as_it_is(onnx_path: Path) -> Path:
    return onnx_path


def _to_ir(onnx_path: Path) -> Path:
    """OpenVINO's own format, which it maps; the ONNX file and its weights are removed."""
    xml_path = onnx_path.with_suffix(".xml")
    graph = inspect_graph(onnx_path)
    write_ir(onnx_path, xml_path, _own(graph.metadata))
    for external in {reference.location for reference in graph.external}:
        (onnx_path.parent / external).unlink()
    onnx_path.unlink()
    return xml_path


def _own(metadata: Mapping[str, str]) -> Mapping[str, str]:
    keys = (MAX_TOKENS_KEY, ATTENTION_HEADS_KEY, ATTENTION_KEY)
    return {key: metadata[key] for key in keys if key in metadata}


def _log_progress(step: str, share: float) -> None:
    logger.info("preparing the model", extra={"fields": {"step": step, "done": round(share, 2)}})


def _draw_progress(step: str, share: float) -> None:
    filled = round(share * _BAR_CELLS)
    bar = "█" * filled + "·" * (_BAR_CELLS - filled)
    end = "\n" if share >= 1 else ""
    sys.stderr.write(f"\r\033[Kpreparing the model {bar} {share:4.0%}  {step}{end}")
    sys.stderr.flush()
