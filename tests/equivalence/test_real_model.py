"""BGE-M3 itself against its published numbers: `make equivalence-real`, given the model."""

import os
from pathlib import Path

import pytest
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.domain import HeadWeights, ModelError, score_pair

from tests.equivalence import bge_m3_golden as golden
from tests.equivalence.compare import Agreement, cosine, sparse_cosine
from tests.equivalence.parity import PRECISIONS, table, write_section
from tests.equivalence.product import embed_all, embedder_of
from tests.equivalence.texts import TEXTS

CACHE = Path(os.environ.get("BGE_M3_CACHE_DIR") or "/cache")


def load_bge_m3(variant):
    """The published model from the cache."""
    if not os.environ.get("BGE_M3_EQUIVALENCE_REAL"):
        pytest.skip("BGE-M3 itself is compared by `make equivalence-real`, where it is cached")
    environment = {"BGE_M3_MODEL": variant, "BGE_M3_CACHE_DIR": str(CACHE)}
    config = load_config(environment, "linux")
    container = build_container(config)
    if not any(CACHE.glob("models--*--bge-m3")):
        pytest.skip(
            f"BGE-M3 is not in {CACHE}: run `bge-m3-server fetch --variant {variant}` there, or "
            "set BGE_M3_CACHE_DIR to where it is"
        )
    try:
        return embedder_of(container.load_model())
    except ModelError as error:
        pytest.skip(f"BGE-M3 {variant} is not complete in {CACHE}: {error}")


@pytest.fixture(scope="module", params=PRECISIONS)
def variant(request):
    """A published precision."""
    return request.param


@pytest.fixture(scope="module")
def embedder(variant):
    """The server's path over it."""
    return load_bge_m3(variant)


def test_lexical_weights_are_the_published_ones(embedder, variant):
    """Token ids and weights of six texts, per token."""
    tolerance = golden.WEIGHT_TOLERANCE[variant]
    embeddings = embed_all(embedder, golden.LEXICAL_WEIGHTS)
    for embedding, expected in zip(embeddings, golden.LEXICAL_WEIGHTS.values(), strict=True):
        found = embedding.sparse.as_dict()
        for token_id in found.keys() | expected.keys():
            assert found.get(token_id, 0) == pytest.approx(expected.get(token_id, 0), abs=tolerance)


def test_scores_are_the_published_ones(embedder, variant):
    """Dense, lexical, ColBERT and hybrid scores of the model card."""
    tolerance = golden.SCORE_TOLERANCE[variant]
    queries, passages = embed_all(embedder, golden.QUERIES), embed_all(embedder, golden.PASSAGES)
    weights = HeadWeights(*golden.HYBRID_WEIGHTS)
    for row, query in enumerate(queries):
        for column, passage in enumerate(passages):
            score = score_pair(query, passage, weights)
            for found, expected in (
                (score.dense, golden.DENSE_SCORES),
                (score.sparse, golden.LEXICAL_SCORES),
                (score.colbert, golden.COLBERT_SCORES),
                (score.colbert_sparse_dense, golden.HYBRID_SCORES),
            ):
                assert found == pytest.approx(expected[row][column], abs=tolerance)


def test_the_parity_table_is_written():
    """Every variant that is there, against fp32, goes into docs/parity.md."""
    texts = [text for text in TEXTS if len(text) < 400]
    reference = embed_all(load_bge_m3("fp32"), texts)
    rows = []
    for precision in PRECISIONS:
        try:
            ours = embed_all(load_bge_m3(precision), texts)
        except pytest.skip.Exception:
            continue
        pairs = list(zip(ours, reference, strict=True))
        figures = {
            "dense": [cosine(left.dense, right.dense) for left, right in pairs],
            "sparse": [
                sparse_cosine(left.sparse.as_dict(), right.sparse.as_dict())
                for left, right in pairs
                if len(right.sparse)
            ],
            "colbert": [
                value
                for left, right in pairs
                for value in (left.colbert * right.colbert).sum(axis=1).tolist()
            ],
        }
        rows += [
            ("BGE-M3", precision, head, Agreement.of(values)) for head, values in figures.items()
        ]
    write_section("bge-m3", table(rows))
    assert {head for _, _, head, _ in rows} == {"dense", "sparse", "colbert"}
