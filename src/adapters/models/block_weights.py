"""Weights of matrix products as 8-bit integers with a scale for each block of a column."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ...domain.errors import PreparationError
from .weights import Array, Weights, WeightsFile

_ZERO_POINT = 128
_LARGEST = 127
_INT8_ACTIVATIONS = 4
"""`accuracy_level` of `MatMulNBits`: activations are quantised, block by block, as well."""

_MATRIX_AXES = 2


def quantize_matmuls(
    model: onnx.ModelProto, weights: Weights, file: WeightsFile, block_size: int
) -> None:
    """Turn each product with a constant float32 matrix into `MatMulNBits`; weights go to `file`.

    One matrix is in memory at a time. `block_size`: values of a column that share a scale.

    Raises:
        PreparationError: there is no such product, so nothing is won.
    """
    graph = model.graph
    is_any = False
    small = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in small:
            continue
        name = node.input[1]
        tensor = small[name]
        if len(tensor.dims) != _MATRIX_AXES or tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        matrix = weights.array(name) if name in weights else numpy_helper.to_array(tensor)
        blocks, scales = quantize(matrix, block_size)
        quantized = (
            file.add(f"{node.output[0]}_blocks", blocks),
            file.add(f"{node.output[0]}_scales", scales),
        )
        graph.initializer.extend(quantized)
        is_any = True
        rows, columns = matrix.shape
        node.CopyFrom(
            helper.make_node(
                "MatMulNBits",
                [node.input[0], *(part.name for part in quantized)],
                list(node.output),
                name=node.name,
                domain="com.microsoft",
                K=rows,
                N=columns,
                bits=8,
                block_size=block_size,
                accuracy_level=_INT8_ACTIVATIONS,
            )
        )
    if not is_any:
        raise PreparationError("no product of its graph has a constant float32 matrix")
    if not any(opset.domain == "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def quantize(matrix: Array, block_size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A float32 matrix (rows, columns) → blocks (columns, n, block) and scales (columns × n).

    Symmetric around 128. Rows are filled up with zeros to whole blocks.
    """
    rows, columns = matrix.shape
    count = -(-rows // block_size)
    padded = np.zeros((columns, count * block_size), np.float32)
    padded[:, :rows] = matrix.T
    blocks = padded.reshape(columns, count, block_size)
    scales = np.abs(blocks).max(axis=2) / np.float32(_LARGEST)
    steps = np.divide(
        blocks, scales[..., None], out=np.zeros_like(blocks), where=scales[..., None] > 0
    )
    return (np.rint(steps) + _ZERO_POINT).astype(np.uint8), scales.reshape(-1)


def halve_tables(model: onnx.ModelProto, weights: Weights, file: WeightsFile) -> None:
    """Turn large float32 tables, of which rows are gathered, into float16; they go to `file`.

    This rounds a tenth as much as 8-bit weights do. Rows are widened as they are gathered, so a
    mapped table takes half the memory and half the disk.
    """
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "Gather" or node.input[0] not in weights:
            continue
        name, rows = node.input[0], node.output[0]
        if weights.tensors[name].data_type != onnx.TensorProto.FLOAT:
            continue
        node.input[0], node.output[0] = f"{name}_half", f"{rows}_half"
        nodes.append(helper.make_node("Cast", [node.output[0]], [rows], to=onnx.TensorProto.FLOAT))
        if all(tensor.name != node.input[0] for tensor in graph.initializer):
            half = weights.array(name).astype(np.float16)
            graph.initializer.append(file.add(node.input[0], half))
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def store_remaining(model: onnx.ModelProto, weights: Weights, file: WeightsFile) -> None:
    """Write the large tensors that are still used, and forget those that are not."""
    used = set(_names_in_use(model.graph))
    kept = []
    for tensor in model.graph.initializer:
        if tensor.name not in used:
            continue
        if tensor.name in weights:
            kept.append(file.add(tensor.name, weights.array(tensor.name)))
        else:
            kept.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _names_in_use(graph: onnx.GraphProto) -> list[str]:
    names = [output.name for output in graph.output]
    for node in graph.node:
        names += node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names += _names_in_use(attribute.g)
    return names
