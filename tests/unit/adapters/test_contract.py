"""The contract of a graph: known layouts are read, others refused with what they have."""

import numpy as np
import onnxruntime
import pytest
from bge_m3_server.adapters.models.contract import TensorSpec, read_contract
from bge_m3_server.adapters.models.onnx_file import GraphFile, TensorInfo, inspect_graph
from bge_m3_server.adapters.models.torch_weights import read_linear
from bge_m3_server.domain.errors import ContractError
from bge_m3_server.domain.types import GraphLayout, HeadProjections, Heads, Projection

from tests.support.tiny_models import write_tiny_model

TOKENS = TensorSpec(("batch", "sequence"), "tensor(int64)")
INPUTS = {"input_ids": TOKENS, "attention_mask": TOKENS}
NO_WEIGHTS = GraphFile(size_bytes=1, initializers={})


def floats(*shape):
    return TensorSpec(shape, "tensor(float)")


def linear(out, hidden):
    return Projection(np.zeros((out, hidden), np.float32), np.zeros(out, np.float32))


def weights(*, metadata=None, **initializers):
    return GraphFile(
        size_bytes=1,
        initializers={name.replace("__", "."): info for name, info in initializers.items()},
        metadata=metadata or {},
    )


STATES = {"last_hidden_state": floats("batch", "sequence", 8)}
BOTH_HEADS = HeadProjections(sparse=linear(1, 8), colbert=linear(8, 8))


def specs(arguments):
    return {item.name: TensorSpec(tuple(item.shape), item.type) for item in arguments}


@pytest.mark.parametrize(
    ("layout", "expected", "outputs"),
    [
        (
            "sentence_and_tokens",
            GraphLayout.SENTENCE_AND_TOKENS,
            ("sentence_embedding", "token_embeddings", "token_embeddings"),
        ),
        ("last_hidden_state", GraphLayout.LAST_HIDDEN_STATE, ("last_hidden_state",) * 3),
        (
            "ready_heads",
            GraphLayout.READY_HEADS,
            ("dense_vecs", "sparse_weights", "colbert_vecs"),
        ),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_contract_of_a_real_graph(tmp_path, layout, expected, outputs, precision):
    """What ONNX Runtime and the file say of a published layout becomes its contract."""
    path = write_tiny_model(
        tmp_path, layout, precision=precision, external_data=True, ask_for_token_types=True
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    contract = read_contract(
        specs(session.get_inputs()),
        specs(session.get_outputs()),
        inspect_graph(path),
        HeadProjections(
            sparse=read_linear(tmp_path / "sparse_linear.pt"),
            colbert=read_linear(tmp_path / "colbert_linear.pt"),
        ),
    )

    assert contract.layout is expected
    assert contract.outputs_by_head == dict(
        zip((Heads.DENSE, Heads.SPARSE, Heads.COLBERT), outputs, strict=True)
    )
    assert contract.input_names == ("input_ids", "attention_mask", "token_type_ids")
    assert contract.hidden_size == 16
    assert contract.max_tokens == 64
    assert contract.precision == precision
    assert contract.attention_heads is None


def test_heads_without_weights_are_not_promised():
    """Without its projection a hidden state gives only the dense head."""
    contract = read_contract(INPUTS, STATES, NO_WEIGHTS, HeadProjections())

    assert contract.heads == Heads.DENSE


def test_ready_heads_may_be_a_subset():
    """A graph with dense and sparse heads of its own has those, whatever lies beside it."""
    outputs = {"dense_vecs": floats("b", 8), "sparse_weights": floats("b", "s")}

    contract = read_contract(INPUTS, outputs, NO_WEIGHTS, HeadProjections(colbert=linear(4, 4)))

    assert contract.layout is GraphLayout.READY_HEADS
    assert contract.heads == Heads.DENSE | Heads.SPARSE


def test_extra_outputs_do_no_harm():
    """An output that nobody knows is left alone when a layout is complete."""
    outputs = {"present.0.key": floats("b", 2, "s", 4), "pooler_output": floats("b", 8), **STATES}

    contract = read_contract(INPUTS, outputs, NO_WEIGHTS, BOTH_HEADS)

    assert set(contract.outputs_by_head.values()) == {"last_hidden_state"}


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"logits": floats("b", 2)},
        {"sentence_embedding": floats("b", 8)},
        {"token_embeddings": floats("b", "s", 8)},
        {"sparse_weights": floats("b", "s"), "colbert_vecs": floats("b", "s", 8)},
        {"last_hidden_state": floats("b", 8)},
        {"dense_vecs": floats("b", "s", 8)},
        {"last_hidden_state": TensorSpec(("b", "s", 8), "tensor(int8)")},
    ],
    ids=str,
)
def test_an_unknown_layout_is_refused_with_what_it_has(outputs):
    """The message lists the graph's inputs and outputs, and each layout that was expected."""
    with pytest.raises(ContractError, match="fit no known layout") as refused:
        read_contract(INPUTS, outputs, NO_WEIGHTS, BOTH_HEADS)

    message = str(refused.value)
    for name, spec in {**INPUTS, **outputs}.items():
        assert f"{name} {spec}" in message
    for expected in ("sentence_embedding", "last_hidden_state", "dense_vecs", "attention_mask"):
        assert expected in message


def test_shapes_and_types_are_shown_plainly():
    """A refusal reads ``float32[batch, ?, 8]``."""
    assert str(TensorSpec(("batch", None, 8), "tensor(float)")) == "float32[batch, ?, 8]"


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"input_ids": TOKENS}, "does not take attention_mask"),
        ({}, "does not take input_ids"),
        ({**INPUTS, "pixel_values": TOKENS}, "unknown input pixel_values"),
        ({**INPUTS, "past.0.key": TOKENS}, r"unknown input past\.0\.key"),
        (
            {**INPUTS, "input_ids": TensorSpec(("b", "s"), "tensor(int32)")},
            "input_ids is int32, not int64",
        ),
    ],
)
def test_inputs_that_nobody_can_give_are_refused(inputs, told):
    """A graph gets ids, a mask, token types and positions as int64, and nothing else."""
    with pytest.raises(ContractError, match=told):
        read_contract(inputs, STATES, NO_WEIGHTS, BOTH_HEADS)


def test_optional_inputs_are_kept_by_name():
    """`token_type_ids` and `position_ids` are asked for only where the graph does."""
    inputs = {**INPUTS, "position_ids": TOKENS}

    contract = read_contract(inputs, STATES, NO_WEIGHTS, BOTH_HEADS)

    assert contract.input_names == ("input_ids", "attention_mask", "position_ids")


@pytest.mark.parametrize(
    ("projections", "head"),
    [
        (HeadProjections(sparse=linear(1, 16)), "sparse"),
        (HeadProjections(sparse=linear(2, 8)), "sparse"),
        (HeadProjections(colbert=linear(8, 16)), "colbert"),
    ],
)
def test_heads_of_another_model_are_refused(projections, head):
    """Weights whose width is not the graph's are named, with the width that is needed."""
    with pytest.raises(ContractError, match=f"the {head} head's weight has shape .*8"):
        read_contract(INPUTS, STATES, NO_WEIGHTS, projections)


def test_a_colbert_head_may_be_narrower():
    """ColBERT may project to fewer dimensions than the hidden state has."""
    contract = read_contract(INPUTS, STATES, NO_WEIGHTS, HeadProjections(colbert=linear(4, 8)))

    assert Heads.COLBERT in contract.heads


def test_outputs_of_two_widths_are_refused():
    """Sentence and tokens come from one hidden state."""
    outputs = {"sentence_embedding": floats("b", 8), "token_embeddings": floats("b", "s", 16)}

    with pytest.raises(ContractError, match="differ in their hidden size"):
        read_contract(INPUTS, outputs, NO_WEIGHTS, HeadProjections())


def test_a_dynamic_width_is_read_from_the_embeddings():
    """An export that left the last axis open still has its position table."""
    outputs = {"last_hidden_state": floats("b", "s", "hidden")}
    graph = weights(embeddings__position_embeddings__weight=TensorInfo((514, 8), "float32"))

    assert read_contract(INPUTS, outputs, graph, BOTH_HEADS).hidden_size == 8
    with pytest.raises(ContractError, match="hidden size is unknown"):
        read_contract(INPUTS, outputs, NO_WEIGHTS, BOTH_HEADS)


def test_positions_of_bge_m3_carry_8192_tokens():
    """The table's first two rows are XLM-R's offset; scales beside a quantised table are not it."""
    graph = weights(
        position_embeddings__weight_scale=TensorInfo((), "float32"),
        position_embeddings__weight_quantized=TensorInfo((8194, 1024), "uint8"),
        position_embeddings__weight_zero_point=TensorInfo((1, 1), "uint8"),
    )

    contract = read_contract(
        INPUTS, {"last_hidden_state": floats("b", "s", 1024)}, graph, HeadProjections()
    )

    assert contract.max_tokens == 8192
    assert contract.attention_heads == 16
    assert contract.precision == "int8"


def test_metadata_overrules_what_is_derived():
    """A model that states its limits is believed."""
    graph = weights(
        metadata={"bge_m3_server.max_tokens": "512", "bge_m3_server.attention_heads": "12"},
        position_embeddings=TensorInfo((512, 8), "float32"),
    )

    contract = read_contract(INPUTS, STATES, graph, BOTH_HEADS)

    assert contract.max_tokens == 512
    assert contract.attention_heads == 12


@pytest.mark.parametrize("value", ["", "0", "-1", "many", "5.0"])
def test_metadata_that_is_no_count_is_refused(value):
    """A limit that cannot be read stops the start."""
    graph = weights(metadata={"bge_m3_server.max_tokens": value})

    with pytest.raises(ContractError, match=r"bge_m3_server\.max_tokens is"):
        read_contract(INPUTS, STATES, graph, BOTH_HEADS)


def test_no_position_table_means_no_known_limit():
    """Where nothing tells the limit, none is made up."""
    contract = read_contract(INPUTS, STATES, NO_WEIGHTS, BOTH_HEADS)

    assert contract.max_tokens is None
    assert contract.precision == "fp32"


def test_precision_is_that_of_most_weights_unless_told():
    """Norms in float32 do not hide half-precision matrices; an explicit name wins."""
    graph = weights(
        word_embeddings=TensorInfo((100, 8), "float16"),
        norm=TensorInfo((8,), "float32"),
        ids=TensorInfo((10_000,), "int64"),
    )

    assert read_contract(INPUTS, STATES, graph, BOTH_HEADS).precision == "fp16"
    assert read_contract(INPUTS, STATES, graph, BOTH_HEADS, "int8").precision == "int8"
