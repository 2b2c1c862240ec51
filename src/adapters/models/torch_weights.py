"""Linear heads out of torch's zip files, without torch and without running what they hold.

A torch file is a pickle, and a pickle is a program. Nothing here calls anything that the file
names: a closed set of opcodes is interpreted, the few names that a state_dict of plain tensors
needs are known by sight, and everything else is refused.
"""

import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...domain.errors import ContractError, CorruptFileError, UnsafeWeightsError
from ...domain.types import Floats, HeadProjections, Projection
from .files import ModelFiles
from .tensor_pickle import STORAGE_DTYPES, PickledTensor, read_state_dict

MAX_PICKLE_BYTES = 1 << 20
MAX_STORAGE_BYTES = 256 << 20
"""Far above the 4 MiB of BGE-M3's larger head, far below what would hurt."""

_ZIP_ERRORS = (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, OSError, struct.error)
"""What `zipfile` raises on damaged archives; RuntimeError for features that it lacks."""

_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The magic number that torch wrote as a pickle of its own before it used zip files."""


def read_heads(files: ModelFiles) -> HeadProjections:
    """The heads that lie beside the graph, as far as there are any.

    Raises:
        ModelError: as `read_linear` does.
    """
    return HeadProjections(
        sparse=read_linear(files.sparse_path) if files.sparse_path else None,
        colbert=read_linear(files.colbert_path) if files.colbert_path else None,
    )


def read_linear(path: Path) -> Projection:
    """Read ``torch.save(linear.state_dict(), path)``.

    Floats of any width become float32: `weight` (out, hidden), `bias` (out,).

    Raises:
        UnsafeWeightsError: the file holds something other than plain tensors.
        CorruptFileError: the file is truncated or damaged.
        ContractError: the tensors are not the weight and bias of a linear layer.
    """
    try:
        with _open(path) as archive:
            state = read_state_dict(_record(archive, path, "data.pkl", MAX_PICKLE_BYTES), path)
            arrays = {
                name: _array(tensor, archive, path)
                for name, tensor in state.items()
                if name in ("weight", "bias")
            }
    except _ZIP_ERRORS as error:
        raise CorruptFileError(
            f"{path} is truncated or damaged ({error}): delete it and fetch it again"
        ) from error
    return _projection(arrays, state, path)


def _open(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as file:
        head = file.read(64)
    if not head.startswith(b"PK"):
        kind = "an old torch file from before version 1.6" if _LEGACY_MAGIC in head else "no zip"
        raise UnsafeWeightsError(
            f"{path} is {kind}: only torch's zip format is read; save it again with a newer torch"
        )
    return zipfile.ZipFile(path)


def _record(archive: zipfile.ZipFile, path: Path, name: str, limit_bytes: int) -> bytes:
    """One record of the archive; its top folder has a name that torch picks."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise UnsafeWeightsError(f"{path} has {len(found)} records named {name}, expected one")
    (info,) = found
    # torch stores its records as they are; a compressed one could unfold without end.
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise UnsafeWeightsError(f"{path}: record {name} is compressed or encrypted")
    if info.file_size > limit_bytes:
        raise UnsafeWeightsError(
            f"{path}: record {name} has {info.file_size} bytes, more than {limit_bytes}"
        )
    return archive.read(info)


def _array(tensor: PickledTensor, archive: zipfile.ZipFile, path: Path) -> Floats:
    """The values of `tensor`, each index of which was checked to lie within its storage."""
    storage = tensor.storage
    itemsize = np.dtype(STORAGE_DTYPES[storage.kind]).itemsize
    data = _record(archive, path, f"data/{storage.key}", MAX_STORAGE_BYTES)
    if len(data) != storage.elements * itemsize:
        raise UnsafeWeightsError(
            f"{path}: storage {storage.key} has {len(data)} bytes, "
            f"its {storage.elements} elements need {storage.elements * itemsize}"
        )
    last = tensor.offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    # A stride of 0 would let a small storage stand for an array of any size.
    if last >= storage.elements or math.prod(tensor.shape) > storage.elements:
        raise UnsafeWeightsError(
            f"{path}: a tensor of shape {tensor.shape}, strides {tensor.strides}, offset "
            f"{tensor.offset} leaves its storage of {storage.elements} elements"
        )
    values = np.frombuffer(data, dtype=STORAGE_DTYPES[storage.kind])
    if storage.kind == "BFloat16Storage":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    strided = np.lib.stride_tricks.as_strided(
        values[tensor.offset :],
        tensor.shape,
        [stride * values.itemsize for stride in tensor.strides],
    )
    return np.ascontiguousarray(strided, dtype=np.float32)


def _projection(
    arrays: Mapping[str, Floats], state: Mapping[str, PickledTensor], path: Path
) -> Projection:
    if len(arrays) != len(("weight", "bias")):
        raise ContractError(
            f"{path} holds {sorted(state) or 'nothing'}, expected the weight and bias of a linear "
            "layer"
        )
    weight, bias = arrays["weight"], arrays["bias"]
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:  # noqa: PLR2004 (a matrix has 2 axes)
        raise ContractError(
            f"{path}: weight {weight.shape} and bias {bias.shape} are not those of a linear layer, "
            "which are (out, hidden) and (out,)"
        )
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise CorruptFileError(f"{path} holds NaN or infinity: delete it and fetch it again")
    return Projection(weight=weight, bias=bias)
