"""Tiny but real models: an XLM-R-like ONNX graph, its tokenizer and its head weights.

The files have the names, layouts and formats of the published BGE-M3 exports, in other sizes.
"""

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CONSTANT_FILE = "Constant_7_attr__value"
"""External file of a tensor that is a node's attribute, as in the BAAI repository."""

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"


def write_tiny_model(  # noqa: PLR0913 (a model has that many sides)
    directory: Path,
    layout: str = "sentence_and_tokens",
    *,
    hidden: int = 16,
    positions: int = 66,
    vocabulary: int = 64,
    precision: str = "fp32",
    external_data: bool = False,
    ask_for_token_types: bool = False,
    seed: int = 0,
) -> Path:
    """Write a model into `directory` and return the path of its graph.

    `layout`: ``sentence_and_tokens``, ``last_hidden_state`` or ``ready_heads``. All three compute
    the same function of the same weights for one `seed`. `positions` rows of the position table
    allow texts of `positions` - 2 tokens. Besides the graph (``onnx/model.onnx``, or
    ``onnx/model_fp16.onnx`` for fp16 weights) the directory gets ``tokenizer.json``,
    ``sparse_linear.pt`` and ``colbert_linear.pt``.
    """
    weights = _Weights.random(hidden, positions, vocabulary, seed)
    name = "model.onnx" if precision == "fp32" else f"model_{precision}.onnx"
    graph_path = directory / "onnx" / name
    graph_path.parent.mkdir(parents=True, exist_ok=True)
    model = _model(weights, layout, precision, ask_for_token_types=ask_for_token_types)
    if external_data:
        _move_data_out(model, graph_path)
    graph_path.write_bytes(model.SerializeToString())
    (directory / "tokenizer.json").write_text(tiny_tokenizer(vocabulary).to_str(), encoding="utf-8")
    write_linear(directory / "sparse_linear.pt", weights.sparse, weights.sparse_bias)
    write_linear(directory / "colbert_linear.pt", weights.colbert, weights.colbert_bias)
    return graph_path


def tiny_tokenizer(vocabulary: int = 64) -> Tokenizer:
    """A Unigram tokenizer with XLM-R's special ids; what it does not know becomes ``<unk>``."""
    alphabet = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *".,?!'"]
    words = ["▁the", "▁hello", "▁world", "▁a", "ing", "er"]
    pieces = [*alphabet, *words]
    pieces += [f"▁w{index}" for index in range(vocabulary)]
    scores = [*(-1.0 for _ in alphabet), *(-0.5 for _ in words)]
    scores += [-9.0] * vocabulary
    room = vocabulary - len(SPECIALS) - 1
    scored = [
        *((special, 0.0) for special in SPECIALS),
        *zip(pieces[:room], scores[:room], strict=True),
        (MASK, 0.0),
    ]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(
        [*(AddedToken(special) for special in SPECIALS), AddedToken(MASK, lstrip=True)]
    )
    return tokenizer


def write_linear(
    path: Path, weight: NDArray[np.float32], bias: NDArray[np.float32], dtype: str = "float16"
) -> None:
    """Write what ``torch.save(linear.state_dict(), path)`` writes; `dtype` float16 or float32."""
    state = {"weight": weight.astype(dtype), "bias": bias.astype(dtype)}
    write_torch_zip(
        path,
        state_dict_pickle(state),
        {str(index): array.tobytes() for index, array in enumerate(state.values())},
    )


def write_torch_zip(path: Path, data_pkl: bytes, storages: Mapping[str, bytes]) -> None:
    """Pack a pickle and its storages the way torch does: stored, not compressed."""
    root = path.stem
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", data_pkl)
        archive.writestr(f"{root}/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"{root}/data/{key}", data)
        archive.writestr(f"{root}/version", "3\n")
    path.write_bytes(buffer.getvalue())


def state_dict_pickle(state: Mapping[str, NDArray[np.generic]]) -> bytes:
    """The protocol-2 pickle of a module's state_dict, with the ``_metadata`` torch hangs on it."""
    items = b"".join(
        text(name) + tensor(array, str(index)) for index, (name, array) in enumerate(state.items())
    )
    version = text("") + b"}" + text("version") + integer(1) + b"s" + b"s"
    metadata = b"}" + text("_metadata") + ORDERED_DICT + version + b"s"
    return b"\x80\x02" + ORDERED_DICT + b"(" + items + b"u" + metadata + b"b."


ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
"""Opcodes that leave an empty OrderedDict on the stack."""


def text(value: str) -> bytes:
    """Opcodes of a string."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def integer(value: int) -> bytes:
    """Opcodes of an integer below 2**31, or of a longer one."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def integers(values: Sequence[int]) -> bytes:
    """Opcodes of a tuple of integers."""
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(kind: str, key: str, elements: int) -> bytes:
    """Opcodes of a persistent id that names a storage of `elements`."""
    type_of_storage = f"ctorch\n{kind}\n".encode()
    return (
        b"("
        + text("storage")
        + type_of_storage
        + text(key)
        + text("cpu")
        + integer(elements)
        + b"tQ"
    )


def tensor(  # noqa: PLR0913 (each part of a tensor can be wrong)
    array: NDArray[np.generic],
    key: str,
    *,
    offset: int = 0,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    kind: str | None = None,
    elements: int | None = None,
) -> bytes:
    """Opcodes of a tensor over storage `key`; what is given departs from what `array` is."""
    kinds = {"float16": "HalfStorage", "float32": "FloatStorage", "float64": "DoubleStorage"}
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(
            kind or kinds[str(array.dtype)], key, array.size if elements is None else elements
        )
        + integer(offset)
        + integers(array.shape if shape is None else shape)
        + integers([s // array.itemsize for s in array.strides] if strides is None else strides)
        + b"\x89"  # requires_grad
        + ORDERED_DICT  # backward hooks
        + b"tR"
    )


@attrs.frozen(eq=False)
class _Weights:
    words: NDArray[np.float32]
    positions: NDArray[np.float32]
    token_types: NDArray[np.float32]
    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    sparse: NDArray[np.float32]
    sparse_bias: NDArray[np.float32]
    colbert: NDArray[np.float32]
    colbert_bias: NDArray[np.float32]

    @classmethod
    def random(cls, hidden: int, positions: int, vocabulary: int, seed: int) -> "_Weights":
        """Values that float16 holds exactly, so that every precision computes the same."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
            values = rng.normal(0.0, scale, shape)
            return values.astype(np.float16).astype(np.float32)

        spread = hidden**-0.5
        return cls(
            words=normal(vocabulary, hidden),
            positions=normal(positions, hidden, scale=0.3),
            token_types=normal(1, hidden, scale=0.1),
            query=normal(hidden, hidden, scale=spread),
            key=normal(hidden, hidden, scale=spread),
            value=normal(hidden, hidden, scale=spread),
            scale=(1.0 + normal(hidden, scale=0.125)).astype(np.float16).astype(np.float32),
            shift=normal(hidden, scale=0.1),
            sparse=normal(1, hidden, scale=spread),
            sparse_bias=normal(1, scale=0.1),
            colbert=normal(hidden, hidden, scale=spread),
            colbert_bias=normal(hidden, scale=0.1),
        )


def _model(  # noqa: PLR0915 (a graph is one long list of nodes)
    weights: _Weights, layout: str, precision: str, *, ask_for_token_types: bool
) -> onnx.ModelProto:
    stored_as = {"fp32": np.float32, "fp16": np.float16}[precision]
    initializers: list[TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def op(kind: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=f"/{output}", **attributes))
        return output

    def weight(name: str, values: NDArray[np.float32]) -> str:
        initializers.append(numpy_helper.from_array(values.astype(stored_as), name))
        if stored_as is np.float32:
            return name
        return op("Cast", [name], f"{name}.float", to=TensorProto.FLOAT)

    def constant(name: str, values: NDArray[np.generic]) -> str:
        return op("Constant", [], name, value=numpy_helper.from_array(values))

    hidden = weights.words.shape[1]
    one = constant("one", np.array(1, np.int64))
    axis_sequence = constant("axis_sequence", np.array(1, np.int64))
    # The published export keeps one Constant node's tensor in a file of its own.
    types = constant("Constant_7", weights.token_types)

    # Positions count real tokens from 2 (row 1 belongs to padding), as in XLM-R.
    counted = op("CumSum", ["attention_mask", axis_sequence], "counted")
    real = op("Mul", [counted, "attention_mask"], "real")
    places = op("Add", [real, one], "places")
    words = op(
        "Gather", [weight("embeddings.word_embeddings.weight", weights.words), "input_ids"], "words"
    )
    position_table = weight("embeddings.position_embeddings.weight", weights.positions)
    positions = op("Gather", [position_table, places], "positions")
    summed = op("Add", [words, positions], "summed")
    if ask_for_token_types:
        types = op("Gather", [types, "token_type_ids"], "types")
    embedded = op("Add", [summed, types], "embedded")

    query = op("MatMul", [embedded, weight("attention.query.weight", weights.query)], "query")
    key = op("MatMul", [embedded, weight("attention.key.weight", weights.key)], "key")
    value = op("MatMul", [embedded, weight("attention.value.weight", weights.value)], "value")
    raw = op("MatMul", [query, op("Transpose", [key], "key_t", perm=[0, 2, 1])], "raw")
    scaled = op("Mul", [raw, constant("scaling", np.array(hidden**-0.5, np.float32))], "scaled")
    axis_query = constant("axis_query", np.array([1], np.int64))
    row_mask = op("Unsqueeze", ["attention_mask", axis_query], "row_mask")
    is_real = op("Cast", [row_mask], "is_real", to=TensorProto.BOOL)
    nothing = constant("nothing", np.array(np.finfo(np.float32).min, np.float32))
    masked = op("Where", [is_real, scaled, nothing], "masked")
    mixed = op("MatMul", [op("Softmax", [masked], "attention", axis=-1), value], "mixed")
    norm = [
        op("Add", [embedded, mixed], "residual"),
        weight("norm.weight", weights.scale),
        weight("norm.bias", weights.shift),
    ]
    states_name = {
        "sentence_and_tokens": "token_embeddings",
        "last_hidden_state": "last_hidden_state",
        "ready_heads": "states",
    }[layout]
    states = op("LayerNormalization", norm, states_name, axis=-1, epsilon=1e-5)

    def unit_sentence(name: str) -> str:
        first = op("Gather", [states, constant("zero", np.array(0, np.int64))], "first", axis=1)
        return op("LpNormalization", [first], name, axis=-1, p=2)

    per_token = ["batch", "sequence"]
    outputs: dict[str, list[str | int]] = {}
    if layout == "sentence_and_tokens":
        outputs[unit_sentence("sentence_embedding")] = ["batch", hidden]
        outputs[states] = [*per_token, hidden]
    elif layout == "last_hidden_state":
        outputs[states] = [*per_token, hidden]
    else:
        outputs[unit_sentence("dense_vecs")] = ["batch", hidden]
        projected = op(
            "MatMul", [states, weight("sparse_linear.weight", weights.sparse.T)], "sparse"
        )
        biased = op("Add", [projected, weight("sparse_linear.bias", weights.sparse_bias)], "biased")
        positive = op("Relu", [biased], "positive")
        last = constant("last", np.array([-1], np.int64))
        outputs[op("Squeeze", [positive, last], "sparse_weights")] = [*per_token]
        turned = op(
            "MatMul", [states, weight("colbert_linear.weight", weights.colbert.T)], "turned"
        )
        moved = op("Add", [turned, weight("colbert_linear.bias", weights.colbert_bias)], "moved")
        unit = op("LpNormalization", [moved], "colbert_vecs", axis=-1, p=2)
        outputs[unit] = [*per_token, hidden]

    input_names = ["input_ids", "attention_mask"]
    if ask_for_token_types:
        input_names.append("token_type_ids")
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, per_token) for name in input_names],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in outputs.items()
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def _move_data_out(model: onnx.ModelProto, graph_path: Path) -> None:
    """Put the weights into ``<graph>_data`` and the Constant_7 tensor into its own file."""
    data = io.BytesIO()
    for initializer in model.graph.initializer:
        data.write(b"\0" * (-data.tell() % 64))
        offset = data.tell()
        length = data.write(initializer.raw_data)
        _refer(initializer, f"{graph_path.name}_data", offset, length)
    (graph_path.parent / f"{graph_path.name}_data").write_bytes(data.getvalue())
    (node,) = (node for node in model.graph.node if node.name == "/Constant_7")
    tensor_of_node = node.attribute[0].t
    (graph_path.parent / CONSTANT_FILE).write_bytes(tensor_of_node.raw_data)
    _refer(tensor_of_node, CONSTANT_FILE, 0, len(tensor_of_node.raw_data))


def _refer(proto: TensorProto, location: str, offset: int, length: int) -> None:
    proto.ClearField("raw_data")
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=str(value))
