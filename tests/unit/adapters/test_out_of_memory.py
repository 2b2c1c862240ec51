"""An allocation that fails inside ONNX Runtime is told from its other failures."""

import numpy as np
import pytest
from bge_m3_server.adapters.ort.session import Provider, SessionSettings, load_backend
from bge_m3_server.adapters.out_of_memory import is_out_of_memory
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.errors import OutOfMemoryError
from bge_m3_server.domain.types import HeadProjections, TokenizedText
from onnx import TensorProto, helper, numpy_helper, save


def greedy_graph(path):
    """A graph that wants 2**46 bytes per token whenever it runs."""
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask"], ["tokens"], keepdims=0),
        helper.make_node("Unsqueeze", ["tokens", "first"], ["count"]),
        helper.make_node("Mul", ["count", "numbers_per_token"], ["numbers"]),
        helper.make_node("ConstantOfShape", ["numbers"], ["zeros"]),
        helper.make_node("Reshape", ["zeros", "rows"], ["dense_vecs"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("dense_vecs", TensorProto.FLOAT, ["b", 3])
    constants = [
        numpy_helper.from_array(np.array([0]), "first"),
        numpy_helper.from_array(np.array([-1, 3]), "rows"),
        numpy_helper.from_array(np.array([2**44]), "numbers_per_token"),
    ]
    graph = helper.make_graph(nodes, "greedy", inputs, [output], constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_pass_that_cannot_have_its_memory_says_so(tmp_path):
    """The engine acts on the type, whatever words ONNX Runtime finds."""
    settings = SessionSettings(intra_threads=1, cache_dir=tmp_path)
    backend = load_backend(
        greedy_graph(tmp_path / "graph.onnx"),
        HeadProjections(),
        settings,
        [Provider("CPUExecutionProvider")],
    )
    with pytest.raises(OutOfMemoryError, match=r"shape \(1, 5\)"):
        backend.run(pad([TokenizedText(np.arange(5))]), ["dense_vecs"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: Out Of Memory"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 8"), True),
        (RuntimeError("Failed to allocate 134217728 bytes of memory"), True),
        (RuntimeError("invalid dimension"), False),
    ],
)
def test_other_failures_are_not_taken_for_it(error, expected):
    """What the CPU and CUDA providers say about memory, and what they say otherwise."""
    assert is_out_of_memory(error) is expected
