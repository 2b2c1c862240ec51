"""Fused attention and heads inside the graph: the same numbers by other operations."""

import numpy as np
import onnx
import onnxruntime
import pytest
from bge_m3_server.adapters.models.fusion import fuse, make_mask_optional
from bge_m3_server.adapters.models.ready_heads import add_ready_heads
from bge_m3_server.domain.embedder import NoTelemetry, embed_chunk
from bge_m3_server.domain.types import Attention, GraphLayout, HeadProjections, Projection

from tests.support.graphs import texts
from tests.support.preparable import SMALL, load_on_cpu, write_preparable
from tests.support.tiny_models import write_tiny_model

SAME_LENGTHS, PADDED = (9, 9, 9), (3, 30, 64)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_preparable(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def fused_path(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("fused") / "model.onnx"
    model = fuse(onnx.load(source), SMALL.attention_heads, SMALL.hidden)
    make_mask_optional(model, SMALL.hidden)
    onnx.save(model, path)
    return path


def branches(model):
    """Nodes of (then, else) of every choice in the graph."""
    return [
        tuple(
            next(a.g for a in node.attribute if a.name == name).node
            for name in ("then_branch", "else_branch")
        )
        for node in model.graph.node
        if node.op_type == "If"
    ]


def trained(hidden, seed=1):
    rng = np.random.default_rng(seed)

    def linear(rows):
        weight = rng.normal(0, hidden**-0.5, (rows, hidden)).astype(np.float32)
        return Projection(weight, rng.normal(0, 0.1, rows).astype(np.float32))

    return HeadProjections(sparse=linear(1), colbert=linear(hidden // 2))


def test_all_attention_is_fused(fused_path):
    """One operation per layer is left of it, once with a mask and once without."""
    model = onnx.load(fused_path)
    assert "Softmax" not in {node.op_type for node in model.graph.node}
    choices = branches(model)
    assert len(choices) == SMALL.layers
    for free, masked in choices:
        assert [node.op_type for node in (*free, *masked)] == ["MultiHeadAttention"] * 2
        assert len(free[0].input) <= 4 or not any(free[0].input[4:])
        assert masked[0].input[4]
        assert list(free[0].input[:4]) == list(masked[0].input[:4])  # one copy of the weights


@pytest.mark.parametrize("lengths", [SAME_LENGTHS, PADDED], ids=["same", "padded"])
def test_the_numbers_stay(source, fused_path, lengths):
    """Chunks with padding and without give the vectors of the source in float32."""
    chunk = texts(*lengths)
    ours, theirs = load_on_cpu(fused_path), load_on_cpu(source)
    heads = theirs.contract.heads
    for left, right in zip(
        embed_chunk(chunk, heads, ours, NoTelemetry()),
        embed_chunk(chunk, heads, theirs, NoTelemetry()),
        strict=True,
    ):
        np.testing.assert_allclose(left.dense, right.dense, atol=2e-6)


@pytest.mark.parametrize(
    ("mask", "is_free"), [([[1, 1], [1, 1]], True), ([[1, 1], [1, 0]], False), ([[0]], False)]
)
def test_only_chunks_without_padding_go_without_a_mask(fused_path, mask, is_free):
    """One position of padding anywhere in the chunk brings the mask back."""
    model = onnx.load(fused_path)
    choice = next(node.input[0] for node in model.graph.node if node.op_type == "If")
    model.graph.output.append(onnx.helper.make_tensor_value_info(choice, onnx.TensorProto.BOOL, []))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    mask = np.array(mask, np.int64)
    (chosen,) = session.run([choice], {"input_ids": np.full_like(mask, 5), "attention_mask": mask})
    assert bool(chosen) is is_free


def test_an_unknown_graph_stays_as_it_is(tmp_path):
    """Attention that the optimiser does not know gives nothing, and no half-fused graph."""
    model = onnx.load(write_tiny_model(tmp_path))
    assert fuse(model, 2, 16) is None


@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state"])
@pytest.mark.parametrize("lengths", [SAME_LENGTHS, PADDED], ids=["same", "padded"])
def test_ready_heads_equal_the_domains_own(tmp_path, layout, lengths):
    """All three heads of both layouts are what the server computes outside the graph."""
    path = write_tiny_model(tmp_path, layout)
    plain = load_on_cpu(path, trained(16))
    model = onnx.load(path)
    add_ready_heads(model, plain.contract, plain.projections)
    ready_path = tmp_path / "ready.onnx"
    onnx.save(model, ready_path)

    ready = load_on_cpu(ready_path)

    assert ready.contract.layout is GraphLayout.READY_HEADS
    assert ready.contract.heads == plain.contract.heads
    chunk = texts(*lengths)
    heads = plain.contract.heads
    for left, right in zip(
        embed_chunk(chunk, heads, ready, NoTelemetry()),
        embed_chunk(chunk, heads, plain, NoTelemetry()),
        strict=True,
    ):
        np.testing.assert_allclose(left.dense, right.dense, atol=1e-6)
        np.testing.assert_allclose(left.colbert, right.colbert, atol=1e-6)
        np.testing.assert_array_equal(left.sparse.indices, right.sparse.indices)
        np.testing.assert_allclose(left.sparse.values, right.sparse.values, atol=1e-6)


@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state"])
def test_heads_without_weights_are_not_promised(tmp_path, layout):
    """A model that has only dense vectors stays one."""
    path = write_tiny_model(tmp_path, layout)
    model = onnx.load(path)
    add_ready_heads(model, load_on_cpu(path).contract, HeadProjections())
    assert [output.name for output in model.graph.output] == ["dense_vecs"]
    onnx.checker.check_model(model)


def test_a_graph_with_ready_heads_keeps_them(tmp_path):
    """Nothing is added to what is complete."""
    path = write_tiny_model(tmp_path, "ready_heads")
    model = onnx.load(path)
    before = model.SerializeToString(deterministic=True)
    add_ready_heads(model, load_on_cpu(path).contract, trained(16))
    assert model.SerializeToString(deterministic=True) == before


def test_a_fused_graph_is_read_as_such_only_with_its_metadata(fused_path):
    """Memory is planned for materialised scores unless the graph says otherwise."""
    assert load_on_cpu(fused_path).contract.attention is Attention.MATERIALISED
