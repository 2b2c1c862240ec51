"""OpenVINO's own model format, IR: an ``.xml`` of operations with its weights in a ``.bin`` beside.

Weights of an IR are mapped into memory instead of read, those of an ONNX file are copied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...domain.errors import CacheDirectoryError, EngineError
from ..models.onnx_file import GraphDescription, TensorInfo, check_external_data
from .links import without_links
from .package import import_openvino, reason

_SECTION = "bge_m3_server"
"""Where the model's own metadata lies among OpenVINO's runtime information."""

_ELEMENT_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"} | {
    f"{sign}{bits}": f"{name}{bits}"
    for sign, name in (("i", "int"), ("u", "uint"))
    for bits in (4, 8, 16, 32, 64)
}


def element_type(openvino_type: Any) -> str:  # noqa: ANN401  (the package has no types)
    """NumPy's name of an element type; OpenVINO's own name where NumPy has none."""
    name: str = openvino_type.get_type_name()
    return _ELEMENT_TYPES.get(name, name)


def write_ir(onnx_path: Path, xml_path: Path, metadata: Mapping[str, str]) -> None:
    """Convert an ONNX model; float32 weights become float16, 8-bit weights stay as they are.

    `metadata` is kept in the IR, where `describe_ir` finds it. The weights go to
    ``xml_path.with_suffix(".bin")``. Neither file is written atomically.

    Raises:
        ProviderError: OpenVINO is not installed.
        CorruptFileError: the ONNX file or its external data is damaged.
        EngineError: OpenVINO cannot read the model.
        CacheDirectoryError: OpenVINO cannot write it.
    """
    openvino = import_openvino()
    check_external_data(onnx_path)
    try:
        with without_links(onnx_path) as path:
            model = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise EngineError(
            f"openvino {openvino.__version__} cannot convert {onnx_path}: {reason(error)}; choose "
            "another engine with BGE_M3_EP"
        ) from error
    try:
        for key, value in metadata.items():
            model.set_rt_info(value, [_SECTION, key])
        openvino.save_model(model, xml_path, compress_to_fp16=True)
    except RuntimeError as error:
        raise CacheDirectoryError(
            f"openvino {openvino.__version__} cannot write {xml_path} ({reason(error)}): make that "
            "directory writable, with 3 GB free, or set BGE_M3_CACHE_DIR to another one"
        ) from error


def describe_ir(model: Any) -> GraphDescription:  # noqa: ANN401  (the package has no types)
    """Weights and metadata of an IR that OpenVINO has read."""
    constants = (op for op in model.get_ops() if op.get_type_name() == "Constant")
    metadata = model.get_rt_info([_SECTION]).astype(dict) if model.has_rt_info([_SECTION]) else {}
    return GraphDescription(
        initializers={
            op.get_friendly_name(): TensorInfo(tuple(op.shape), element_type(op.get_element_type()))
            for op in constants
        },
        metadata={key: str(value.value) for key, value in metadata.items()},
    )
