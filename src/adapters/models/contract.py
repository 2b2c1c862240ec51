"""What a graph promises, told by its inputs, outputs and weights."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from ...domain.errors import ContractError
from ...domain.types import (
    Attention,
    GraphLayout,
    HeadProjections,
    Heads,
    ModelContract,
    Projection,
)
from .onnx_file import GraphDescription, TensorInfo

MAX_TOKENS_KEY = "bge_m3_server.max_tokens"
ATTENTION_HEADS_KEY = "bge_m3_server.attention_heads"
ATTENTION_KEY = "bge_m3_server.attention"
"""Keys of a model's own metadata that overrule what is read from its weights."""

XLM_R_POSITION_OFFSET = 2
"""XLM-R counts positions from 2: a table of 8194 rows carries 8192 tokens."""

_REQUIRED_INPUTS = ("input_ids", "attention_mask")
_OPTIONAL_INPUTS = ("token_type_ids", "position_ids")

_LAYOUTS: Mapping[GraphLayout, Mapping[str, int]] = {
    GraphLayout.SENTENCE_AND_TOKENS: {"sentence_embedding": 2, "token_embeddings": 3},
    GraphLayout.LAST_HIDDEN_STATE: {"last_hidden_state": 3},
    GraphLayout.READY_HEADS: {"dense_vecs": 2},
}
"""Outputs that make a layout complete, with the number of their axes."""

_READY_HEADS = {
    Heads.DENSE: ("dense_vecs", 2),
    Heads.SPARSE: ("sparse_weights", 2),
    Heads.COLBERT: ("colbert_vecs", 3),
}

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "int8": "int8", "uint8": "int8"}

_ATTENTION_HEADS_OF_HIDDEN_SIZE = {1024: 16}
"""XLM-R large, which BGE-M3 is."""


@attrs.frozen
class TensorSpec:
    """An input or output as the engine describes it.

    `shape`: an int per static axis, a name or None per dynamic one.
    `dtype`: ``int64`` or ORT's ``tensor(int64)``.
    """

    shape: tuple[int | str | None, ...]
    dtype: str

    @property
    def element_type(self) -> str:
        """The dtype without ORT's wrapping, ``float`` spelled ``float32``."""
        bare = self.dtype.removeprefix("tensor(").removesuffix(")")
        return "float32" if bare == "float" else bare

    def __str__(self) -> str:
        return f"{self.element_type}[{', '.join(str(axis or '?') for axis in self.shape)}]"


def read_contract(
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    graph: GraphDescription,
    projections: HeadProjections,
    precision: str | None = None,
) -> ModelContract:
    """The contract of a loaded graph.

    `precision` overrules what the element types of the weights tell.

    Raises:
        ContractError: the graph fits no known layout, asks for an input that nobody can give, or
            contradicts the head weights beside it.
    """
    layout = _layout(inputs, outputs)
    if layout is GraphLayout.READY_HEADS:
        outputs_by_head = {
            head: name
            for head, (name, axes) in _READY_HEADS.items()
            if _is_float(outputs.get(name), axes)
        }
        projections = HeadProjections()
    else:
        sentence, *tokens = _LAYOUTS[layout]
        outputs_by_head = {Heads.DENSE: sentence}
        if projections.sparse is not None:
            outputs_by_head[Heads.SPARSE] = tokens[0] if tokens else sentence
        if projections.colbert is not None:
            outputs_by_head[Heads.COLBERT] = tokens[0] if tokens else sentence
    hidden_size = _hidden_size(layout, outputs, graph)
    _check_projections(projections, hidden_size)
    return ModelContract(
        layout=layout,
        input_names=tuple(inputs),
        outputs_by_head=outputs_by_head,
        hidden_size=hidden_size,
        max_tokens=_max_tokens(graph),
        precision=precision or _precision(graph),
        attention_heads=_metadata_count(graph, ATTENTION_HEADS_KEY)
        or _ATTENTION_HEADS_OF_HIDDEN_SIZE.get(hidden_size),
        attention=_attention(graph),
    )


def _layout(inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> GraphLayout:
    problems = list(_input_problems(inputs))
    fitting = [
        layout
        for layout, needed in _LAYOUTS.items()
        if all(_is_float(outputs.get(name), axes) for name, axes in needed.items())
    ]
    if not fitting:
        problems.append("its outputs fit no known layout")
    if not problems:
        return fitting[0]
    raise ContractError(
        f"the graph cannot be served: {'; '.join(problems)}. "
        f"It has inputs {_listed(inputs)} and outputs {_listed(outputs)}. "
        f"Expected inputs {' and '.join(_REQUIRED_INPUTS)} (int64 [batch, sequence]), optionally "
        f"{' and '.join(_OPTIONAL_INPUTS)}, and float outputs of one of these layouts: "
        "sentence_embedding [batch, hidden] + token_embeddings [batch, sequence, hidden]; or "
        "last_hidden_state [batch, sequence, hidden]; or dense_vecs [batch, hidden], optionally "
        "with sparse_weights [batch, sequence] and colbert_vecs [batch, sequence, dim]"
    )


def _input_problems(inputs: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in _REQUIRED_INPUTS:
        if name not in inputs:
            yield f"it does not take {name}"
    for name, spec in inputs.items():
        if name not in (*_REQUIRED_INPUTS, *_OPTIONAL_INPUTS):
            yield f"it asks for an unknown input {name}"
        elif spec.element_type != "int64":
            yield f"its input {name} is {spec.element_type}, not int64"


def _is_float(spec: TensorSpec | None, axes: int) -> bool:
    return (
        spec is not None
        and len(spec.shape) == axes
        and not isinstance(spec.shape[0], int)  # a fixed batch serves one request size only
        and spec.element_type in ("float32", "float16")
    )


def _listed(specs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in specs.items()) or "(none)"


def _hidden_size(
    layout: GraphLayout, outputs: Mapping[str, TensorSpec], graph: GraphDescription
) -> int:
    """Last axis of the dense output; where the export left it dynamic, that of the embeddings."""
    sizes = {
        name: axis for name in _LAYOUTS[layout] if isinstance(axis := outputs[name].shape[-1], int)
    }
    if len(set(sizes.values())) > 1:
        raise ContractError(f"the graph's outputs differ in their hidden size: {sizes}")
    if sizes:
        return next(iter(sizes.values()))
    table = _position_table(graph)
    if table is None:
        raise ContractError(
            f"the hidden size is unknown: no output has a static last axis ({_listed(outputs)}), "
            "and no initializer is named position_embeddings"
        )
    return table.dims[1]


def _check_projections(projections: HeadProjections, hidden_size: int) -> None:
    sparse, colbert = projections.sparse, projections.colbert
    if sparse is not None and sparse.weight.shape != (1, hidden_size):
        raise ContractError(_mismatch("sparse", sparse, f"(1, {hidden_size})"))
    if colbert is not None and colbert.weight.shape[1:] != (hidden_size,):
        raise ContractError(_mismatch("colbert", colbert, f"(dim, {hidden_size})"))


def _mismatch(head: str, projection: Projection, expected: str) -> str:
    return (
        f"the {head} head's weight has shape {projection.weight.shape}, this graph needs "
        f"{expected}: {head}_linear.pt and the graph are not of the same model"
    )


def _max_tokens(graph: GraphDescription) -> int | None:
    stated = _metadata_count(graph, MAX_TOKENS_KEY)
    table = _position_table(graph)
    if stated is not None or table is None:
        return stated
    return table.dims[0] - XLM_R_POSITION_OFFSET


def _position_table(graph: GraphDescription) -> TensorInfo | None:
    """The table (positions, hidden), which quantised exports surround with scales of its name."""
    tables = (
        info
        for name, info in graph.initializers.items()
        if "position_embeddings" in name and len(info.dims) == 2  # noqa: PLR2004 (a table)
    )
    return max(tables, key=lambda info: info.dims[0], default=None)


def _attention(graph: GraphDescription) -> Attention:
    value = graph.metadata.get(ATTENTION_KEY, Attention.MATERIALISED.value)
    try:
        return Attention(value)
    except ValueError:
        known = ", ".join(attention.value for attention in Attention)
        raise ContractError(
            f"the model's metadata {ATTENTION_KEY} is {value[:20]!r}, expected one of {known}"
        ) from None


def _metadata_count(graph: GraphDescription, key: str) -> int | None:
    value = graph.metadata.get(key)
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        shown = value[:20]
        raise ContractError(f"the model's metadata {key} is {shown!r}, not a positive integer")
    return int(value)


def _precision(graph: GraphDescription) -> str:
    """That of the weights which hold most of the model's values."""
    elements: Counter[str] = Counter()
    for info in graph.initializers.values():
        if info.element_type in _PRECISIONS:
            elements[_PRECISIONS[info.element_type]] += info.elements
    return elements.most_common(1)[0][0] if elements else "fp32"
