"""What an ONNX file says about itself, read from its bytes without loading the weights.

ONNX is protobuf: fields of a number, a wire type and a value, where messages nest as
length-delimited values. Only the few fields that are needed are entered; the rest, gigabytes of
weights among it, is skipped by its length. Field numbers are those of `onnx.proto`.
"""

import math
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import attrs

from ...domain.errors import CorruptFileError

ELEMENT_TYPES: Mapping[int, tuple[str, float]] = {
    1: ("float32", 4),
    2: ("uint8", 1),
    3: ("int8", 1),
    4: ("uint16", 2),
    5: ("int16", 2),
    6: ("int32", 4),
    7: ("int64", 8),
    9: ("bool", 1),
    10: ("float16", 2),
    11: ("float64", 8),
    12: ("uint32", 4),
    13: ("uint64", 8),
    16: ("bfloat16", 2),
    21: ("uint4", 0.5),
    22: ("int4", 0.5),
}
"""`TensorProto.DataType` → name and bytes per element, for the types that weights have."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_SUBGRAPH_DEPTH = 16
_EXTERNAL = 1


@attrs.frozen
class TensorInfo:
    """Shape and element type of an initializer; the type is a name such as ``float16``."""

    dims: tuple[int, ...]
    element_type: str

    @property
    def elements(self) -> int:
        """Number of its values."""
        return math.prod(self.dims)


@attrs.frozen
class ExternalData:
    """A tensor kept outside the model file, in `location` beside it."""

    location: str
    offset_bytes: int
    length_bytes: int


@attrs.frozen(kw_only=True)
class GraphDescription:
    """A model's account of itself, in whatever format it is kept.

    `initializers`: the weights of the main graph, by name.
    `metadata`: the model's own key → value pairs.
    """

    initializers: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class GraphFile(GraphDescription):
    """An ONNX file's account of itself.

    `external`: every reference to another file, those of node attributes and subgraphs included.
    """

    size_bytes: int
    external: tuple[ExternalData, ...] = ()


def inspect_graph(path: Path) -> GraphFile:
    """Read names, shapes, references and metadata of the model at `path`.

    Raises:
        CorruptFileError: the file is truncated or no ONNX model.
    """
    size_bytes = path.stat().st_size
    if not size_bytes:
        raise CorruptFileError(f"{path} is empty: delete it and fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _model(_Message(data, 0, size_bytes))
        except (_MalformedError, UnicodeDecodeError) as error:
            raise CorruptFileError(
                f"{path} ({size_bytes} bytes) is truncated or no ONNX model ({error}): delete it "
                "and fetch it again"
            ) from error


def check_external_data(path: Path) -> None:
    """Make sure that every file the model at `path` refers to is there and long enough.

    Raises:
        CorruptFileError: a file is missing, too short, or outside the model's directory.
    """
    for reference in inspect_graph(path).external:
        location = PurePosixPath(reference.location)
        on_windows = PureWindowsPath(reference.location)
        if ".." in on_windows.parts or location.is_absolute() or on_windows.anchor:
            raise CorruptFileError(
                f"{path} was refused: it refers to {reference.location!r}, outside its directory"
            )
        external = path.parent / location
        if not _is_file(external):
            raise CorruptFileError(
                f"{path} keeps weights in {external}, which is missing: fetch it, or copy it there"
            )
        needed_bytes = reference.offset_bytes + reference.length_bytes
        size_bytes = external.stat().st_size
        if size_bytes < needed_bytes:
            raise CorruptFileError(
                f"{external} is truncated: it has {size_bytes} bytes, {path.name} needs "
                f"{needed_bytes}; delete it and fetch it again"
            )


def _is_file(path: Path) -> bool:
    """Whether there can be and is a file of this name."""
    try:
        return path.is_file()
    except OSError:  # a name too long to ask about
        return False


class _MalformedError(Exception):
    """The bytes are no protobuf, or not one of ONNX."""


@attrs.frozen
class _Message:
    """One message: bytes `start` to `end` of `data`."""

    data: mmap.mmap
    start: int
    end: int

    def fields(self) -> "Iterator[tuple[int, int | _Message]]":
        """Field number and value: an integer, or the span of a length-delimited value."""
        at = self.start
        while at < self.end:
            tag, at = self._varint(at)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == _VARINT:
                value, at = self._varint(at)
                yield number, value
            elif wire_type == _DELIMITED:
                length, at = self._varint(at)
                self._require(at + length)
                yield number, _Message(self.data, at, at + length)
                at += length
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
                self._require(at)
            else:
                raise _MalformedError(f"wire type {wire_type} at byte {at}")

    def messages(self, *numbers: int) -> "Iterator[_Message]":
        """The length-delimited values of the fields `numbers`."""
        for number, value in self.fields():
            if number in numbers and isinstance(value, _Message):
                yield value

    def text(self) -> str:
        return self.data[self.start : self.end].decode()

    def varints(self) -> Iterator[int]:
        """The integers of a packed field."""
        at = self.start
        while at < self.end:
            value, at = self._varint(at)
            yield value

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for index in range(_MAX_VARINT_BYTES):
            self._require(at + index + 1)
            byte = self.data[at + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:  # noqa: PLR2004 (the top bit says that more follows)
                return value, at + index + 1
        raise _MalformedError(f"an endless integer at byte {at}")

    def _require(self, end: int) -> None:
        if end > self.end:
            raise _MalformedError(f"bytes up to {end} are announced, {self.end} are there")


def _model(model: _Message) -> GraphFile:
    graphs: list[_Message] = []
    metadata: dict[str, str] = {}
    opsets = 0
    for number, value in model.fields():
        if number == 7 and isinstance(value, _Message):  # noqa: PLR2004 (ModelProto.graph)
            graphs.append(value)
        elif number == 8:  # noqa: PLR2004 (ModelProto.opset_import, which follows the graph)
            opsets += 1
        elif number == 14 and isinstance(value, _Message):  # noqa: PLR2004 (metadata_props)
            metadata.update([_entry(value)])
    if len(graphs) != 1 or not opsets:
        raise _MalformedError(f"{len(graphs)} graphs and {opsets} operator sets")
    (graph,) = graphs
    tensors = [_tensor(tensor) for tensor in graph.messages(5)]  # GraphProto.initializer
    return GraphFile(
        size_bytes=model.end,
        initializers={name: info for name, info, _ in tensors},
        external=tuple(_external(graph)),
        metadata=metadata,
    )


def _external(graph: _Message, depth: int = 0) -> Iterator[ExternalData]:
    """References of a graph's initializers, of its nodes' attributes, and of their graphs."""
    if depth > _MAX_SUBGRAPH_DEPTH:
        raise _MalformedError("graphs nested too deeply")
    for tensor in graph.messages(5):  # GraphProto.initializer
        yield from _reference(tensor)
    for node in graph.messages(1):  # GraphProto.node
        for attribute in node.messages(5):  # NodeProto.attribute
            for tensor in attribute.messages(5, 10):  # AttributeProto.t, .tensors
                yield from _reference(tensor)
            for subgraph in attribute.messages(6, 11):  # AttributeProto.g, .graphs
                yield from _external(subgraph, depth + 1)


def _reference(tensor: _Message) -> Iterator[ExternalData]:
    _, _, external = _tensor(tensor)
    if external is not None:
        yield external


def _tensor(tensor: _Message) -> tuple[str, TensorInfo, ExternalData | None]:
    name, element_type, location = "", 0, 0
    dims: list[int] = []
    references: dict[str, str] = {}
    for number, value in tensor.fields():
        match number, value:
            case 1, int():  # TensorProto.dims
                dims.append(value)
            case 1, _Message():
                dims.extend(value.varints())
            case 2, int():  # TensorProto.data_type
                element_type = value
            case 8, _Message():  # TensorProto.name
                name = value.text()
            case 13, _Message():  # TensorProto.external_data
                references.update([_entry(value)])
            case 14, int():  # TensorProto.data_location
                location = value
    type_name, width_bytes = ELEMENT_TYPES.get(element_type, (f"type {element_type}", 0))
    info = TensorInfo(tuple(dims), type_name)
    if location != _EXTERNAL:
        return name, info, None
    offset = references.get("offset", "0")
    length = references.get("length", str(math.ceil(info.elements * width_bytes)))
    if not all(re.fullmatch(r"[0-9]{1,18}", figure) for figure in (offset, length)):
        raise _MalformedError(f"a bad reference to external data of {name!r}: {references}")
    return name, info, ExternalData(references.get("location", ""), int(offset), int(length))


def _entry(message: _Message) -> tuple[str, str]:
    """A `StringStringEntryProto`."""
    key = value = ""
    for number, field in message.fields():
        if isinstance(field, _Message):
            if number == 1:
                key = field.text()
            elif number == 2:  # noqa: PLR2004 (StringStringEntryProto.value)
                value = field.text()
    return key, value
