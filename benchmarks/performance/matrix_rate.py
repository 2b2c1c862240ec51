"""How fast this machine multiplies matrices of BGE-M3's shapes: what no engine can beat.

One multiplication with constant weights per model, 1024 tokens, in each precision and each library
that is installed; the best of several runs. A forward pass has, per layer, four of 1024×1024 and
one each of 1024×4096 and 4096×1024: `layer_rate` weighs the shapes so.

    .venv/bin/python -m benchmarks.performance.matrix_rate
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from benchmarks.performance.machine import this_machine

TOKENS = 1024
SHAPES: Mapping[tuple[int, int], int] = {(1024, 1024): 4, (1024, 4096): 1, (4096, 1024): 1}
"""(in, out) of a weight → how many of them a layer has."""

BLOCK = 128
GFLOP = 1e9
FLOP_PER_TOKEN = 24 * 2 * sum(ins * outs * count for (ins, outs), count in SHAPES.items())
"""Of BGE-M3's 24 layers, without attention scores."""

Run = Callable[[NDArray[np.float32]], object]


@attrs.frozen
class MatrixRate:
    """GFLOP/s of one kind of multiplication; `shape` is (tokens, in, out)."""

    kind: str
    shape: tuple[int, int, int]
    gflop_per_second: float


def measure_rates(threads: int, repeats: int = 15) -> list[MatrixRate]:
    """Every kind on every shape."""
    found = []
    for ins, outs in SHAPES:
        generator = np.random.default_rng(0)
        weight = generator.normal(0, ins**-0.5, (ins, outs)).astype(np.float32)
        states = generator.normal(0, 1, (TOKENS, ins)).astype(np.float32)
        for kind, run in _runs(weight, threads):
            seconds = min(_seconds(run, states) for _ in range(repeats))
            rate = 2 * TOKENS * ins * outs / seconds / GFLOP
            found.append(MatrixRate(kind, (TOKENS, ins, outs), rate))
    return found


def layer_rates(rates: list[MatrixRate]) -> dict[str, float]:
    """GFLOP/s of each kind over the multiplications of one layer."""
    flop = {shape: 2 * TOKENS * shape[0] * shape[1] * count for shape, count in SHAPES.items()}
    return {
        kind: sum(flop.values())
        / sum(flop[rate.shape[1:]] / rate.gflop_per_second for rate in rates if rate.kind == kind)
        for kind in dict.fromkeys(rate.kind for rate in rates)
    }


def _seconds(run: Run, states: NDArray[np.float32]) -> float:
    started = time.perf_counter()
    run(states)
    return time.perf_counter() - started


def _runs(weight: NDArray[np.float32], threads: int) -> Iterator[tuple[str, Run]]:
    yield "ONNX Runtime fp32", _onnxruntime(_float_model(weight), threads)
    yield "ONNX Runtime int8, per tensor", _onnxruntime(_integer_model(weight), threads)
    blocks = _blocks_model(weight)
    yield f"ONNX Runtime 8 bit, blocks of {BLOCK}", _onnxruntime(blocks, threads)
    try:
        import openvino  # noqa: F401, PLC0415  an engine that need not be installed
    except ImportError:
        return
    compiled = partial(_openvino, threads=threads)
    yield "OpenVINO fp32", compiled(_float_model(weight), precision="f32", group=0)
    yield "OpenVINO bf16", compiled(_float_model(weight), precision="bf16", group=0)
    yield (
        f"OpenVINO int8, activations in groups of {BLOCK}",
        compiled(blocks, precision="bf16", group=BLOCK),
    )


def _onnxruntime(model: ModelProto, threads: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda states: session.run(None, {"states": states})


def _openvino(model: ModelProto, precision: str, group: int, threads: int) -> Run:
    import openvino  # noqa: PLC0415  an engine that need not be installed

    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString(), b""),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group),
            "INFERENCE_NUM_THREADS": str(threads),
        },
    )
    request = compiled.create_infer_request()
    return lambda states: request.infer({"states": states}, share_inputs=True)


def _float_model(weight: NDArray[np.float32]) -> ModelProto:
    return _model(
        weight.shape,
        [helper.make_node("MatMul", ["states", "weight"], ["out"])],
        {"weight": weight},
    )


def _integer_model(weight: NDArray[np.float32]) -> ModelProto:
    """What `quantize_dynamic` makes: activations are quantised on the way, in one scale."""
    scale = np.float32(np.abs(weight).max() / 127)
    constants = {
        "weight": (weight / scale).round().astype(np.int8),
        "scale": np.array(scale),
        "zero": np.array(0, np.int8),
    }
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["states"], ["a", "a_scale", "a_zero"]),
        helper.make_node("MatMulInteger", ["a", "weight", "a_zero", "zero"], ["product"]),
        helper.make_node("Cast", ["product"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["a_scale", "scale"], ["scales"]),
        helper.make_node("Mul", ["float", "scales"], ["out"]),
    ]
    return _model(weight.shape, nodes, constants)


def _blocks_model(weight: NDArray[np.float32]) -> ModelProto:
    """8-bit weights with a scale per block of inputs, around 128, computed in integers."""
    ins, outs = weight.shape
    blocks = weight.T.reshape(outs, ins // BLOCK, BLOCK)
    scales = np.abs(blocks).max(axis=2) / 127
    quantised = (blocks / scales[..., None]).round() + 128
    constants = {
        "weight": quantised.astype(np.uint8),
        "scales": scales.astype(np.float32).reshape(-1),
    }
    node = helper.make_node(
        "MatMulNBits",
        ["states", "weight", "scales"],
        ["out"],
        domain="com.microsoft",
        K=ins,
        N=outs,
        bits=8,
        block_size=BLOCK,
        accuracy_level=4,
    )
    return _model((ins, outs), [node], constants)


def _model(
    shape: tuple[int, ...], nodes: list[NodeProto], constants: Mapping[str, NDArray[np.generic]]
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "multiplication",
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, [TOKENS, shape[0]])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [TOKENS, shape[1]])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    machine = this_machine()
    parser.add_argument("--threads", type=int, default=machine.cpus)
    arguments = parser.parse_args()
    print(machine.line())
    rates = measure_rates(arguments.threads)
    for rate in rates:
        print(f"{rate.kind:48} {'×'.join(map(str, rate.shape)):16} {rate.gflop_per_second:8.0f}")
    for kind, rate in layer_rates(rates).items():
        print(
            f"{kind:48} {'a layer':16} {rate:8.0f} GFLOP/s = {rate / FLOP_PER_TOKEN * GFLOP:.0f}"
            " tokens/s of BGE-M3"
        )


if __name__ == "__main__":
    main()
