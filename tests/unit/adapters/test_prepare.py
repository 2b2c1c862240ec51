"""Preparing a model: exact enough, once, whatever happens meanwhile."""

import concurrent.futures
import json
import os
import shutil
import threading
import time

import attrs
import numpy as np
import onnx
import pytest
from bge_m3_server.adapters.models.files import ModelFiles, is_whole
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.models.prepare import BLOCK_SIZES, Engine, prepare
from bge_m3_server.adapters.openvino.backend import OpenVinoSettings, load_openvino_backend
from bge_m3_server.adapters.openvino.ir import write_ir
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.embedder import Embedder
from bge_m3_server.domain.errors import CacheDirectoryError, CorruptFileError, PreparationError
from bge_m3_server.domain.fidelity import FLOORS, fidelity, shortfalls
from bge_m3_server.domain.types import Attention, GraphLayout, HeadProjections

from tests.support.openvino_mark import needs_openvino
from tests.support.preparable import ORT, SMALL, Loads, load_on_cpu, write_preparable
from tests.support.tiny_models import write_linear, write_tiny_model

TEXTS = ["hello world", "w3", "the a w1 w2 w4 w5 w6 w7 w8 w9 " * 4, "is it?", "a w9"]
IMPOSSIBLE = attrs.evolve(FLOORS, dense_cosine_min=1.5)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    write_preparable(path)
    return path


@pytest.fixture
def directory(original, tmp_path):
    """A source that a test may change."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@attrs.define
class Steps:
    """What a preparation told about its progress."""

    names: list[str] = attrs.field(factory=list)
    shares: list[float] = attrs.field(factory=list)

    def __call__(self, name, share):
        self.names.append(name)
        self.shares.append(share)


def prepared(source, cache, engine=ORT, **options):
    return prepare(source, engine, cache, Steps(), **options)


def embeddings(backend, tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path, backend.contract.max_tokens)
    embedder = Embedder(tokenizer, backend, CostModel.conservative())
    return embedder.embed(TEXTS, backend.contract.heads)


def kept(cache):
    """Directories of models below `cache`, those under construction included."""
    return sorted(path for path in (cache / "prepared").iterdir() if path.is_dir())


def to_ir(onnx_path):
    xml_path = onnx_path.with_suffix(".xml")
    write_ir(onnx_path, xml_path, {"bge_m3_server.attention_heads": str(SMALL.attention_heads)})
    onnx_path.with_name(f"{onnx_path.name}_data").unlink()
    onnx_path.unlink()
    return xml_path


OPENVINO = Engine(
    name="openvino",
    environment="version 1",
    is_fused=False,
    convert=to_ir,
    load=lambda graph: load_openvino_backend(
        graph, HeadProjections(), OpenVinoSettings(intra_threads=1)
    ),
)


@pytest.mark.parametrize(
    "engine",
    [ORT, pytest.param(OPENVINO, marks=needs_openvino)],
    ids=["onnxruntime", "openvino"],
)
def test_all_heads_are_as_good_as_the_sources(original, cache, engine):
    """On texts that were not among those of the verification, every floor is met."""
    source = Loads().of(original)

    files = prepared(source, cache, engine)

    verdict = json.loads((files.graph_path.parent / "fidelity.json").read_text())
    assert None not in verdict["fidelity"].values()
    backend = engine.load(files.graph_path)
    reference = source.load()
    assert backend.contract.layout is GraphLayout.READY_HEADS
    assert backend.contract.heads == reference.contract.heads
    assert files.precision == "w8"
    found = fidelity(
        embeddings(reference, files.tokenizer_path), embeddings(backend, files.tokenizer_path)
    )
    assert None not in attrs.astuple(found)
    assert shortfalls(found) == []
    assert found.dense_cosine_min < 1 - 1e-7  # it is another model


def test_what_the_graph_promises_stays(original, cache):
    """The limit of 64 tokens survives, and memory is planned for block-wise attention."""
    files = prepared(Loads().of(original), cache)
    contract = load_on_cpu(files.graph_path).contract
    assert contract.max_tokens == SMALL.positions - 2
    assert contract.attention_heads == SMALL.attention_heads
    assert contract.attention is Attention.BLOCKWISE


def test_weights_lie_on_pages_beside_the_graph(original, cache):
    """Engines can map every large tensor."""
    graph_path = prepared(Loads().of(original), cache).graph_path
    model = onnx.load(graph_path, load_external_data=False)
    blocks = [tensor for tensor in model.graph.initializer if tensor.name.endswith("_blocks")]
    assert len(blocks) == 6 * SMALL.layers
    for tensor in blocks:
        fields = {entry.key: entry.value for entry in tensor.external_data}
        assert fields["location"] == f"{graph_path.name}_data"
        assert int(fields["offset"]) % 4096 == 0


def test_the_second_start_takes_what_is_there(original, cache):
    """Neither the source is loaded again nor a file written."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    steps = Steps()

    second = prepare(loads.of(original), ORT, cache, steps)

    assert second == first
    assert loads.count == 1
    assert steps.names == []
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == times


def test_progress_grows_to_the_end(original, cache):
    """The bar never goes back, and ends at 1."""
    steps = Steps()
    prepare(Loads().of(original), ORT, cache, steps)
    assert steps.shares == sorted(steps.shares)
    assert steps.shares[0] == 0
    assert steps.shares[-1] == 1


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("name", ["onnx/model.onnx_data", "sparse_linear.pt"])
def test_another_source_is_prepared_anew(directory, cache, name):
    """A change of the weights or of a head leads to another directory."""
    loads = Loads()
    first = prepared(loads.of(directory), cache)
    path = directory / name
    if path.suffix == ".pt":
        write_linear(path, np.ones((1, SMALL.hidden), np.float32), np.zeros(1, np.float32))
    else:
        flip_a_bit(path)

    second = prepared(loads.of(directory), cache)

    assert second.graph_path != first.graph_path
    assert loads.count == 2


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx_data", "fidelity.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, os.unlink])
def test_damaged_files_are_built_again(original, cache, name, damage):
    """Whatever became of a file, the next start serves a whole model."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    whole = (first.graph_path.parent / name).read_bytes()
    damage(first.graph_path.parent / name)

    second = prepared(loads.of(original), cache)

    assert second == first
    assert loads.count == 2
    assert (second.graph_path.parent / name).read_bytes() == whole
    assert kept(cache) == [second.graph_path.parent]


def test_a_model_that_misses_the_floors_is_refused_for_good(original, cache):
    """Every block size is tried once, the reason has the figures, and the next start knows it."""
    loads, steps = Loads(), Steps()
    figures = r"dense cosine min is 0\.9999\d, at least 1\.5.*BGE_M3_MODEL=fp32.*delete"
    with pytest.raises(PreparationError, match=figures):
        prepare(loads.of(original), ORT, cache, steps, IMPOSSIBLE)
    tried = [name for name in steps.names if "blocks" in name]
    assert tried == [f"8-bit weights in blocks of {size}" for size in BLOCK_SIZES]
    assert list(BLOCK_SIZES) == sorted(BLOCK_SIZES, reverse=True)

    with pytest.raises(PreparationError, match=figures):
        prepared(loads.of(original), cache, floors=IMPOSSIBLE)
    assert loads.count == 1
    (refused,) = kept(cache)
    assert sum(path.stat().st_size for path in refused.iterdir()) < 10_000


def test_smaller_blocks_save_a_model_that_larger_ones_spoil(original, cache):
    """What is not exact enough in large blocks is served in small ones."""
    coarse = Loads().of(original)
    prepared(coarse, cache)
    (first,) = kept(cache)
    found = json.loads((first / "fidelity.json").read_text())
    assert found["block_size"] == BLOCK_SIZES[0]
    figure = found["fidelity"]["dense_cosine_min"]
    shutil.rmtree(first)

    finer = attrs.evolve(FLOORS, dense_cosine_min=figure + 1e-6)
    files = prepared(coarse, cache, floors=finer)

    verdict = json.loads((files.graph_path.parent / "fidelity.json").read_text())
    assert verdict["block_size"] == BLOCK_SIZES[1]
    assert verdict["fidelity"]["dense_cosine_min"] > figure
    model = onnx.load(files.graph_path, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    assert {a.name: a.i for a in node.attribute}["block_size"] == BLOCK_SIZES[1]


def test_a_graph_of_half_precision_is_refused_and_remembered(tmp_path, cache):
    """There is nothing to make of weights that are fp16, whatever the file is called."""
    graph_path = write_tiny_model(tmp_path / "half", precision="fp16")
    graph_path.rename(graph_path.with_name("model.onnx"))
    loads = Loads()
    for _ in range(2):
        with pytest.raises(PreparationError, match="float32"):
            prepared(loads.of(tmp_path / "half"), cache)
    assert loads.count == 1


@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state", "ready_heads"])
def test_graphs_that_cannot_be_fused_are_prepared_all_the_same(tmp_path, cache, layout):
    """Of a graph of another form the weights are turned into blocks, in all layouts."""
    write_tiny_model(tmp_path / "tiny", layout, hidden=64, external_data=True)
    files = prepared(Loads().of(tmp_path / "tiny"), cache)
    contract = load_on_cpu(files.graph_path).contract
    assert contract.attention is Attention.MATERIALISED
    assert contract.max_tokens == 64


def test_what_a_killed_preparation_left_is_removed(original, cache):
    """Restarts in a row do not fill the disk, and a preparation that still runs is left alone."""
    source = Loads().of(original)
    long_ago = time.time() - 86400
    dead = cache / "prepared" / ".building-dead"
    dead.mkdir(parents=True)
    (dead / "model.onnx").write_bytes(b"half of a mod")
    os.utime(dead, (long_ago, long_ago))

    def another_starts(step, _share):
        if step != "comparing with the source":
            return
        for path in cache.glob("prepared/.building-*"):
            os.utime(path, (long_ago, long_ago))
        with pytest.raises(PreparationError):
            prepare(source, attrs.evolve(ORT, name="other"), cache, Steps(), IMPOSSIBLE)

    files = prepare(source, ORT, cache, another_starts)

    assert is_whole(files.graph_path.parent)
    assert not list(cache.glob("prepared/.building-*"))


def test_an_unfinished_model_under_the_final_name_is_replaced(original, cache):
    """A directory without its record is no model, however it came there."""
    files = prepared(Loads().of(original), cache)
    target = files.graph_path.parent
    for path in target.iterdir():
        path.unlink()
    (target / "model.onnx").write_bytes(b"half of a mod")
    assert prepared(Loads().of(original), cache) == files
    assert is_whole(target)


def test_several_preparations_at_once_all_succeed(original, cache):
    """Whoever is first wins, and the others serve the winner's files."""
    together = threading.Barrier(3, timeout=30)

    def gather(step, _share):
        if step == "comparing with the source":
            together.wait()

    def one(_):
        return prepare(Loads().of(original), ORT, cache, gather)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(one, range(3)))

    assert results[0] == results[1] == results[2]
    assert kept(cache) == [results[0].graph_path.parent]
    assert is_whole(results[0].graph_path.parent)


@pytest.mark.parametrize("other", ["whole", "damaged"])
def test_another_process_may_be_first(original, cache, other):
    """What appears under the name meanwhile is used if it is whole, and replaced if not."""
    twin = prepared(Loads().of(original), cache).graph_path.parent
    aside = twin.rename(cache / "aside")
    if other == "damaged":
        truncate(aside / "model.onnx_data")

    def while_comparing(step, _share):
        if step == "comparing with the source":
            shutil.copytree(aside, twin)

    files = prepare(Loads().of(original), ORT, cache, while_comparing)

    assert is_whole(files.graph_path.parent)
    assert kept(cache) == [twin]


@pytest.mark.parametrize("blocked", ["cache", "cache/prepared"])
def test_a_cache_that_cannot_be_written_is_named(original, tmp_path, blocked):
    """The message says which directory, and what to do."""
    path = tmp_path / blocked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file is in the way")
    with pytest.raises(CacheDirectoryError, match=r"cache.*BGE_M3_CACHE_DIR"):
        prepared(Loads().of(original), tmp_path / "cache")


def test_an_incomplete_source_is_called_so(directory, cache):
    """Weights that vanished after the model was found are no fault of the cache."""
    source = Loads().of(directory)
    (directory / "onnx" / "model.onnx_data").unlink()
    with pytest.raises(CorruptFileError, match=r"model\.onnx_data"):
        prepared(source, cache)


@pytest.mark.parametrize(
    "engine",
    [ORT, pytest.param(OPENVINO, marks=needs_openvino)],
    ids=["onnxruntime", "openvino"],
)
def test_a_source_in_a_hub_cache_is_read_through_its_links(original, tmp_path, cache, engine):
    """Links to files of other names, and a table so large that it is kept apart."""
    large = attrs.evolve(SMALL, layers=1, vocabulary=40_000)
    write_preparable(tmp_path / "large", large)
    plain = local_model(tmp_path / "large")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    (snapshot / "onnx").mkdir(parents=True)
    for index, path in enumerate(sorted((tmp_path / "large").rglob("*.*"))):
        blob = path.rename(blobs / f"{index:040x}")
        link = snapshot / path.relative_to(tmp_path / "large")
        link.symlink_to(os.path.relpath(blob, link.parent))
    files = ModelFiles(
        plain.model_id,
        snapshot / "onnx" / "model.onnx",
        snapshot / "tokenizer.json",
        snapshot / "sparse_linear.pt",
        snapshot / "colbert_linear.pt",
    )

    made = prepared(Loads().of_files(files), cache, engine)

    assert engine.load(made.graph_path).contract.hidden_size == SMALL.hidden
    assert not any(path.is_symlink() for path in made.graph_path.parent.iterdir())
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"blobs", "snapshots"}
    assert len(list(blobs.iterdir())) == 5


@needs_openvino
def test_each_engine_has_a_form_of_its_own(original, cache):
    """Both lie side by side, and the source is hashed for both."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    second = prepared(loads.of(original), cache, OPENVINO)
    assert {path.name for path in second.graph_path.parent.glob("model*")} == {
        "model.xml",
        "model.bin",
    }
    assert kept(cache) == sorted([first.graph_path.parent, second.graph_path.parent])
