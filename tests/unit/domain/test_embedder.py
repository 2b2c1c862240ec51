"""What a text becomes: the same embedding, whatever its company and the graph's layout."""

import attrs
import numpy as np
import pytest
from bge_m3_server.domain import (
    CostModel,
    Embedder,
    GraphLayout,
    Heads,
    NoTelemetry,
    embed_chunk,
)
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.embedding import EVERY_HEAD, ROOMY, embed, tokenized

WORDS = ["tall", "small", "wide", "old", "new", "red", "blue", "one", "two", "day"]
TEXTS = ["a tall tree", "", "one two three four five six", "day", "one one day", "red red red red"]

texts_of_a_request = st.lists(
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12
)
ceilings = st.integers(0, 60).map(lambda tokens: CostModel(1.0, 0.0, tokens))


def assert_same(left, right):
    """Equal up to float rounding in every head."""
    assert (left.token_count, left.truncated) == (right.token_count, right.truncated)
    np.testing.assert_allclose(left.dense, right.dense, atol=1e-5)
    np.testing.assert_allclose(left.colbert, right.colbert, atol=1e-5)
    left_weights, right_weights = left.sparse.as_dict(), right.sparse.as_dict()
    for token in left_weights.keys() | right_weights.keys():
        assert left_weights.get(token, 0) == pytest.approx(right_weights.get(token, 0), abs=1e-4)


@settings(deadline=None, max_examples=60)
@given(texts_of_a_request, ceilings, st.sampled_from(GraphLayout))
def test_result_does_not_depend_on_chunking(texts, cost_model, layout):
    """Under any ceiling a text gets what it gets when it is alone."""
    together = embed(texts, backend=FakeBackend(layout), cost_model=cost_model)

    assert len(together) == len(texts)
    for text, result in zip(texts, together, strict=True):
        (alone,) = embed([text], backend=FakeBackend(layout))
        assert_same(result, alone)


@settings(deadline=None, max_examples=60)
@given(texts_of_a_request.flatmap(lambda texts: st.tuples(st.just(texts), st.permutations(texts))))
def test_result_does_not_depend_on_input_order(texts_and_permutation):
    """Shuffled texts give the same results, shuffled."""
    texts, shuffled = texts_and_permutation
    cost_model = CostModel(1.0, 0.0, 20)

    by_text = dict(zip(texts, embed(texts, cost_model=cost_model), strict=True))

    for text, result in zip(shuffled, embed(shuffled, cost_model=cost_model), strict=True):
        assert_same(result, by_text[text])


@pytest.mark.parametrize("layout", GraphLayout)
def test_every_layout_gives_the_same_embeddings(layout):
    """Where the graph stops and the domain takes over does not show in the result."""
    expected = embed(TEXTS, backend=FakeBackend(GraphLayout.LAST_HIDDEN_STATE))

    for result, reference in zip(embed(TEXTS, backend=FakeBackend(layout)), expected, strict=True):
        assert_same(result, reference)


@pytest.mark.parametrize("layout", GraphLayout)
def test_shapes_and_norms(layout):
    """Dense is one unit vector, ColBERT one per token after ``<s>``, sparse a weight per word."""
    (result,) = embed(["tall tall tree"], backend=FakeBackend(layout, hidden_size=16))

    words = {FakeTokenizer().word_id("tall"), FakeTokenizer().word_id("tree")}
    assert result.token_count == 5
    assert result.dense.shape == (16,)
    assert np.linalg.norm(result.dense) == pytest.approx(1, abs=1e-5)
    assert result.colbert.shape == (4, 16)
    np.testing.assert_allclose(np.linalg.norm(result.colbert, axis=1), 1, atol=1e-5)
    assert words >= result.sparse.as_dict().keys() != set()
    assert {result.dense.dtype, result.colbert.dtype, result.sparse.values.dtype} == {
        np.dtype(np.float32)
    }


def test_dense_is_the_state_of_the_first_token():
    """The sentence vector is the normalised ``<s>`` state, not a mean over tokens."""
    backend = FakeBackend()
    texts = tokenized("a tall tree")
    states = backend.run(pad(texts), ["last_hidden_state"])["last_hidden_state"]

    (result,) = embed_chunk(texts, Heads.DENSE, backend, NoTelemetry())

    np.testing.assert_allclose(result.dense, states[0, 0] / np.linalg.norm(states[0, 0]), atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "fields"),
    [
        (Heads.DENSE, {"dense"}),
        (Heads.SPARSE, {"sparse"}),
        (Heads.COLBERT, {"colbert"}),
        (Heads.DENSE | Heads.SPARSE, {"dense", "sparse"}),
        (EVERY_HEAD, {"dense", "sparse", "colbert"}),
    ],
)
@pytest.mark.parametrize("layout", GraphLayout)
def test_only_the_heads_asked_for_are_given(layout, heads, fields):
    """Other heads are None."""
    (result,) = embed(["a tall tree"], heads, backend=FakeBackend(layout))

    given_fields = {
        name for name in ("dense", "sparse", "colbert") if getattr(result, name) is not None
    }
    assert given_fields == fields


def test_dense_is_the_default():
    """Without a choice of heads the dense vector is given."""
    (result,) = Embedder(FakeTokenizer(), FakeBackend(), ROOMY).embed(["day"])

    assert result.dense is not None
    assert result.sparse is None


def test_a_text_that_was_cut_says_so():
    """`truncated` and the token count belong to each text, whatever its chunk."""
    results = embed(["one two three four five", "one two", "one"], max_tokens=4)

    assert [(r.token_count, r.truncated) for r in results] == [(4, True), (4, False), (3, False)]


@attrs.define(eq=False)
class HalfPrecisionBackend(FakeBackend):
    """A graph whose outputs are float16."""

    def run(self, batch, outputs):
        """Round every output."""
        results = super().run(batch, outputs)
        return {name: values.astype(np.float16) for name, values in results.items()}


@pytest.mark.parametrize("layout", GraphLayout)
def test_half_precision_outputs_become_float32(layout):
    """Pooling is done in float32, whatever the graph returns."""
    (result,) = embed(["a tall tree"], backend=HalfPrecisionBackend(layout))

    assert {result.dense.dtype, result.colbert.dtype, result.sparse.values.dtype} == {
        np.dtype(np.float32)
    }
    assert np.linalg.norm(result.dense) == pytest.approx(1, abs=1e-6)
