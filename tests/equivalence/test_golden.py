"""The contract against committed numbers of FlagEmbedding, with no torch installed."""

import json
from pathlib import Path

import numpy as np
import pytest
from bge_m3_server.domain import HeadWeights, score_pair

from tests.equivalence.compare import assert_same
from tests.equivalence.product import embed_all, embedder_of, load_directory
from tests.support.xlmr_onnx import LAYOUTS

GOLDEN = Path(__file__).parent / "golden"
SCORES = json.loads((GOLDEN / "scores.json").read_text(encoding="utf-8"))
MODES = {
    "dense": "dense",
    "sparse": "sparse",
    "colbert": "colbert",
    "sparse+dense": "sparse_dense",
    "colbert+sparse+dense": "colbert_sparse_dense",
}


@pytest.fixture(scope="module", params=LAYOUTS)
def embedder(request, golden_models):
    """The server's path over the tiny checkpoint."""
    return embedder_of(load_directory(golden_models[request.param]))


def test_all_heads_equal_the_golden_numbers(embedder, golden_numbers):
    """Both published layouts give FlagEmbedding's dense, sparse and ColBERT numbers."""
    embeddings = embed_all(embedder, golden_numbers.texts)

    assert len(embeddings) >= 200
    assert_same(embeddings, golden_numbers, range(len(golden_numbers)))


def test_the_golden_sparse_weights_are_neither_all_zero_nor_all_positive(golden_numbers):
    """The fixture exercises ReLU on both sides."""
    kept = [len(weights) for weights in golden_numbers.sparse]

    assert 0 in kept
    assert max(kept) > 10


@pytest.mark.parametrize("case", SCORES, ids=lambda case: str(case["weights"]))
def test_all_five_scores_equal_compute_score(embedder, case):
    """Dense, sparse, ColBERT and both means, with default and custom weights, to 1e-5."""
    weights = None if case["weights"] is None else HeadWeights(*case["weights"])
    queries = embed_all(embedder, [query for query, _ in case["pairs"]])
    passages = embed_all(embedder, [passage for _, passage in case["pairs"]])
    ours = [score_pair(*pair, weights) for pair in zip(queries, passages, strict=True)]

    assert set(case["scores"]) == set(MODES)
    for mode, field in MODES.items():
        np.testing.assert_allclose(
            [getattr(score, field) for score in ours],
            case["scores"][mode],
            rtol=0,
            atol=1e-5,
            equal_nan=True,
            err_msg=mode,
        )
