"""How close two models are on the same texts."""

import numpy as np
import pytest
from bge_m3_server.domain.fidelity import FLOORS, Fidelity, fidelity, shortfalls
from bge_m3_server.domain.types import Embedding, SparseVector


def embedding(dense=(1.0, 0.0), sparse=None, colbert=None):
    indices = np.array(sorted(sparse or {}), np.int64)
    values = np.array([(sparse or {})[index] for index in indices.tolist()], np.float32)
    return Embedding(
        token_count=3,
        dense=np.array(dense, np.float32),
        sparse=None if sparse is None else SparseVector(indices, values),
        colbert=None if colbert is None else np.array(colbert, np.float32),
    )


def test_a_model_agrees_with_itself():
    """All figures are 1, and nothing falls short."""
    texts = [embedding(sparse={5: 0.5, 7: 0.25, 9: 1.0}, colbert=[[1, 0], [0, 1]])]
    found = fidelity(texts, texts)
    assert found == Fidelity(
        dense_cosine_min=1,
        sparse_jaccard_mean=1,
        sparse_weight_correlation=pytest.approx(1),
        colbert_cosine_p5=1,
    )
    assert shortfalls(found) == []


def test_the_worst_text_counts_for_dense():
    """Good texts do not make up for a bad one."""
    angle = 0.1
    reference = [embedding(), embedding()]
    candidate = [embedding(), embedding((np.cos(angle), np.sin(angle)))]
    assert fidelity(reference, candidate).dense_cosine_min == pytest.approx(np.cos(angle))


def test_sparse_sets_and_weights_are_compared():
    """Half of the ids in common, and shared weights in another order."""
    found = fidelity(
        [embedding(sparse={1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})],
        [embedding(sparse={1: 0.3, 2: 0.2, 3: 0.1, 9: 0.4})],
    )
    assert found.sparse_jaccard_mean == pytest.approx(3 / 5)
    assert found.sparse_weight_correlation == pytest.approx(-1)


def test_what_is_missing_is_not_judged():
    """A model without heads has no figures for them."""
    found = fidelity([embedding()], [embedding()])
    assert found == Fidelity(dense_cosine_min=1)
    assert shortfalls(found) == []


@pytest.mark.parametrize("figure", [float("nan"), 0.9])
@pytest.mark.parametrize("name", Fidelity.__annotations__)
def test_each_figure_has_a_floor(name, figure):
    """The message tells the name, the figure and the floor."""
    (message,) = shortfalls(Fidelity(**{name: figure}))
    assert name.replace("_", " ") in message
    assert f"{figure:.5f}" in message
    assert str(getattr(FLOORS, name)) in message


def test_a_vector_that_is_not_finite_falls_short():
    """NaN must not pass for agreement."""
    found = fidelity([embedding(), embedding()], [embedding((np.nan, 0)), embedding()])
    assert shortfalls(found)
