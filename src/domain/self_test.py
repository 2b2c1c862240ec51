"""Does a freshly loaded model return what an embedding model must?"""

import numpy as np

from .cost_model import CostModel
from .embedder import Embedder
from .errors import InferenceError, SelfTestError
from .ports import InferenceBackend, Tokenizer

TEXTS = ("ready", "机器学习与深度学习有什么差别?")
"""One short and one non-Latin text; they must differ."""

_NORM_TOLERANCE = 1e-3
_SAME_TEXT_COSINE = 0.999_999


def self_test(tokenizer: Tokenizer, backend: InferenceBackend, dimensions: int) -> None:
    """Embed two fixed texts with every head and check norms, widths and finiteness.

    Raises:
        SelfTestError: says what came back and what was expected.
    """
    embedder = Embedder(tokenizer, backend, CostModel.conservative())
    try:
        embeddings = embedder.embed(TEXTS, backend.contract.heads)
    except InferenceError as error:
        raise SelfTestError(f"the model failed its self-test: {error}") from error
    dense = [embedding.dense for embedding in embeddings if embedding.dense is not None]
    for text, vector in zip(TEXTS, dense, strict=True):
        if vector.shape != (dimensions,):
            raise SelfTestError(
                f"the model failed its self-test: the dense vector of {text!r} has shape "
                f"{vector.shape}, expected ({dimensions},)"
            )
        norm = float(np.linalg.norm(vector))
        if abs(norm - 1) > _NORM_TOLERANCE:
            raise SelfTestError(
                f"the model failed its self-test: the dense vector of {text!r} has norm "
                f"{norm:.4f}, expected 1"
            )
    if float(dense[0] @ dense[1]) > _SAME_TEXT_COSINE:
        raise SelfTestError(
            f"the model failed its self-test: {TEXTS[0]!r} and {TEXTS[1]!r} got the same vector"
        )
