"""Graphs of separate operations → one attention operation per layer, which needs no mask."""

import copy
import logging

import onnx
from onnx import helper

logger = logging.getLogger(__name__)

_MULTI_HEAD_ATTENTION = "MultiHeadAttention"
_KEY_PADDING_MASK = 4
"""Place of the mask among the inputs of ONNX Runtime's `MultiHeadAttention`."""

_HAS_NO_PADDING = "has_no_padding"


def fuse(model: onnx.ModelProto, attention_heads: int, hidden_size: int) -> onnx.ModelProto | None:
    """The model with attention, layer normalisation and activation as one operation each.

    ONNX Runtime's own transformer optimiser does it. None if it does not know this graph: unless
    every softmax went into an attention operation, nothing is won.
    """
    # Heavy, and of no use to a server whose model is prepared already.
    from onnxruntime.transformers.fusion_options import FusionOptions  # noqa: PLC0415
    from onnxruntime.transformers.optimizer import optimize_model  # noqa: PLC0415

    options = FusionOptions("bert")
    options.use_multi_head_attention = True
    layers = _count(model, "Softmax")
    try:
        fused: onnx.ModelProto = optimize_model(
            model,
            model_type="bert",
            num_heads=attention_heads,
            hidden_size=hidden_size,
            optimization_options=options,
            opt_level=0,
        ).model
    except Exception as error:  # noqa: BLE001  it fails in as many ways as there are graphs
        logger.warning("the graph cannot be fused: %r", error)
        return None
    if not layers or _count(fused, _MULTI_HEAD_ATTENTION) != layers or _count(fused, "Softmax"):
        logger.warning(
            "the graph's attention is of an unknown form and stays as it is",
            extra={"fields": {"layers": layers, "fused": _count(fused, _MULTI_HEAD_ATTENTION)}},
        )
        return None
    return fused


def make_mask_optional(model: onnx.ModelProto, hidden_size: int) -> None:
    """Let each attention operation choose: without padding it runs without a mask.

    Only then does ONNX Runtime's CPU provider attend block by block, in memory linear in the
    length. Weights are outside the choice, so there is one copy of them.
    """
    nodes: list[onnx.NodeProto] = [
        helper.make_node("ReduceMin", ["attention_mask"], ["least_mask"], keepdims=0),
        helper.make_node("Cast", ["least_mask"], [_HAS_NO_PADDING], to=onnx.TensorProto.BOOL),
    ]
    for node in model.graph.node:
        is_masked = (
            node.op_type == _MULTI_HEAD_ATTENTION
            and len(node.input) > _KEY_PADDING_MASK
            and node.input[_KEY_PADDING_MASK]
        )
        nodes.append(_choice(node, hidden_size) if is_masked else copy.deepcopy(node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _choice(node: onnx.NodeProto, hidden_size: int) -> onnx.NodeProto:
    masked, free = copy.deepcopy(node), copy.deepcopy(node)
    del free.input[_KEY_PADDING_MASK:]
    return helper.make_node(
        "If",
        [_HAS_NO_PADDING],
        list(node.output),
        name=f"{node.name}_by_mask",
        then_branch=_branch(free, "without_mask", hidden_size),
        else_branch=_branch(masked, "with_mask", hidden_size),
    )


def _branch(node: onnx.NodeProto, suffix: str, hidden_size: int) -> onnx.GraphProto:
    output = f"{node.output[0]}_{suffix}"
    node.output[0] = output
    value = helper.make_tensor_value_info(
        output, onnx.TensorProto.FLOAT, ["batch", "sequence", hidden_size]
    )
    return helper.make_graph([node], suffix, [], [value])


def _count(model: onnx.ModelProto, kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)
