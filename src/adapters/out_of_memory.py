"""Which of an engine's exceptions mean that an allocation failed: there is no type for them."""

_SIGNS = (
    "out of memory",
    "bad_alloc",
    "failed to allocate",
    "bfcarena::allocaterawinternal",
    "cuda_error_out_of_memory",
)
"""What ONNX Runtime, OpenVINO, CUDA and the C++ library say."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error`, raised by an engine, says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)
