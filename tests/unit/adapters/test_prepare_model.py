"""Preparing a model: exact enough or refused, whatever form its source has."""

import json
import os
import shutil

import attrs
import onnx
import pytest
from bge_m3_server.adapters.models.files import ModelFiles
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.models.prepare import BLOCK_SIZES, prepare
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.embedder import Embedder
from bge_m3_server.domain.errors import CorruptFileError, PreparationError
from bge_m3_server.domain.fidelity import FLOORS, fidelity, shortfalls
from bge_m3_server.domain.types import Attention, GraphLayout

from tests.support.openvino_mark import needs_openvino
from tests.support.preparable import ORT, SMALL, Loads, load_on_cpu, write_preparable
from tests.support.preparation import IMPOSSIBLE, OPENVINO, Steps, kept, prepared
from tests.support.tiny_models import write_tiny_model

pytest_plugins = ["tests.support.prepare_fixtures"]

TEXTS = ["hello world", "w3", "the a w1 w2 w4 w5 w6 w7 w8 w9 " * 4, "is it?", "a w9"]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def embeddings(backend, tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path, backend.contract.max_tokens)
    embedder = Embedder(tokenizer, backend, CostModel.conservative())
    return embedder.embed(TEXTS, backend.contract.heads)


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


def test_progress_grows_to_the_end(original, cache):
    """The bar never goes back, and ends at 1."""
    steps = Steps()
    prepare(Loads().of(original), ORT, cache, steps)
    assert steps.shares == sorted(steps.shares)
    assert steps.shares[0] == 0
    assert steps.shares[-1] == 1


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
