"""Puts BGE-M3's three heads into a graph, which then hands over what clients get."""

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.helper import make_node

from ...domain.types import GraphLayout, HeadProjections, Heads, ModelContract, Projection

DENSE, SPARSE, COLBERT = "dense_vecs", "sparse_weights", "colbert_vecs"


def add_ready_heads(
    model: onnx.ModelProto, contract: ModelContract, projections: HeadProjections
) -> None:
    """Replace the graph's outputs by ready heads; those of a `READY_HEADS` graph stay.

    ``dense_vecs`` (batch, hidden) of length 1, ``sparse_weights`` (batch, sequence) and
    ``colbert_vecs`` (batch, sequence, dim) of length 1; the last two if their weights are there.
    The heads keep full precision: they are a small part of the work.
    """
    if contract.layout is GraphLayout.READY_HEADS:
        return
    graph = model.graph
    dense = contract.outputs_by_head[Heads.DENSE]
    states = dense
    if contract.layout is GraphLayout.SENTENCE_AND_TOKENS:
        states = "token_embeddings"
    else:
        graph.initializer.append(numpy_helper.from_array(np.array(0), "first_token"))
        graph.node.append(make_node("Gather", [states, "first_token"], ["first"], axis=1))
        dense = "first"
    del graph.output[:]
    graph.node.append(make_node("LpNormalization", [dense], [DENSE], axis=-1, p=2))
    _promise(graph, DENSE, ["batch", contract.hidden_size])
    if projections.sparse is not None:
        # A vector as the right factor takes the last axis away.
        _linear(graph, "sparse", states, projections.sparse, is_vector=True)
        graph.node.append(make_node("Relu", ["sparse_sum"], [SPARSE]))
        _promise(graph, SPARSE, ["batch", "sequence"])
    if projections.colbert is not None:
        _linear(graph, "colbert", states, projections.colbert, is_vector=False)
        graph.node.append(make_node("LpNormalization", ["colbert_sum"], [COLBERT], axis=-1, p=2))
        _promise(graph, COLBERT, ["batch", "sequence", len(projections.colbert.bias)])


def _linear(
    graph: onnx.GraphProto, name: str, states: str, projection: Projection, *, is_vector: bool
) -> None:
    """Node outputs ``<name>_sum``: states (batch, sequence, hidden) through `projection`."""
    weight = projection.weight[0] if is_vector else projection.weight.T
    graph.initializer.append(
        numpy_helper.from_array(np.ascontiguousarray(weight, np.float32), f"{name}_weight")
    )
    graph.initializer.append(
        numpy_helper.from_array(np.asarray(projection.bias, np.float32), f"{name}_bias")
    )
    graph.node.append(make_node("MatMul", [states, f"{name}_weight"], [f"{name}_product"]))
    graph.node.append(make_node("Add", [f"{name}_product", f"{name}_bias"], [f"{name}_sum"]))


def _promise(graph: onnx.GraphProto, name: str, shape: list[str | int]) -> None:
    graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
