"""Block-wise 8-bit weights as ONNX Runtime's quantiser writes them, without its dependencies."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BITS = 8
ZERO_POINT = 128
"""What a symmetric quantisation to unsigned values takes for zero, unless told."""


def write_eight_bit(source, target, block_size=128):
    """Write `source` to `target` with its weight matrices as ``MatMulNBits``.

    Weights (K, N) become (N, blocks, block_size) uint8, padded with zeros, with a float32 scale per
    block: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
    """
    model = onnx.load(source)
    matrices = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT
    }
    for index, node in enumerate(model.graph.node):
        if node.op_type != "MatMul" or node.input[1] not in matrices:
            continue
        name = node.input[1]
        weight = numpy_helper.to_array(matrices[name])
        model.graph.initializer.remove(matrices[name])
        rows, columns = weight.shape
        blocks = -(-rows // block_size)
        padded = np.zeros((columns, blocks * block_size), np.float32)
        padded[:, :rows] = weight.T
        padded = padded.reshape(columns, blocks, block_size)
        scales = np.abs(padded).max(axis=2, keepdims=True) / (ZERO_POINT - 1)
        values = np.rint(padded / np.where(scales == 0, 1, scales)) + ZERO_POINT
        model.graph.initializer.extend(
            [
                numpy_helper.from_array(values.astype(np.uint8), f"{name}_Q8"),
                numpy_helper.from_array(scales.reshape(-1).astype(np.float32), f"{name}_scales"),
            ]
        )
        quantised = helper.make_node(
            "MatMulNBits",
            [node.input[0], f"{name}_Q8", f"{name}_scales"],
            list(node.output),
            domain="com.microsoft",
            K=rows,
            N=columns,
            bits=BITS,
            block_size=block_size,
            accuracy_level=4,
        )
        model.graph.node[index].CopyFrom(quantised)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    target.write_bytes(model.SerializeToString())
    return target
