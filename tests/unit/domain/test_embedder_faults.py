"""What the embedder does with numbers, heads and engines that fail."""

import attrs
import numpy as np
import pytest
from bge_m3_server.domain import (
    CostModel,
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
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer

from tests.support.embedding import EVERY_HEAD, embed, tokenized

ONE_BY_ONE = CostModel(1.0, 0.0, 0)


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
