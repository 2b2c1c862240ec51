"""The path of a text from string to embedding."""

import attrs
import numpy as np
import pytest
from bge_m3_server.domain import (
    ChunkStats,
    CostModel,
    Embedder,
    Embedding,
    GraphLayout,
    HeadProjections,
    Heads,
    HeadUnavailableError,
    InferenceError,
    InvalidInputError,
    NonFiniteOutputError,
    NoTelemetry,
    embed_chunk,
)
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer, RecordingTelemetry
from hypothesis import given, settings
from hypothesis import strategies as st

EVERY_HEAD = Heads.DENSE | Heads.SPARSE | Heads.COLBERT
ROOMY = CostModel(1.0, 0.0, 10**9)
ONE_BY_ONE = CostModel(1.0, 0.0, 0)

WORDS = ["tall", "small", "wide", "old", "new", "red", "blue", "one", "two", "day"]
TEXTS = ["a tall tree", "", "one two three four five six", "day", "one one day", "red red red red"]

texts_of_a_request = st.lists(
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12
)
ceilings = st.integers(0, 60).map(lambda tokens: CostModel(1.0, 0.0, tokens))


def embed(texts, heads=EVERY_HEAD, *, backend=None, cost_model=ROOMY, max_tokens=8192):
    return Embedder(FakeTokenizer(max_tokens), backend or FakeBackend(), cost_model).embed(
        texts, heads
    )


def tokenized(*texts):
    return FakeTokenizer().encode(texts)


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


def test_only_the_outputs_needed_are_computed():
    """Without sparse or ColBERT the token states are not asked of the engine."""
    backend = FakeBackend(GraphLayout.SENTENCE_AND_TOKENS)

    embed(["a"], Heads.DENSE, backend=backend)
    embed(["a"], Heads.SPARSE | Heads.COLBERT, backend=backend)
    embed(["a"], EVERY_HEAD, backend=backend)

    assert [run.outputs for run in backend.runs] == [
        ("sentence_embedding",),
        ("token_embeddings",),
        ("sentence_embedding", "token_embeddings"),
    ]


def test_dense_is_the_default():
    """Without a choice of heads the dense vector is given."""
    (result,) = Embedder(FakeTokenizer(), FakeBackend(), ROOMY).embed(["day"])

    assert result.dense is not None
    assert result.sparse is None


@pytest.mark.parametrize("layout", GraphLayout)
def test_several_heads_come_from_one_pass(layout):
    """Dense and sparse together run the model once, and give what each gives alone."""
    backend = FakeBackend(layout)

    (both,) = embed(["a tall tree"], Heads.DENSE | Heads.SPARSE, backend=backend)

    assert len(backend.runs) == 1
    (dense,) = embed(["a tall tree"], Heads.DENSE, backend=backend)
    (sparse,) = embed(["a tall tree"], Heads.SPARSE, backend=backend)
    np.testing.assert_array_equal(both.dense, dense.dense)
    assert both.sparse.as_dict() == sparse.sparse.as_dict()


def test_texts_are_packed_by_the_cost_model():
    """Short texts run first and together, as the ceiling allows."""
    backend = FakeBackend()

    embed(["one two three four", "one", "two"], backend=backend, cost_model=CostModel(1.0, 0.0, 6))

    assert [run.batch.ids.shape for run in backend.runs] == [(2, 3), (1, 6)]


def test_no_texts_no_results():
    """An empty request does not touch the engine."""
    backend = FakeBackend()

    assert embed([], backend=backend) == []
    assert backend.runs == []


def test_a_text_that_was_cut_says_so():
    """`truncated` and the token count belong to each text, whatever its chunk."""
    results = embed(["one two three four five", "one two", "one"], max_tokens=4)

    assert [(r.token_count, r.truncated) for r in results] == [(4, True), (4, False), (3, False)]


@pytest.mark.parametrize("layout", GraphLayout)
@pytest.mark.parametrize("heads", [Heads.DENSE, Heads.SPARSE, Heads.COLBERT])
def test_a_non_finite_text_fails_alone(layout, heads):
    """Its neighbours in the chunk keep their results."""
    backend = FakeBackend(layout, nan_id=FakeTokenizer().word_id("bad"))

    first, broken, last = embed_chunk(
        tokenized("one day", "a bad day", "red"), heads, backend, NoTelemetry()
    )

    assert isinstance(first, Embedding)
    assert isinstance(last, Embedding)
    assert isinstance(broken, NonFiniteOutputError)
    assert broken.index is None
    assert str(broken) == (
        f"the model returned non-finite {heads.name.lower()} values for a text of 5 tokens"
    )


def test_a_non_finite_text_names_every_broken_head():
    """The message lists the heads that cannot be given."""
    backend = FakeBackend(nan_id=FakeTokenizer().word_id("bad"))

    (broken,) = embed_chunk(tokenized("bad"), EVERY_HEAD, backend, NoTelemetry())

    assert "non-finite dense, sparse, colbert values" in str(broken)


def test_a_request_with_a_non_finite_text_fails_by_its_index():
    """The error tells the place of the text in the request, not in its chunk."""
    backend = FakeBackend(nan_id=FakeTokenizer().word_id("bad"))

    with pytest.raises(NonFiniteOutputError, match=r"input\[2\]: the model returned") as caught:
        embed(["one two three four", "one", "a bad day"], backend=backend, cost_model=ONE_BY_ONE)

    assert caught.value.index == 2


@attrs.define(eq=False)
class OverflowingBackend(FakeBackend):
    """Infinity, as half-precision engines give on overflow, in every output of the second row."""

    def run(self, batch, outputs):
        """Overflow row 1."""
        results = super().run(batch, outputs)
        for values in results.values():
            values[1] = np.inf
        return results


@pytest.mark.parametrize("layout", GraphLayout)
def test_infinity_is_not_an_embedding(layout):
    """A text whose numbers overflowed fails like one with NaN, without disturbing others."""
    backend = OverflowingBackend(layout)

    results = embed_chunk(tokenized("one", "two", "red"), EVERY_HEAD, backend, NoTelemetry())

    assert [type(result) for result in results] == [Embedding, NonFiniteOutputError, Embedding]


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


@pytest.mark.parametrize(
    ("offered", "asked", "message"),
    [
        (Heads.DENSE, Heads.SPARSE, "the loaded model has no sparse output; it has: dense"),
        (
            Heads.DENSE | Heads.SPARSE,
            EVERY_HEAD,
            "the loaded model has no colbert output; it has: dense, sparse",
        ),
    ],
)
def test_a_head_that_the_model_lacks_is_refused(offered, asked, message):
    """The message names the head and what there is instead; the engine is not touched."""
    backend = FakeBackend(heads=offered)

    with pytest.raises(HeadUnavailableError, match=f"^{message}$"):
        embed(["a"], asked, backend=backend)
    assert backend.runs == []


def test_asking_for_nothing_is_refused():
    """At least one output must be wanted."""
    with pytest.raises(InvalidInputError, match="choose at least one of dense, sparse, colbert"):
        embed(["a"], Heads(0))


def test_an_engine_failure_reaches_the_caller():
    """`InferenceError` of the backend passes through as it is."""
    error = InferenceError("the engine ran out of memory")

    with pytest.raises(InferenceError) as caught:
        embed(["a"], backend=FakeBackend(error=error))
    assert caught.value is error


@attrs.define(eq=False)
class HeadlessBackend(FakeBackend):
    """A backend that promises heads whose weights it does not carry."""

    @property
    def projections(self):
        """None at all."""
        return HeadProjections()


@pytest.mark.parametrize("heads", [Heads.SPARSE, Heads.COLBERT])
def test_a_promised_head_without_weights_is_an_error(heads):
    """A backend that contradicts its contract fails with a sentence, not an AttributeError."""
    with pytest.raises(InferenceError, match="promises a head whose weights are not loaded"):
        embed(["a"], heads, backend=HeadlessBackend())


def test_padding_is_on_the_right():
    """Rows are as wide as the longest text, filled with ``<pad>`` under a zero mask."""
    batch = pad(tokenized("", "one two"))

    one, two = FakeTokenizer().word_id("one"), FakeTokenizer().word_id("two")
    assert batch.ids.tolist() == [[0, 2, 1, 1], [0, one, two, 2]]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.lengths.tolist() == [2, 4]
    assert {batch.ids.dtype, batch.mask.dtype, batch.lengths.dtype} == {np.dtype(np.int64)}


def test_a_batch_has_one_position_at_least():
    """No engine is given an axis of length zero."""
    assert pad([]).ids.shape == (0, 1)


def test_every_pass_is_a_span_with_its_figures():
    """The span of a chunk carries its shape, its tokens and the estimate."""
    telemetry = RecordingTelemetry()
    cost_model = CostModel(10.0, 0.0, 60)

    Embedder(FakeTokenizer(), FakeBackend(), cost_model, telemetry).embed(["one", "", "one two"])

    assert telemetry.chunks == [
        ChunkStats(batch=2, max_tokens=3, total_tokens=5, estimated_bytes=60),
        ChunkStats(batch=1, max_tokens=4, total_tokens=4, estimated_bytes=40),
    ]


def test_the_span_lasts_as_long_as_the_pass():
    """It has not ended while the engine works, and it ends when the engine fails."""
    telemetry = RecordingTelemetry()
    ended_during_run = []

    class Observed(FakeBackend):
        def run(self, batch, outputs):
            ended_during_run.append(len(telemetry.chunks))
            return super().run(batch, outputs)

    failing = Observed(error=InferenceError("no"))
    with pytest.raises(InferenceError):
        embed_chunk(tokenized("one"), Heads.DENSE, failing, telemetry)

    assert ended_during_run == [0]
    assert len(telemetry.chunks) == 1


def test_no_telemetry_is_a_telemetry():
    """Spans that nobody records let the work through."""
    silent = NoTelemetry()

    with silent.request("/v1/embeddings", {"texts": 1}), silent.chunk(ChunkStats(1, 3, 3)):
        pass
