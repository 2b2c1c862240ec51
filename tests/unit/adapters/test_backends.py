"""What every engine's backend promises: what is fed, computed and returned, and how it fails."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bge_m3_server.adapters.models.torch_weights import read_linear
from bge_m3_server.adapters.openvino.backend import OpenVinoSettings, load_openvino_backend
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.domain.embedder import NoTelemetry, embed_chunk, pad
from bge_m3_server.domain.errors import ContractError, CorruptFileError, InferenceError, ModelError
from bge_m3_server.domain.types import HeadProjections, Heads
from onnx import helper

from tests.support.graphs import echo_graph, graph_for_texts_of, texts, write_graph
from tests.support.openvino_mark import needs_openvino
from tests.support.tiny_models import write_tiny_model

LAYOUTS = ["sentence_and_tokens", "last_hidden_state", "ready_heads"]
ALL_HEADS = Heads.DENSE | Heads.SPARSE | Heads.COLBERT


@pytest.fixture(params=["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def load(request, tmp_path):
    """Loads a graph on one engine: a function of its path and its head weights."""
    if request.param == "onnxruntime":
        on_ort = SessionSettings(intra_threads=1, cache_dir=tmp_path / "cache")
        return lambda graph, heads: load_backend(graph, heads, on_ort, cpu_providers(on_ort))
    settings = OpenVinoSettings(intra_threads=1, streams=2, precision_hint="f32")
    return lambda graph, heads: load_openvino_backend(graph, heads, settings)


def load_tiny(load, directory, layout="sentence_and_tokens", **changes):
    graph = write_tiny_model(directory, layout, **changes)
    heads = HeadProjections(
        sparse=read_linear(directory / "sparse_linear.pt"),
        colbert=read_linear(directory / "colbert_linear.pt"),
    )
    return load(graph, heads)


def embed(backend, batch_of_texts, heads=ALL_HEADS):
    return embed_chunk(batch_of_texts, heads, backend, NoTelemetry())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_embeddings(load, tmp_path, layout, precision):
    """One set of weights embeds alike in every layout and precision."""
    reference = embed(load_tiny(load, tmp_path / "reference"), texts(9, 5))
    backend = load_tiny(load, tmp_path / "other", layout, precision=precision)
    assert backend.contract.precision == precision
    for expected, actual in zip(reference, embed(backend, texts(9, 5)), strict=True):
        np.testing.assert_allclose(actual.dense, expected.dense, atol=1e-5)
        np.testing.assert_allclose(actual.colbert, expected.colbert, atol=1e-5)
        np.testing.assert_array_equal(actual.sparse.indices, expected.sparse.indices)
        np.testing.assert_allclose(actual.sparse.values, expected.sparse.values, atol=1e-5)


def test_external_data_is_found_beside_the_graph(load, tmp_path):
    """Weights in files of their own load like weights in the graph."""
    inside = embed(load_tiny(load, tmp_path / "inside"), texts(6))
    outside = embed(load_tiny(load, tmp_path / "outside", external_data=True), texts(6))
    np.testing.assert_array_equal(outside[0].dense, inside[0].dense)


def test_only_the_outputs_asked_for_are_returned(load, tmp_path):
    """A dense request gets the dense output and nothing else."""
    backend = load_tiny(load, tmp_path, "ready_heads")
    batch = pad(texts(4, 6))
    assert list(backend.run(batch, backend.contract.outputs_for(Heads.DENSE))) == ["dense_vecs"]
    assert list(backend.run(batch, ["colbert_vecs", "dense_vecs"])) == [
        "colbert_vecs",
        "dense_vecs",
    ]
    assert backend.run(batch, []) == {}


def test_engine_failure_tells_the_shape_and_keeps_the_cause(load, tmp_path):
    """The log gets the batch's shape and the engine's own words; the backend lives on."""
    backend = load(graph_for_texts_of(5, tmp_path / "graph.onnx"), HeadProjections())
    for _ in range(2):
        with pytest.raises(InferenceError, match=r"shape \(2, 7\): .*Add node") as caught:
            backend.run(pad(texts(4, 7)), ["dense_vecs"])
        assert caught.value.__cause__ is not None
        assert not isinstance(caught.value.__cause__, InferenceError)
        assert backend.run(pad(texts(5)), ["dense_vecs"])["dense_vecs"].shape == (1, 5)


def test_inputs_are_fed_as_the_graph_asks(load, tmp_path):
    """Token types are zeros; positions count real tokens from 2 and give padding 1."""
    names = ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
    graph = echo_graph(tmp_path / "graph.onnx", names)
    backend = load(graph, HeadProjections())
    batch = pad(texts(3, 5))
    echoed = backend.run(batch, ["last_hidden_state"])["last_hidden_state"]
    ids, mask, token_types, positions = np.moveaxis(echoed, -1, 0)
    np.testing.assert_array_equal(ids, batch.ids)
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(token_types, np.zeros((2, 5)))
    np.testing.assert_array_equal(positions, [[2, 3, 4, 1, 1], [2, 3, 4, 5, 6]])


@pytest.mark.parametrize("asked", [False, True])
def test_token_types_are_fed_only_if_asked_for(load, tmp_path, asked):
    """Both exports run; engines refuse an input that the graph does not have."""
    backend = load_tiny(load, tmp_path, ask_for_token_types=asked)
    assert ("token_type_ids" in backend.contract.input_names) is asked
    assert np.isfinite(embed(backend, texts(5))[0].dense).all()


def test_parallel_runs_give_equal_results(load, tmp_path):
    """Threads that share one model get what a single thread gets."""
    backend = load_tiny(load, tmp_path)
    batches = [pad(texts(length, length + 3)) for length in range(3, 23)]
    names = ["sentence_embedding", "token_embeddings"]
    alone = [backend.run(batch, names) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda batch: backend.run(batch, names), batches * 3))
    for expected, actual in zip(alone * 3, together, strict=True):
        for name in names:
            np.testing.assert_array_equal(actual[name], expected[name])


def test_results_stay_what_they_are(load, tmp_path):
    """A later run, or closing the backend, changes nothing that an earlier run handed over."""
    backend = load_tiny(load, tmp_path)
    first = backend.run(pad(texts(6, 7)), ["token_embeddings"])["token_embeddings"]
    kept = first.copy()
    for _ in range(3):
        backend.run(pad(texts(5, 7)), ["token_embeddings"])
    backend.close()
    np.testing.assert_array_equal(first, kept)


def test_closed_backend_says_so(load, tmp_path):
    """Running after closing tells what happened; closing twice is fine."""
    backend = load_tiny(load, tmp_path)
    backend.close()
    with pytest.raises(InferenceError, match="the model was closed; load it again"):
        backend.run(pad(texts(3)), ["sentence_embedding"])
    backend.close()


def test_missing_graph(load, tmp_path):
    """A graph that is not there is named."""
    with pytest.raises(ModelError, match=r"nowhere\.onnx"):
        load(tmp_path / "nowhere.onnx", HeadProjections())


def with_broken_input(model):
    """The model with an endless name in the description of its input, which loading reads."""
    head, name, tail = model.rpartition(b"\x0a\x0eattention_mask")
    return head + b"\x0a\x7f" + name[2:] + tail


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model[: len(model) // 2],
        lambda model: b"<html>not found</html>",
        with_broken_input,
    ],
    ids=["truncated", "no model", "broken inside"],
)
def test_damaged_graph(load, tmp_path, damage):
    """A damaged file is refused by name."""
    graph = write_tiny_model(tmp_path)
    graph.write_bytes(damage(graph.read_bytes()))
    with pytest.raises(CorruptFileError, match=r"model\.onnx"):
        load(graph, HeadProjections())


def test_missing_external_data(load, tmp_path):
    """A weights file that is missing beside the graph is named."""
    graph = write_tiny_model(tmp_path, external_data=True)
    (graph.parent / "model.onnx_data").unlink()
    with pytest.raises(CorruptFileError, match=r"model\.onnx_data"):
        load(graph, HeadProjections())


def test_graph_that_the_engine_cannot_run(load, tmp_path):
    """An operator that this engine does not know stops the start with the engine's words."""
    graph = write_graph(
        tmp_path / "graph.onnx",
        ["input_ids"],
        [helper.make_node("NoSuchOperator", ["input_ids"], ["dense_vecs"])],
        {"dense_vecs": ["b", 3]},
    )
    with pytest.raises(ModelError, match="NoSuchOperator") as caught:
        load(graph, HeadProjections())
    assert "graph.onnx" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_graph_of_no_known_layout(load, tmp_path):
    """A graph that runs but promises nothing known is refused."""
    graph = echo_graph(tmp_path / "graph.onnx", ["input_ids"])
    with pytest.raises(ContractError):
        load(graph, HeadProjections())
