"""Does a freshly loaded model return what an embedding model must?"""

from collections.abc import Mapping

import numpy as np

from .budget import conservative_coefficients
from .cost_model import DEFAULT_MAX_WORKSPACE_BYTES
from .embedder import Embedder
from .errors import InferenceError, SelfTestError
from .ports import InferenceBackend, Tokenizer
from .types import Embedding, Floats, SparseVector

BGE_M3_LEXICAL_WEIGHTS: Mapping[str, Mapping[int, float]] = {
    "What is BGE M3?": {
        4865: 0.0836, 83: 0.0815, 335: 0.1296, 11679: 0.2519, 276: 0.1700, 363: 0.2696, 32: 0.0408,
    },
    "機器學習與深度學習有什麼差別？": {
        74086: 0.2354, 14492: 0.2425, 1109: 0.1263, 68414: 0.2857, 136556: 0.1037, 175600: 0.2223,
        32: 0.0371,
    },
}  # fmt: skip
"""Two texts, and the lexical weights that FlagEmbedding gives them with BAAI/bge-m3 in fp32."""

TEXTS = tuple(BGE_M3_LEXICAL_WEIGHTS)

_NORM_TOLERANCE = 1e-3
_SAME_VECTOR_COSINE = 0.999_999
_LEXICAL_TOLERANCE = 0.06
"""Above what fp16 and int8 change; a wrong tokenizer or head is off by far more."""


def self_test(tokenizer: Tokenizer, backend: InferenceBackend, *, is_bge_m3: bool = False) -> None:
    """Embed two fixed texts with every head; check finiteness, norms, widths and difference.

    Args:
        tokenizer: the tokenizer that belongs to the model.
        backend: the model.
        is_bge_m3: the files are known to be BGE-M3's, so its lexical weights are checked too.

    Raises:
        SelfTestError: says what came back and what was expected.
    """
    conservative = conservative_coefficients(backend.contract)
    embedder = Embedder(tokenizer, backend, conservative.cost_model(DEFAULT_MAX_WORKSPACE_BYTES))
    try:
        embeddings = embedder.embed(TEXTS, backend.contract.heads)
    except InferenceError as error:
        raise SelfTestError(f"the model failed its self-test: {error}") from error
    dense = [
        _checked_dense(text, embedding.dense, backend.contract.hidden_size)
        for text, embedding in zip(TEXTS, embeddings, strict=True)
    ]
    first, second = tokenizer.encode(TEXTS)
    if first.ids.tolist() != second.ids.tolist():  # a limit of two tokens leaves `<s></s>` of both
        _check_difference(*dense)
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        _check_colbert(text, embedding)
        if is_bge_m3:
            _check_lexical(text, embedding.sparse)


def _checked_dense(text: str, dense: Floats | None, dimensions: int) -> Floats:
    shape = None if dense is None else dense.shape
    if dense is None or shape != (dimensions,):
        raise _failed(f"the dense vector of {text!r} has shape {shape}, expected ({dimensions},)")
    norm = float(np.linalg.norm(dense))
    if abs(norm - 1) > _NORM_TOLERANCE:
        raise _failed(f"the dense vector of {text!r} has norm {norm:.4f}, expected 1")
    return dense


def _check_colbert(text: str, embedding: Embedding) -> None:
    if embedding.colbert is None:
        return
    vectors, expected = len(embedding.colbert), embedding.token_count - 1
    if vectors != expected:
        raise _failed(f"{text!r} has {vectors} ColBERT vectors, expected {expected}")
    norms = np.linalg.norm(embedding.colbert, axis=1)
    if np.abs(norms - 1).max() > _NORM_TOLERANCE:
        raise _failed(
            f"a ColBERT vector of {text!r} has a norm between {norms.min():.4f} and "
            f"{norms.max():.4f}, expected 1"
        )


def _check_lexical(text: str, sparse: SparseVector | None) -> None:
    expected = BGE_M3_LEXICAL_WEIGHTS[text]
    found = {} if sparse is None else sparse.as_dict()
    for token_id in sorted(expected.keys() | found.keys()):
        weight, golden = found.get(token_id, 0.0), expected.get(token_id, 0.0)
        if abs(weight - golden) > _LEXICAL_TOLERANCE:
            raise _failed(
                f"BGE-M3 gives {text!r} the lexical ids {sorted(expected)}, this model gives "
                f"{sorted(found)} (id {token_id}: weight {weight:.4f}, expected {golden:.4f}); "
                "is a file damaged, or from another model? Run `bge-m3-server fetch`"
            )


def _check_difference(first: Floats, second: Floats) -> None:
    cosine = float(first @ second)
    if cosine > _SAME_VECTOR_COSINE:
        raise _failed(
            f"{TEXTS[0]!r} and {TEXTS[1]!r} have the same dense vector (cosine {cosine:.7f})"
        )


def _failed(reason: str) -> SelfTestError:
    return SelfTestError(f"the model failed its self-test: {reason}")
