"""From a published export to the model that a CPU runs fastest: built once, verified, kept.

The graph is fused, the heads are put into it, and its matrices become 8-bit blocks, with all
weights in one file that engines map. What comes out must be as good as the source on fixed texts;
otherwise finer blocks are tried, and in the end the source is served as it is.
"""

import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import onnx

from ...domain.errors import CacheDirectoryError, NonFiniteOutputError, PreparationError
from ...domain.fidelity import FLOORS, Fidelity, fidelity, shortfalls
from ...domain.ports import InferenceBackend, Tokenizer
from ...domain.types import Attention, Embedding, ModelContract
from .block_weights import halve_tables, quantize_matmuls, store_remaining
from .building import building_beside, clear, move_to, sweep
from .contract import ATTENTION_HEADS_KEY, ATTENTION_KEY, MAX_TOKENS_KEY
from .files import DAMAGE, ModelFiles, is_whole, verify_file, write_record
from .fusion import fuse, make_mask_optional
from .ready_heads import add_ready_heads
from .source_digest import source_digest
from .torch_weights import read_heads
from .verification import embed_fixed_texts, read_embeddings, write_embeddings
from .weights import WeightsFile, read_structure

logger = logging.getLogger(__name__)

RECIPE_VERSION = 4
"""Raised whenever the same source would be prepared into different files, or compared on other
texts."""

BLOCK_SIZES = (128, 32)
"""Tried in this order: larger blocks are faster, smaller ones more exact."""

GRAPH_NAME = "model.onnx"
PRECISION = "w8"
VERDICT_NAME = "fidelity.json"
REFERENCE_NAME = "reference.npz"
"""What the source makes of the fixed texts."""

_DIRECTORY = "prepared"

Progress = Callable[[str, float], None]
"""Told the step and the share that is done, from 0 to 1."""


@attrs.frozen
class Engine:
    """The engine that a model is prepared for.

    `name`: part of the directory's name. `is_fused`: it wants ONNX Runtime's fused operations.
    `environment`: its version, and what else decides how it rounds: the verdict holds there only.
    `convert`: turns the ONNX file into the engine's own format; returns what to load.
    `load`: loads that.
    """

    name: str
    environment: str
    is_fused: bool
    convert: Callable[[Path], Path]
    load: Callable[[Path], InferenceBackend]


@attrs.frozen
class Source:
    """The model to prepare.

    `load_tokenizer`: with a limit of so many tokens. `load`: the model in full precision.
    """

    files: ModelFiles
    load_tokenizer: Callable[[int], Tokenizer]
    load: Callable[[], InferenceBackend]


def prepare(
    source: Source,
    engine: Engine,
    cache_dir: Path,
    progress: Progress,
    floors: Fidelity = FLOORS,
) -> ModelFiles:
    """The prepared form of `source`, from `cache_dir` if it is there.

    What is there was compared with the source by some version of the engine, on some processor.
    For another it is compared again, and built again if it is not good enough any more.

    Several processes may prepare at once: each works in a directory of its own, and the first to
    end wins.

    Raises:
        PreparationError: the graph cannot be prepared, or comes out too far from its source.
        CorruptFileError: a file of the source is damaged or missing.
        UnsafeWeightsError, ContractError: a head of the source that is to be put in is no head.
        InferenceError: an engine failed on a fixed text.
        CacheDirectoryError: `cache_dir` cannot be written, or is full.
    """
    directory = cache_dir / _DIRECTORY
    try:
        sweep(directory)
        digest = source_digest(source.files, directory)
        target = directory / f"{digest[:24]}-{engine.name}-recipe{RECIPE_VERSION}"
        if not (is_whole(target) and _holds_here(source, engine, target, floors)):
            _prepare(source, engine, target, progress, floors)
        verdict = _verdict(target)
    except OSError as error:
        raise CacheDirectoryError(
            f"the model cannot be prepared in {directory} ({error}): make that directory writable, "
            "with 3 GB free, or set BGE_M3_CACHE_DIR to another one"
        ) from error
    if verdict["refused"]:
        raise PreparationError(
            f"the 8-bit form of this model was refused: {verdict['refused']}. Serve the model as "
            f"it is with BGE_M3_MODEL=fp32; to prepare it again, delete {target}"
        )
    return attrs.evolve(
        source.files,
        graph_path=target / verdict["graph"],
        sparse_path=None,
        colbert_path=None,
        precision=PRECISION,
    )


def _verdict(target: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((target / VERDICT_NAME).read_text(encoding="utf-8"))
    return verdict


def _is_made_here(engine: Engine, target: Path) -> bool:
    with contextlib.suppress(*DAMAGE):
        return is_whole(target) and _verdict(target)["environment"] == engine.environment
    return False


def _holds_here(source: Source, engine: Engine, target: Path, floors: Fidelity) -> bool:
    """Whether the verdict was reached in this environment, or is reached again in it."""
    # A file for each, because servers of many kinds may share a cache.
    digest = hashlib.sha256(engine.environment.encode()).hexdigest()
    agreement = target / f"agrees-{digest[:16]}.json"
    try:
        verdict = _verdict(target)
        if verdict["environment"] == engine.environment or _agrees(agreement, engine, floors):
            return True
        if verdict["refused"]:
            return False
        reference = read_embeddings(target / REFERENCE_NAME)
        graph, block_size = target / verdict["graph"], verdict["block_size"]
        found = _compare(source, engine, graph, reference, block_size)
    except DAMAGE as error:
        logger.warning("%s is damaged (%s) and is built again", target, error)
        return False
    if problems := shortfalls(found, floors):
        logger.warning("a prepared model is built again, for %s: %s", engine.environment, problems)
        return False
    record = {"environment": engine.environment, "fidelity": attrs.asdict(found)}
    written = agreement.with_name(f".{agreement.name}.{uuid.uuid4().hex}")
    try:
        written.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        written.replace(agreement)
    except OSError:  # a directory that is only read: the next start compares
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
    return True


def _agrees(agreement: Path, engine: Engine, floors: Fidelity) -> bool:
    """Whether `agreement` tells that this environment has compared, and found no shortfall."""
    try:
        record = json.loads(agreement.read_text(encoding="utf-8"))
        found = Fidelity(**record["fidelity"])
        return record["environment"] == engine.environment and not shortfalls(found, floors)
    except (OSError, *DAMAGE):  # none, or only half of one: compared again
        return False


def _compare(
    source: Source, engine: Engine, graph: Path, reference: Sequence[Embedding], block_size: int
) -> Fidelity:
    prepared = engine.load(graph)
    found = fidelity(reference, embed_fixed_texts(source.load_tokenizer, prepared))
    prepared.close()
    logger.info(
        "a prepared model was compared with its source",
        extra={"fields": {"block_size": block_size, **attrs.asdict(found)}},
    )
    return found


def _prepare(
    source: Source, engine: Engine, target: Path, progress: Progress, floors: Fidelity
) -> None:
    """Build in a directory beside `target`, and move it there."""
    with building_beside(target) as building:
        try:
            verdict = _try_block_sizes(source, engine, building, progress, floors)
        except PreparationError as error:  # remembered: another attempt would end the same
            clear(building)
            verdict = {"refused": str(error)}
        verdict["environment"] = engine.environment
        (building / VERDICT_NAME).write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
        names = [path.name for path in building.iterdir()]
        write_record(building, {name: verify_file(building / name) for name in names})
        move_to(target, building, lambda: _is_made_here(engine, target))
    progress("prepared", 1.0)


def _try_block_sizes(
    source: Source, engine: Engine, building: Path, progress: Progress, floors: Fidelity
) -> dict[str, object]:
    progress("embedding fixed texts with the source", 0.0)
    backend = source.load()
    contract = backend.contract
    try:
        reference = embed_fixed_texts(source.load_tokenizer, backend)
    except NonFiniteOutputError as error:
        raise PreparationError(f"its source gives no numbers ({error})") from error
    finally:
        backend.close()
    problems: list[str] = []
    for attempt, block_size in enumerate(BLOCK_SIZES):
        done = (1 + 2 * attempt) / (1 + 2 * len(BLOCK_SIZES))
        progress(f"8-bit weights in blocks of {block_size}", done)
        graph = engine.convert(_write(source, contract, engine, building, block_size))
        progress("comparing with the source", done + 0.2)
        found = _compare(source, engine, graph, reference, block_size)
        problems = shortfalls(found, floors)
        verdict: dict[str, object] = {
            "graph": graph.name,
            "block_size": block_size,
            "fidelity": attrs.asdict(found),
            "refused": "; ".join(problems),
        }
        if not problems:
            write_embeddings(building / REFERENCE_NAME, reference)
            break
        clear(building)
    return verdict


def _write(
    source: Source, contract: ModelContract, engine: Engine, building: Path, block_size: int
) -> Path:
    """The prepared ONNX file, whose weights are beside it."""
    model, weights = read_structure(source.files.graph_path)
    if engine.is_fused and contract.attention_heads is not None:
        fused = fuse(model, contract.attention_heads, contract.hidden_size)
        if fused is None:  # what was begun is of no use
            model, weights = read_structure(source.files.graph_path)
        else:
            model = fused
            make_mask_optional(model, contract.hidden_size)
            _set_metadata(model, ATTENTION_KEY, Attention.BLOCKWISE.value)
    for key, value in (
        (MAX_TOKENS_KEY, contract.max_tokens),
        (ATTENTION_HEADS_KEY, contract.attention_heads),
    ):
        if value is not None:
            _set_metadata(model, key, str(value))
    graph_path = building / GRAPH_NAME
    with (building / f"{GRAPH_NAME}_data").open("wb") as data:
        file = WeightsFile(data, f"{GRAPH_NAME}_data")
        quantize_matmuls(model, weights, file, block_size)
        if engine.is_fused:  # OpenVINO's own format halves tables too, and is not widened in memory
            halve_tables(model, weights, file)
        add_ready_heads(model, contract, read_heads(source.files))
        store_remaining(model, weights, file)
    graph_path.write_bytes(model.SerializeToString())
    return graph_path


def _set_metadata(model: onnx.ModelProto, key: str, value: str) -> None:
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    model.metadata_props.add(key=key, value=value)
