"""Small graphs with a known answer, and texts to run them on."""

import numpy as np
from bge_m3_server.domain.types import TokenizedText
from onnx import TensorProto, helper, numpy_helper


def texts(*lengths):
    """A text of each length, made of words that every tiny model knows."""
    rng = np.random.default_rng(sum(lengths))
    return [TokenizedText(np.array([0, *rng.integers(4, 60, length - 2), 2])) for length in lengths]


def write_graph(path, inputs, nodes, outputs, initializers=()):
    """A graph of int64 (batch, seq) inputs and float outputs of the given shapes."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"]) for name in inputs],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in outputs.items()
        ],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def echo_graph(path, inputs):
    """A graph whose last_hidden_state holds, per token, the value of each input."""
    last = numpy_helper.from_array(np.array([-1]), "last")
    nodes = []
    for name in inputs:
        nodes += [
            helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", [f"{name}.float", "last"], [f"{name}.column"]),
        ]
    columns = [f"{name}.column" for name in inputs]
    nodes.append(helper.make_node("Concat", columns, ["last_hidden_state"], axis=-1))
    return write_graph(path, inputs, nodes, {"last_hidden_state": ["b", "s", len(inputs)]}, [last])


def graph_for_texts_of(tokens, path):
    """A graph that loads and runs, but fails on texts of any other length than `tokens`."""
    initializers = [numpy_helper.from_array(np.ones((1, tokens), np.float32), "one_per_token")]
    nodes = [
        helper.make_node("Add", ["input_ids", "attention_mask"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["floats", "one_per_token"], ["dense_vecs"]),
    ]
    inputs = ["input_ids", "attention_mask"]
    return write_graph(path, inputs, nodes, {"dense_vecs": ["b", tokens]}, initializers)
