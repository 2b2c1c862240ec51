import contextlib
import struct

import numpy as np
import pytest
from bge_m3_server.adapters.models.preview_blob import read_preview_blob
from bge_m3_server.domain.errors import CorruptFileError
from hypothesis import given
from hypothesis import strategies as st

HIDDEN, LAYERS, HEADS, FFN, ROWS, POSITIONS, TYPES = SIZES = (32, 1, 2, 64, 6, 4, 2)
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁hé", "<mask>"]
SCORES = [0.0, 0.0, 0.0, 0.0, -3.5, 0.0]


def tensors():
    """Name → (is 4-bit, elements), in file order."""
    yield "emb.word", True, ROWS * HIDDEN
    yield "emb.pos", False, POSITIONS * HIDDEN
    yield "emb.type", False, TYPES * HIDDEN
    for name in ("emb.ln", "l0.aln", "l0.oln"):
        yield f"{name}.w", False, HIDDEN
        yield f"{name}.b", False, HIDDEN
    for name in ("q", "k", "v", "ao", "fi", "fo"):
        rows, columns = {"fi": (FFN, HIDDEN), "fo": (HIDDEN, FFN)}.get(name, (HIDDEN, HIDDEN))
        yield f"l0.{name}.w", True, rows * columns
        yield f"l0.{name}.b", False, rows


def write_blob(magic=b"E5S1", version=1, sizes=SIZES, skip=None):
    """A tiny file of the format; 4-bit block n has scale n/2 and nibbles 0…15 up, then down."""
    text = "".join(PIECES).encode()
    bounds = np.cumsum([0] + [len(piece.encode()) for piece in PIECES])
    head = magic + struct.pack("<I7ifi", version, *sizes, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(text))
    head += bounds.astype("<u4").tobytes() + np.array(SCORES, "<f4").tobytes() + text
    head += struct.pack("<iI", 1, 3) + b"map"
    kept = [entry for entry in tensors() if entry[0] != skip]
    offset = len(head) + 4 + sum(2 + len(name) + 21 for name, _, _ in kept)
    directory, payload = struct.pack("<i", len(kept)), b""
    for name, is_q4, elements in kept:
        if is_q4:
            nibbles = bytes(low | (15 - low) << 4 for low in range(16))
            content = b"".join(
                struct.pack("<e", block / 2) + nibbles for block in range(elements // 32)
            )
        else:
            content = np.arange(elements, dtype="<f4").tobytes()
        place = struct.pack("<BIQQ", int(is_q4), elements, offset + len(payload), len(content))
        directory += struct.pack("<H", len(name)) + name.encode() + place
        payload += content
    return head + directory + payload


WHOLE = write_blob()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("blob") / "e5-small-q4.bin"


def test_reads_sizes_and_vocabulary(path):
    """Sizes, pieces in id order and their scores come back as written."""
    path.write_bytes(WHOLE)
    blob = read_preview_blob(path)
    assert (blob.shape.hidden, blob.shape.attention_heads, blob.shape.positions) == (32, 2, 4)
    assert blob.pieces == PIECES
    assert blob.scores.tolist() == SCORES


def test_decodes_blocks(path):
    """Low nibbles are the first 16 values of a block, high ones the last, minus 8, times scale."""
    path.write_bytes(WHOLE)
    matrix = read_preview_blob(path).matrix("l0.fi.w").dequantised()
    codes = np.concatenate((np.arange(16), np.arange(15, -1, -1))) - 8
    assert matrix.shape == (FFN, HIDDEN)
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix, np.arange(FFN)[:, None] / 2 * codes)


def test_reads_plain_floats(path):
    """A float tensor has the shape that the sizes imply."""
    path.write_bytes(WHOLE)
    positions = read_preview_blob(path).floats("emb.pos")
    np.testing.assert_array_equal(positions, np.arange(POSITIONS * HIDDEN).reshape(4, 32))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_cut_file_is_refused_by_name(path, length):
    """A file that is short by one byte or by many is refused, and named."""
    path.write_bytes(WHOLE[:length])
    with pytest.raises(CorruptFileError, match=r"e5-small-q4\.bin is damaged"):
        read_preview_blob(path)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_overwritten_bytes_never_raise_anything_else(path, place, noise):
    """Whatever the header says, reading ends in a blob or in one kind of error."""
    path.write_bytes(WHOLE[:place] + noise + WHOLE[place + len(noise) :])
    with contextlib.suppress(CorruptFileError):
        read_preview_blob(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (write_blob(magic=b"GGUF"), "GGUF"),
        (write_blob(version=2), "version 2"),
        (write_blob(sizes=(32, 1, 3, *SIZES[3:])), "impossible"),
        (write_blob(sizes=(32, 1, 2, 64, 5, 4, 2)), "6 pieces do not fit 5 rows"),
        (write_blob(sizes=(32, 2**30, *SIZES[2:])), "21 tensors for 1073741824 layers"),
        (write_blob(sizes=(32, 2, *SIZES[2:])), r"tensor l1\.q\.w is missing"),
        (write_blob(skip="l0.v.b"), r"tensor l0\.v\.b is missing"),
    ],
    ids=["magic", "version", "heads", "rows", "endless layers", "layers", "missing tensor"],
)
def test_contradictions_are_refused(path, content, reason):
    """A file that contradicts the format or itself is refused with the reason."""
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=reason):
        read_preview_blob(path)
