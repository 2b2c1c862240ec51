"""A model's structure and its weights apart: gigabytes are mapped, never held."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
import onnx
from numpy.typing import NDArray

from ...domain.errors import CorruptFileError

LARGE_BYTES = 8 << 20
"""Tensors above it stay outside the structure: embeddings and feed-forward weights. Attention's
own stay in, for the optimiser reads their values."""

PAGE_BYTES = 4096
"""Tensors begin on pages, so that an engine maps them instead of reading them."""

_EXTERNAL = onnx.TensorProto.EXTERNAL
_STAND_IN = "weights"

Array = NDArray[np.generic]


@attrs.frozen(eq=False)
class Weights:
    """The large initializers of a model, by name; each is read when it is asked for."""

    directory: Path
    tensors: Mapping[str, onnx.TensorProto]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def array(self, name: str) -> Array:
        """The values of one tensor; those in files of their own are mapped."""
        tensor = self.tensors[name]
        if tensor.data_location != _EXTERNAL:
            inline: Array = onnx.numpy_helper.to_array(tensor)
            return inline
        mapped: Array = _bytes(tensor, self.directory).view(_dtype(tensor))
        return mapped.reshape(tuple(tensor.dims))


def read_structure(path: Path) -> tuple[onnx.ModelProto, Weights]:
    """The model at `path` with its small tensors, and its large ones apart.

    In the structure a large tensor has its name, shape and element type, but no values.

    Raises:
        CorruptFileError: the file is no ONNX model.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors share no other base class
        raise CorruptFileError(
            f"{path} is no readable ONNX model ({error}): delete it and fetch it again"
        ) from error
    large = {}
    for tensor in model.graph.initializer:
        if _size_bytes(tensor) > LARGE_BYTES:
            large[tensor.name] = onnx.TensorProto.FromString(tensor.SerializeToString())
            _empty(tensor)
        elif tensor.data_location == _EXTERNAL:
            _load(tensor, path.parent)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_location == _EXTERNAL:
                _load(attribute.t, path.parent)
    return model, Weights(path.parent, large)


@attrs.define(eq=False)
class WeightsFile:
    """Tensors written one after the other to `data`, as references for a model beside it."""

    data: BinaryIO
    location: str

    def add(self, name: str, values: Array) -> onnx.TensorProto:
        """Write `values` and return the tensor that refers to them."""
        self.data.write(b"\0" * (-self.data.tell() % PAGE_BYTES))
        offset = self.data.tell()
        length = self.data.write(np.ascontiguousarray(values).view(np.uint8).data)
        tensor = onnx.TensorProto(
            name=name,
            dims=values.shape,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype),
            data_location=_EXTERNAL,
        )
        for key, value in (("location", self.location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def _bytes(tensor: onnx.TensorProto, directory: Path) -> NDArray[np.uint8]:
    """Mapped; onnx's own reader refuses the links that a hub cache consists of."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    return np.memmap(
        directory / fields["location"],
        dtype=np.uint8,
        mode="r",
        offset=int(fields.get("offset", 0)),
        shape=_size_bytes(tensor),
    )


def _load(tensor: onnx.TensorProto, directory: Path) -> None:
    tensor.raw_data = _bytes(tensor, directory).tobytes()
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def _dtype(tensor: onnx.TensorProto) -> np.dtype[np.generic]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))


def _size_bytes(tensor: onnx.TensorProto) -> int:
    return int(math.prod(tensor.dims)) * _dtype(tensor).itemsize


def _empty(tensor: onnx.TensorProto) -> None:
    name, dims, data_type = tensor.name, list(tensor.dims), tensor.data_type
    tensor.Clear()
    tensor.name, tensor.data_type = name, data_type
    tensor.dims.extend(dims)
    tensor.data_location = _EXTERNAL
    tensor.external_data.add(key="location", value=_STAND_IN)
