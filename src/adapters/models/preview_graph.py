"""Writes the preview model as an ONNX graph of standard operators with external data.

The matrix products hold plain float32 weights, so every engine and every later optimisation can
read them; the word table, by far the largest part, stays in its exact 8-bit form.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, save_model

from ...domain.types import Floats
from .preview_blob import PreviewBlob

_OPSET = 20
"""The first with `Gelu`; `LayerNormalization` is older."""
_IR_VERSION = 9
_MIN_EXTERNAL_BYTES = 65_536
_PAGE_BYTES = 4096
_MASKED_SCORE = np.float32(-1e9)


def write_preview_graph(blob: PreviewBlob, path: Path) -> None:
    """Write `path` and, beside it, `<path>_data`.

    Inputs `input_ids`, `attention_mask`: (batch, seq) int64. Outputs `dense_vecs`: (batch, hidden)
    float32, the mean of the last states over real tokens at length 1; `sparse_weights`:
    (batch, seq) float32, each token's weight in 0…1.
    """
    data_path = path.with_name(path.name + "_data")
    with data_path.open("wb") as data:
        graph = _GraphBuilder(data, data_path.name)
        states = _encoder(graph, blob)
        # The mean's divisor vanishes when the length becomes 1.
        mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
        summed = graph.op("MatMul", graph.op("Unsqueeze", mask, graph.shape(1)), states)
        flat = graph.op("Squeeze", summed, graph.shape(1))
        graph.op("LpNormalization", flat, output="dense_vecs", axis=-1, p=2)
        table = graph.weight("lexical_weights", lexical_weights(blob.scores))
        graph.op("Gather", table, "input_ids", output="sparse_weights")
    model = graph.finish(blob.shape.hidden)
    helper.set_model_props(
        model,
        {
            "bge_m3_server.max_tokens": str(blob.shape.positions),
            "bge_m3_server.attention_heads": str(blob.shape.attention_heads),
        },
    )
    save_model(model, str(path))


def lexical_weights(scores: Floats) -> Floats:
    """Log-probabilities of pieces → inverse-frequency weights, the rarest 1, specials 0."""
    weights = np.maximum(-scores, 0)
    scaled: Floats = weights / weights.max()
    return scaled


def _encoder(graph: "_GraphBuilder", blob: PreviewBlob) -> str:
    """BERT; returns the last states, (batch, seq, hidden)."""
    bias = _attention_bias(graph)
    states = _layer_norm(graph, blob, _embeddings(graph, blob), "emb.ln")
    for layer in range(blob.shape.layers):
        prefix = f"l{layer}."
        attended = _attention(graph, blob, states, bias, prefix)
        attended = _linear(graph, blob, attended, prefix + "ao")
        states = _layer_norm(graph, blob, graph.op("Add", attended, states), prefix + "aln")
        inner = graph.op("Gelu", _linear(graph, blob, states, prefix + "fi"))
        inner = _linear(graph, blob, inner, prefix + "fo")
        states = _layer_norm(graph, blob, graph.op("Add", inner, states), prefix + "oln")
    return states


def _embeddings(graph: "_GraphBuilder", blob: PreviewBlob) -> str:
    word = blob.matrix("emb.word")
    codes = graph.op("Gather", graph.weight("emb.word.codes", word.codes), "input_ids")
    scales = graph.op("Gather", graph.weight("emb.word.scales", word.scales), "input_ids")
    blocks = graph.op("Mul", graph.op("Cast", codes, to=TensorProto.FLOAT), scales)
    words = graph.op("Reshape", blocks, graph.shape(0, 0, blob.shape.hidden))
    table = graph.weight("emb.pos", blob.floats("emb.pos") + blob.floats("emb.type")[0])
    length = graph.op("Shape", "input_ids", start=1, end=2)
    places = graph.op("Slice", table, graph.shape(0), length, graph.shape(0))
    return graph.op("Add", words, places)


def _attention_bias(graph: "_GraphBuilder") -> str:
    """0 on real tokens, far below any score on padding: (batch, 1, 1, seq)."""
    padding = graph.op("Not", graph.op("Cast", "attention_mask", to=TensorProto.BOOL))
    padding = graph.op("Cast", padding, to=TensorProto.FLOAT)
    bias = graph.op("Mul", padding, graph.constant(_MASKED_SCORE))
    return graph.op("Unsqueeze", bias, graph.shape(1, 2))


def _attention(
    graph: "_GraphBuilder", blob: PreviewBlob, states: str, bias: str, prefix: str
) -> str:
    hidden, heads = blob.shape.hidden, blob.shape.attention_heads
    size = hidden // heads

    def split(name: str, order: list[int]) -> str:
        projected = _linear(graph, blob, states, prefix + name)
        per_head = graph.op("Reshape", projected, graph.shape(0, 0, heads, size))
        return graph.op("Transpose", per_head, perm=order)

    query, key, value = split("q", [0, 2, 1, 3]), split("k", [0, 2, 3, 1]), split("v", [0, 2, 1, 3])
    scores = graph.op("MatMul", query, key)
    scores = graph.op("Mul", scores, graph.constant(np.float32(size**-0.5)))
    weights = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
    mixed = graph.op("Transpose", graph.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return graph.op("Reshape", mixed, graph.shape(0, 0, hidden))


def _linear(graph: "_GraphBuilder", blob: PreviewBlob, states: str, name: str) -> str:
    weight = np.ascontiguousarray(blob.matrix(name + ".w").dequantised().T)
    product = graph.op("MatMul", states, graph.weight(name + ".w", weight))
    return graph.op("Add", product, graph.weight(name + ".b", blob.floats(name + ".b")))


def _layer_norm(graph: "_GraphBuilder", blob: PreviewBlob, states: str, name: str) -> str:
    scale = graph.weight(name + ".w", blob.floats(name + ".w"))
    bias = graph.weight(name + ".b", blob.floats(name + ".b"))
    epsilon = blob.shape.layer_norm_epsilon
    return graph.op("LayerNormalization", states, scale, bias, axis=-1, epsilon=epsilon)


class _GraphBuilder:
    """Collects nodes and weights; a large weight goes straight to the external data file."""

    def __init__(self, data: BinaryIO, data_name: str) -> None:
        self._data = data
        self._data_name = data_name
        self._nodes: list[NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}

    def op(
        self,
        operator: str,
        *inputs: str,
        output: str | None = None,
        **attributes: float | list[int],
    ) -> str:
        """Append a node; returns the name of its output."""
        name = output or f"{operator}_{len(self._nodes)}"
        node = helper.make_node(operator, inputs, [name], name)
        node.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
        self._nodes.append(node)
        return name

    def shape(self, *sizes: int) -> str:
        """A small int64 vector: a shape, axes or bounds."""
        name = "shape_" + "_".join(map(str, sizes))
        return self.weight(name, np.array(sizes, dtype=np.int64))

    def constant(self, value: np.float32) -> str:
        """A float32 scalar."""
        return self.weight(f"scalar_{value}", np.array(value))

    def weight(self, name: str, values: NDArray[np.generic]) -> str:
        """Add an initializer, once per name; returns the name."""
        if name not in self._initializers:
            inline = values.nbytes < _MIN_EXTERNAL_BYTES
            make = numpy_helper.from_array if inline else self._external
            self._initializers[name] = make(values, name)
        return name

    def finish(self, hidden: int) -> ModelProto:
        """The whole model."""
        rows = ["batch", "sequence"]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, rows)
            for name in ("input_ids", "attention_mask")
        ]
        outputs = [
            helper.make_tensor_value_info("dense_vecs", TensorProto.FLOAT, ["batch", hidden]),
            helper.make_tensor_value_info("sparse_weights", TensorProto.FLOAT, rows),
        ]
        graph = helper.make_graph(
            self._nodes, "preview", inputs, outputs, list(self._initializers.values())
        )
        return helper.make_model(
            graph,
            ir_version=_IR_VERSION,
            opset_imports=[helper.make_opsetid("", _OPSET)],
            producer_name="bge-m3-server",
        )

    def _external(self, values: NDArray[np.generic], name: str) -> TensorProto:
        # Page-aligned tensors stay a file mapping: only touched rows become resident.
        self._data.write(b"\0" * (-self._data.tell() % _PAGE_BYTES))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(values.dtype),
            dims=values.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": self._data_name, "offset": self._data.tell(), "length": values.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(np.ascontiguousarray(values).data)
        return tensor
