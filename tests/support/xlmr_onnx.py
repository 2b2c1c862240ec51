"""Writes an XLM-RoBERTa checkpoint as ONNX without torch, in the two published layouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, save_model

from tests.equivalence.checkpoints import LAYER_NORM_EPSILON, Checkpoint, transformer_weights

PAD_ID = 1
OPSET = 17
LAYOUTS = ("sentence_and_tokens", "last_hidden_state")


def write_xlmr(checkpoint: Checkpoint, path: Path, layout: str = "sentence_and_tokens") -> None:
    """Write the graph to `path`, its weights beside it in ``<path>_data``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{path.name}_data"
    (path.parent / data).unlink(missing_ok=True)  # onnx appends to what is there
    model = xlmr_model(checkpoint, layout)
    save_model(model, path, save_as_external_data=True, location=data)


def xlmr_model(checkpoint: Checkpoint, layout: str = "sentence_and_tokens") -> ModelProto:
    """The graph with its weights inside.

    `layout`: ``sentence_and_tokens`` or ``last_hidden_state``.
    """
    graph = _Graph(transformer_weights(checkpoint))
    states = _embeddings(graph)
    not_masked = graph.op("Cast", "attention_mask", to=TensorProto.BOOL)
    not_masked = graph.op("Unsqueeze", not_masked, graph.constant(np.array([1, 2])))
    for index in range(checkpoint.layers):
        states = _layer(graph, f"encoder.layer.{index}", states, not_masked, checkpoint)

    per_token = ["batch", "sequence"]
    outputs: dict[str, list[str | int]] = {}
    if layout == "sentence_and_tokens":
        first = graph.op("Gather", states, graph.constant(np.array(0)), axis=1)
        graph.name("LpNormalization", first, "sentence_embedding", axis=-1, p=2)
        graph.name("Identity", states, "token_embeddings")
        outputs["sentence_embedding"] = ["batch", checkpoint.hidden_size]
        outputs["token_embeddings"] = [*per_token, checkpoint.hidden_size]
    else:
        graph.name("Identity", states, "last_hidden_state")
        outputs["last_hidden_state"] = [*per_token, checkpoint.hidden_size]
    return helper.make_model(
        helper.make_graph(
            graph.nodes,
            checkpoint.name,
            [
                helper.make_tensor_value_info(name, TensorProto.INT64, per_token)
                for name in ("input_ids", "attention_mask")
            ],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, shape in outputs.items()
            ],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=9,
    )


@attrs.define
class _Graph:
    """Nodes and initializers under construction; every value gets a name of its own."""

    weights: Mapping[str, NDArray[np.float32]]
    nodes: list[NodeProto] = attrs.field(factory=list)
    initializers: list[TensorProto] = attrs.field(factory=list)

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def name(self, kind: str, value: str, output: str, **attributes: object) -> None:
        self.nodes.append(helper.make_node(kind, [value], [output], **attributes))

    def constant(self, value: NDArray[np.generic]) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def weight(self, name: str, *, transposed: bool = False) -> str:
        values = self.weights[name]
        values = np.ascontiguousarray(values.T) if transposed else values
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def linear(self, name: str, states: str) -> str:
        product = self.op("MatMul", states, self.weight(f"{name}.weight", transposed=True))
        return self.op("Add", product, self.weight(f"{name}.bias"))

    def layer_norm(self, name: str, states: str) -> str:
        scale, shift = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.op(
            "LayerNormalization", states, scale, shift, axis=-1, epsilon=LAYER_NORM_EPSILON
        )


def _embeddings(graph: _Graph) -> str:
    """Word, position and type rows; positions count real tokens from 2, padding stays on 1."""
    pad = graph.constant(np.array(PAD_ID))
    is_pad = graph.op("Equal", "input_ids", pad)
    real = graph.op("Cast", graph.op("Not", is_pad), to=TensorProto.INT64)
    counted = graph.op("CumSum", real, graph.constant(np.array(1)))
    places = graph.op("Add", graph.op("Mul", counted, real), pad)
    words = graph.op("Gather", graph.weight("embeddings.word_embeddings.weight"), "input_ids")
    positions = graph.op("Gather", graph.weight("embeddings.position_embeddings.weight"), places)
    types = graph.weight("embeddings.token_type_embeddings.weight")
    summed = graph.op("Add", graph.op("Add", words, types), positions)
    return graph.layer_norm("embeddings.LayerNorm", summed)


def _layer(graph: _Graph, name: str, states: str, not_masked: str, checkpoint: Checkpoint) -> str:
    heads = checkpoint.attention_heads
    head_size = checkpoint.hidden_size // heads

    def split(part: str, order: Sequence[int]) -> str:
        flat = graph.linear(f"{name}.attention.self.{part}", states)
        shape = graph.constant(np.array([0, 0, heads, head_size]))
        return graph.op("Transpose", graph.op("Reshape", flat, shape), perm=order)

    query, value = split("query", [0, 2, 1, 3]), split("value", [0, 2, 1, 3])
    scores = graph.op("MatMul", query, split("key", [0, 2, 3, 1]))
    scaled = graph.op("Mul", scores, graph.number(head_size**-0.5))
    nothing = graph.number(float(np.finfo(np.float32).min))
    attention = graph.op("Softmax", graph.op("Where", not_masked, scaled, nothing), axis=-1)
    mixed = graph.op("Transpose", graph.op("MatMul", attention, value), perm=[0, 2, 1, 3])
    joined = graph.op("Reshape", mixed, graph.constant(np.array([0, 0, checkpoint.hidden_size])))
    attended = graph.layer_norm(
        f"{name}.attention.output.LayerNorm",
        graph.op("Add", graph.linear(f"{name}.attention.output.dense", joined), states),
    )
    wide = _gelu(graph, graph.linear(f"{name}.intermediate.dense", attended))
    return graph.layer_norm(
        f"{name}.output.LayerNorm",
        graph.op("Add", graph.linear(f"{name}.output.dense", wide), attended),
    )


def _gelu(graph: _Graph, states: str) -> str:
    """The exact one, by the error function."""
    error = graph.op("Erf", graph.op("Mul", states, graph.number(2**-0.5)))
    share = graph.op("Mul", graph.op("Add", error, graph.number(1.0)), graph.number(0.5))
    return graph.op("Mul", states, share)
