"""The model that is served: as it was fetched, or in its prepared form."""

import gc
import logging
import platform
import sys
from collections.abc import Mapping
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
from ...adapters.openvino.choice import ARITHMETIC_FLAGS, read_cpu_flags
from ...adapters.openvino.ir import write_ir
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


def is_prepared(config: Config, files: ModelFiles) -> bool:
    """Whether the 8-bit form is served: on CPUs, unless another precision was asked for."""
    if config.model is ModelVariant.W8:
        return True
    is_cpu = config.execution_provider.is_cpu
    return config.model is ModelVariant.AUTO and is_cpu and files.precision in _PREPARABLE


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
    if not is_prepared(config, files):
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


def _target(config: Config, engine: Engine) -> PreparedEngine:
    is_openvino = config.execution_provider is ExecutionProvider.OPENVINO
    return PreparedEngine(
        name=config.execution_provider.value,
        environment=" ".join(
            (engine.version, platform.machine(), *sorted(ARITHMETIC_FLAGS & read_cpu_flags()))
        ),
        is_fused=not is_openvino,
        convert=_to_ir if is_openvino else _as_it_is,
        load=lambda graph: engine.load(graph, HeadProjections(), 0, PRECISION),
    )


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
