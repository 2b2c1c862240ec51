"""Writes a model of BGE-M3's exact shape with random weights: same work and memory, no meaning.

24 layers, 1024 wide, 16 heads, 8194 positions, in the published layout: ``onnx/model.onnx`` with
``sentence_embedding`` and ``token_embeddings``, its weights beside it in ``model.onnx_data``, and
``tokenizer.json``. The vocabulary is small by default: its table only makes the file longer. The
same arguments give the same bytes on every machine.

    .venv/bin/python -m benchmarks.synthetic_bge_m3 .cache/synthetic
"""

import argparse
import io
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

OPSET = 17
PAGE_BYTES = 4096
"""Tensors begin on pages, so that an engine can map them instead of reading them."""

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
PAD_ID = 1
LAYER_NORM_EPSILON = 1e-5
INITIALIZER_RANGE = 0.02
"""Standard deviation of an untrained XLM-RoBERTa's linear weights."""


@attrs.frozen
class Shape:
    """What makes a BERT: the defaults are BGE-M3's, but for the vocabulary of 250 002."""

    layers: int = 24
    hidden: int = 1024
    attention_heads: int = 16
    intermediate: int = 4096
    positions: int = 8194
    vocabulary: int = 2048


BGE_M3 = Shape()


def write_synthetic_bge_m3(directory: Path, shape: Shape = BGE_M3) -> Path:
    """Write model and tokenizer below `directory`; returns the path of the graph.

    Weights go to the file one after the other: memory stays at the size of the largest tensor.
    """
    graph_path = directory / "onnx" / "model.onnx"
    graph_path.parent.mkdir(parents=True, exist_ok=True)
    data_path = graph_path.with_name("model.onnx_data")
    with data_path.open("wb") as data:
        model = _model(shape, _Weights(data, data_path.name))
    graph_path.write_bytes(model.SerializeToString(deterministic=True))
    (directory / "tokenizer.json").write_text(_tokenizer(shape).to_str(), encoding="utf-8")
    return graph_path


@attrs.define
class _Weights:
    """Random tensors, written to `data` as they are asked for."""

    data: BinaryIO | io.BytesIO
    location: str
    tensors: list[TensorProto] = attrs.field(factory=list)

    def add(self, name: str, dims: Sequence[int], *, spread: float, centre: float = 0.0) -> str:
        """Uniform values of standard deviation `spread` around `centre`, seeded by `name`."""
        count = int(np.prod(dims))
        bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 4))
        values = bits.astype("<u8", copy=False).view("<i2")[:count].astype("<f4")
        values *= np.float32(spread * 3**0.5 / 2**15)
        values += np.float32(centre)

        self.data.write(b"\0" * (-self.data.tell() % PAGE_BYTES))
        offset = self.data.tell()
        length = self.data.write(values.data)
        tensor = TensorProto(
            name=name,
            dims=dims,
            data_type=TensorProto.FLOAT,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (("location", self.location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name

    def constant(self, value: NDArray[np.generic]) -> str:
        name = f"constant_{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(value, name))
        return name


@attrs.define
class _Graph:
    """Nodes under construction; every value gets a name of its own."""

    shape: Shape
    weights: _Weights
    nodes: list[NodeProto] = attrs.field(factory=list)

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        return self.named(kind, inputs, f"/{kind}_{len(self.nodes)}", **attributes)

    def named(self, kind: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def number(self, value: float) -> str:
        return self.weights.constant(np.array(value, np.float32))

    def linear(self, name: str, states: str, inputs: int, outputs: int) -> str:
        weight = self.weights.add(f"{name}.weight", [inputs, outputs], spread=INITIALIZER_RANGE)
        bias = self.weights.add(f"{name}.bias", [outputs], spread=0.1)
        # Tools that quantise know the matrices by where exporters say that they are.
        place = re.sub(r"\.(?!\d)", "/", name)
        return self.op("Add", self.named("MatMul", [states, weight], f"/{place}/MatMul"), bias)

    def layer_norm(self, name: str, states: str) -> str:
        width = [self.shape.hidden]
        scale = self.weights.add(f"{name}.weight", width, spread=0.1, centre=1.0)
        shift = self.weights.add(f"{name}.bias", width, spread=0.1)
        return self.op(
            "LayerNormalization", states, scale, shift, axis=-1, epsilon=LAYER_NORM_EPSILON
        )


def _model(shape: Shape, weights: _Weights) -> ModelProto:
    graph = _Graph(shape, weights)
    states = _embeddings(graph)
    padding = _padding(graph)
    for index in range(shape.layers):
        states = _layer(graph, f"encoder.layer.{index}", states, padding)
    first = graph.op("Gather", states, weights.constant(np.array(0)), axis=1)
    graph.named("LpNormalization", [first], "sentence_embedding", axis=-1, p=2)
    graph.named("Identity", [states], "token_embeddings")

    per_token = ["batch", "sequence"]
    return helper.make_model(
        helper.make_graph(
            graph.nodes,
            "synthetic-bge-m3",
            [
                helper.make_tensor_value_info(name, TensorProto.INT64, per_token)
                for name in ("input_ids", "attention_mask")
            ],
            [
                helper.make_tensor_value_info(
                    "sentence_embedding", TensorProto.FLOAT, ["batch", shape.hidden]
                ),
                helper.make_tensor_value_info(
                    "token_embeddings", TensorProto.FLOAT, [*per_token, shape.hidden]
                ),
            ],
            weights.tensors,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=9,
    )


def _padding(graph: _Graph) -> str:
    """What is added to attention scores, (batch, 1, 1, sequence): 0, or the least float."""
    real = "attention_mask"
    for axis in (1, 2):
        real = graph.op("Unsqueeze", real, graph.weights.constant(np.array([axis])))
    real = graph.op("Cast", real, to=TensorProto.FLOAT)
    return graph.op(
        "Mul",
        graph.op("Sub", graph.number(1.0), real),
        graph.number(float(np.finfo(np.float32).min)),
    )


def _embeddings(graph: _Graph) -> str:
    """Word, position and type rows; positions count real tokens from 2, padding stays on 1."""
    shape, weights = graph.shape, graph.weights
    counted = graph.op("CumSum", "attention_mask", weights.constant(np.array(1)))
    real = graph.op("Mul", counted, "attention_mask")
    places = graph.op("Add", real, weights.constant(np.array(PAD_ID)))

    def table(name: str, rows: int) -> str:
        return weights.add(f"embeddings.{name}.weight", [rows, shape.hidden], spread=1.0)

    words = graph.op("Gather", table("word_embeddings", shape.vocabulary), "input_ids")
    positions = graph.op("Gather", table("position_embeddings", shape.positions), places)
    summed = graph.op("Add", graph.op("Add", words, table("token_type_embeddings", 1)), positions)
    return graph.layer_norm("embeddings.LayerNorm", summed)


def _layer(graph: _Graph, name: str, states: str, padding: str) -> str:
    shape, constant = graph.shape, graph.weights.constant
    hidden, heads = shape.hidden, shape.attention_heads

    def split(part: str, order: Sequence[int]) -> str:
        flat = graph.linear(f"{name}.attention.self.{part}", states, hidden, hidden)
        parted = constant(np.array([0, 0, heads, hidden // heads]))
        return graph.op("Transpose", graph.op("Reshape", flat, parted), perm=order)

    query, value = split("query", [0, 2, 1, 3]), split("value", [0, 2, 1, 3])
    scores = graph.op("MatMul", query, split("key", [0, 2, 3, 1]))
    scaled = graph.op("Div", scores, graph.number((hidden // heads) ** 0.5))
    masked = graph.op("Add", scaled, padding)
    mixed = graph.op("MatMul", graph.op("Softmax", masked, axis=-1), value)
    joined = graph.op(
        "Reshape",
        graph.op("Transpose", mixed, perm=[0, 2, 1, 3]),
        constant(np.array([0, 0, hidden])),
    )
    attended = graph.layer_norm(
        f"{name}.attention.output.LayerNorm",
        graph.op(
            "Add", graph.linear(f"{name}.attention.output.dense", joined, hidden, hidden), states
        ),
    )
    wide = _gelu(
        graph, graph.linear(f"{name}.intermediate.dense", attended, hidden, shape.intermediate)
    )
    narrow = graph.linear(f"{name}.output.dense", wide, shape.intermediate, hidden)
    return graph.layer_norm(f"{name}.output.LayerNorm", graph.op("Add", narrow, attended))


def _gelu(graph: _Graph, states: str) -> str:
    """The exact one, by the error function, as exporters write it."""
    error = graph.op("Erf", graph.op("Div", states, graph.number(2**0.5)))
    doubled = graph.op("Mul", states, graph.op("Add", error, graph.number(1.0)))
    return graph.op("Mul", doubled, graph.number(0.5))


def _tokenizer(shape: Shape) -> Tokenizer:
    """One token per word ``w<number>``; any other word is ``<unk>``."""
    words = [f"w{index}" for index in range(shape.vocabulary - len(SPECIALS))]
    ids = {word: index for index, word in enumerate([*SPECIALS, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=BGE_M3.layers)
    parser.add_argument("--vocabulary", type=int, default=BGE_M3.vocabulary)
    arguments = parser.parse_args()
    shape = attrs.evolve(BGE_M3, layers=arguments.layers, vocabulary=arguments.vocabulary)
    started = time.perf_counter()
    graph_path = write_synthetic_bge_m3(arguments.directory, shape)
    size_bytes = sum(path.stat().st_size for path in graph_path.parent.iterdir())
    print(f"{graph_path}: {size_bytes / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
