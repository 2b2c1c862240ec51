"""A text's numbers depend on the text alone: not on neighbours, place, chunk, worker or time."""

import asyncio
import time

import attrs
import numpy as np
import pytest
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.domain import CostModel, Embedder, NoTelemetry
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.equivalence.product import ALL_HEADS, embed_all, embedder_of, load_directory
from tests.equivalence.texts import TEXTS, word_text

TOLERANCE = 1e-5
SHORT_TEXTS = [text for text in TEXTS if len(text) < 200]


@pytest.fixture(scope="module")
def model(golden_models):
    """The tiny checkpoint, loaded as the server loads it."""
    return load_directory(golden_models["sentence_and_tokens"])


@pytest.fixture(scope="module")
def alone(model):
    """Each text by itself."""
    embedder = embedder_of(model)
    return {text: embedder.embed([text], ALL_HEADS)[0] for text in SHORT_TEXTS}


@pytest.fixture(scope="module")
def engine(model):
    """A real engine whose small budget spreads a request over chunks and workers."""
    small = attrs.evolve(model, cost_model=CostModel(1.0, 0.0, 120))
    engine = Engine(lambda: small, EngineSettings(workers=3), NoTelemetry(), time.monotonic)
    engine.load()
    yield engine
    engine.stop()


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours.dense, theirs.dense, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(ours.colbert, theirs.colbert, rtol=0, atol=TOLERANCE)
    left, right = ours.sparse.as_dict(), theirs.sparse.as_dict()
    for token_id in left.keys() | right.keys():
        assert abs(left.get(token_id, 0) - right.get(token_id, 0)) <= TOLERANCE


def assert_bit_equal(ours, theirs):
    np.testing.assert_array_equal(ours.dense, theirs.dense)
    np.testing.assert_array_equal(ours.colbert, theirs.colbert)
    assert ours.sparse.as_dict() == theirs.sparse.as_dict()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(SHORT_TEXTS), min_size=1, max_size=24))
def test_through_the_engine_a_text_is_itself_in_any_company(engine, alone, texts):
    """Any mix, order and repetition, spread over chunks and workers: at most 1e-5 apart."""
    result = asyncio.run(engine.embed(texts, ALL_HEADS))

    for text, embedding in zip(texts, result.embeddings, strict=True):
        assert_close(embedding, alone[text])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(SHORT_TEXTS), min_size=1, max_size=16),
    st.integers(min_value=0, max_value=4000),
)
def test_any_chunking_gives_the_same(model, alone, texts, budget):
    """The workspace budget decides how texts are packed, never what they become."""
    embedder = Embedder(model.tokenizer, model.backends[0], CostModel(1.0, 0.01, budget))

    for text, embedding in zip(texts, embedder.embed(texts, ALL_HEADS), strict=True):
        assert_close(embedding, alone[text])


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(min_value=2, max_value=60),
    variants=st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True),
    data=st.data(),
)
def test_in_the_same_chunk_shape_a_text_is_bit_equal(model, tokens, variants, data):
    """Equal shapes give equal bits, whoever the neighbours are and in whatever order."""
    embedder = embedder_of(model)
    texts = [word_text(tokens, variant) for variant in variants]
    order = data.draw(st.permutations(range(len(texts))))

    first = embed_all(embedder, texts)
    second = embed_all(embedder, [texts[place] for place in order])
    for place, embedding in zip(order, second, strict=True):
        assert_bit_equal(embedding, first[place])


def test_repetition_is_bit_equal(model):
    """The same request gives the same bits again."""
    embedder = embedder_of(model)

    first, second = (embed_all(embedder, SHORT_TEXTS[:20]) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert_bit_equal(left, right)


def test_no_path_feeds_more_than_8192_positions(model, golden_models):
    """Whatever the configuration and the text, the engine never sees an 8193rd token."""
    widths = []

    @attrs.frozen(eq=False)
    class Watching:
        backend: object

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def run(self, batch, outputs):
            widths.append(batch.ids.shape[1])
            return {name: np.zeros((len(batch.ids), 64), np.float32) for name in outputs}

    for limit in ("8192", "99999", "0"):
        loaded = load_directory(golden_models["sentence_and_tokens"], BGE_M3_MAX_SEQ_LENGTH=limit)
        embedder = Embedder(loaded.tokenizer, Watching(loaded.backends[0]), loaded.cost_model)
        embedder.embed([word_text(8191), word_text(8193), word_text(20_000), "水" * 30_000])

    assert max(widths) == 8192
