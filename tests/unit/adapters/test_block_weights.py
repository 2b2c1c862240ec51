"""8-bit blocks: exact to half a step, and what ONNX Runtime makes of them."""

import numpy as np
import onnx
import onnxruntime
import pytest
from bge_m3_server.adapters.models.block_weights import (
    halve_tables,
    quantize,
    quantize_matmuls,
    store_remaining,
)
from bge_m3_server.adapters.models.weights import LARGE_BYTES, WeightsFile, read_structure
from bge_m3_server.domain.errors import CorruptFileError, PreparationError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper

MATRICES = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=70),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)


def dequantized(blocks, scales, rows):
    columns, count, size = blocks.shape
    values = (blocks.astype(np.float32) - 128) * scales.reshape(columns, count, 1)
    return values.reshape(columns, count * size)[:, :rows].T


@given(matrix=MATRICES, block_size=st.sampled_from([16, 32, 128]))
def test_no_weight_moves_further_than_half_a_step(matrix, block_size):
    """Every weight comes back within half the scale of its block, and none of them wraps."""
    blocks, scales = quantize(matrix, block_size)

    rows, columns = matrix.shape
    assert blocks.shape == (columns, -(-rows // block_size), block_size)
    assert scales.shape == (blocks.shape[0] * blocks.shape[1],)
    assert scales.dtype == np.float32
    of_rows = np.repeat(scales.reshape(columns, -1), block_size, axis=1)[:, :rows].T
    error = np.abs(matrix - dequantized(blocks, scales, rows))
    assert (error <= of_rows * np.float32(0.5001) + np.abs(matrix) * np.float32(1e-6)).all()


def test_rows_are_filled_up_with_zeros():
    """Rows that fill no block are followed by the value that stands for zero."""
    blocks, _ = quantize(np.ones((33, 2), np.float32), 32)
    assert blocks.shape == (2, 2, 32)
    assert (blocks[:, 0] == 255).all()
    assert (blocks[:, 1, 0] == 255).all()
    assert (blocks[:, 1, 1:] == 128).all()


def test_a_block_of_zeros_stays_zero():
    """Without any value there is no step to divide by."""
    blocks, scales = quantize(np.zeros((32, 3), np.float32), 32)
    assert (blocks == 128).all()
    assert (scales == 0).all()


def write_products(path, weights, element_type=TensorProto.FLOAT):
    """A graph of x · weights[0] · weights[1] …, each an initializer."""
    nodes, tensors = [], []
    for index, weight in enumerate(weights):
        tensors.append(numpy_helper.from_array(weight, f"weight_{index}"))
        source = f"state_{index - 1}" if index else "x"
        nodes.append(helper.make_node("MatMul", [source, f"weight_{index}"], [f"state_{index}"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [value("x", element_type, ["rows", None])],
        [value(f"state_{len(weights) - 1}", element_type, None)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def quantized(source, target, block_size=32):
    model, weights = read_structure(source)
    with target.with_name("data").open("wb") as data:
        file = WeightsFile(data, "data")
        quantize_matmuls(model, weights, file, block_size)
        store_remaining(model, weights, file)
    target.write_bytes(model.SerializeToString())
    return onnx.load(target, load_external_data=False)


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("rows", [32, 50, 2200])
def test_onnx_runtime_computes_the_product(tmp_path, rows):
    """Inline matrices and those so large that they are kept apart give the source's product."""
    rng = np.random.default_rng(rows)
    columns = 1024
    matrix = rng.normal(0, 1, (rows, columns)).astype(np.float32)
    assert (matrix.nbytes > LARGE_BYTES) == (rows == 2200)
    source = write_products(tmp_path / "source.onnx", [matrix])
    target = tmp_path / "target.onnx"

    model = quantized(source, target)

    assert [node.op_type for node in model.graph.node] == ["MatMulNBits"]
    assert {tensor.name for tensor in model.graph.initializer} == {
        "state_0_blocks",
        "state_0_scales",
    }
    x = rng.normal(0, 1, (7, rows)).astype(np.float32)
    expected, found = run(source, x), run(target, x)
    cosines = (expected * found).sum(1) / np.linalg.norm(expected, axis=1)
    assert (cosines / np.linalg.norm(found, axis=1) > 0.9995).all()
    # Both factors are rounded to 1/127 of their largest value, by chance up or down.
    assert np.abs(expected - found).max() < rows**0.5 * 0.1


def test_one_matrix_may_serve_two_products(tmp_path):
    """A shared weight is written for each of its products, and the source's is forgotten."""
    matrix = np.eye(32, dtype=np.float32)
    source = write_products(tmp_path / "source.onnx", [matrix, matrix])
    model = onnx.load(source)
    model.graph.node[1].input[1] = "weight_0"
    del model.graph.initializer[1]
    onnx.save(model, source)

    made = quantized(source, tmp_path / "target.onnx")

    assert [node.op_type for node in made.graph.node] == ["MatMulNBits"] * 2
    assert "weight_0" not in {tensor.name for tensor in made.graph.initializer}
    x = np.random.default_rng(0).normal(0, 1, (3, 32)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path / "target.onnx", x), x, atol=0.05)


def test_what_is_no_matrix_stays(tmp_path):
    """A vector and a stack of matrices are multiplied as before, beside a matrix that is not."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, 1, (32, 32)).astype(np.float32)
    stack = rng.normal(0, 1, (1, 32, 32)).astype(np.float32)
    vector = rng.normal(0, 1, 32).astype(np.float32)
    write_products(tmp_path / "source.onnx", [matrix, stack, vector])

    made = quantized(tmp_path / "source.onnx", tmp_path / "target.onnx")

    assert [node.op_type for node in made.graph.node] == ["MatMulNBits", "MatMul", "MatMul"]
    kept = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer if "weight" in t.name}
    np.testing.assert_array_equal(kept["weight_1"], stack)
    np.testing.assert_array_equal(kept["weight_2"], vector)


def test_a_graph_without_float32_matrices_is_refused(tmp_path):
    """Where nothing can become smaller, nobody is told that it did."""
    half = np.ones((32, 32), np.float16)
    write_products(tmp_path / "s.onnx", [half], element_type=TensorProto.FLOAT16)
    with pytest.raises(PreparationError, match="constant float32 matrix"):
        quantized(tmp_path / "s.onnx", tmp_path / "t.onnx")


def test_a_file_that_is_no_model_is_called_damaged(tmp_path):
    """The message names the file."""
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(CorruptFileError, match=r"model\.onnx"):
        read_structure(tmp_path / "model.onnx")


def test_large_tables_are_kept_in_half_precision(tmp_path):
    """Rows come out as float32, rounded to float16; a table used twice is stored once."""
    table = np.random.default_rng(1).standard_normal((LARGE_BYTES // 32 + 1, 8)).astype(np.float32)
    small = np.arange(16, dtype=np.float32).reshape(2, 8)
    int64, float32 = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["left"]),
            helper.make_node("Gather", ["table", "ids"], ["right"]),
            helper.make_node("Gather", ["small", "kind"], ["third"]),
            helper.make_node("Sum", ["left", "right", "third"], ["sum"]),
        ],
        "tables",
        [helper.make_tensor_value_info(name, int64, ["n"]) for name in ("ids", "kind")],
        [helper.make_tensor_value_info("sum", float32, ["n", 8])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(small, "small")],
    )
    onnx.save_model(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "source.onnx",
    )

    model, weights = read_structure(tmp_path / "source.onnx")
    with (tmp_path / "halved.onnx_data").open("wb") as data:
        file = WeightsFile(data, "halved.onnx_data")
        halve_tables(model, weights, file)
        store_remaining(model, weights, file)
    (tmp_path / "halved.onnx").write_bytes(model.SerializeToString())

    ids, kind = np.array([0, 5, len(table) - 1]), np.array([0, 1, 1])
    session = onnxruntime.InferenceSession(tmp_path / "halved.onnx")
    (found,) = session.run(None, {"ids": ids, "kind": kind})
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, 2 * table.astype(np.float16)[ids] + small[kind])
    assert (tmp_path / "halved.onnx_data").stat().st_size == table.nbytes // 2
