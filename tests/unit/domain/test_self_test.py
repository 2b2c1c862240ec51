"""The start-up self-test over fake backends."""

import attrs
import numpy as np
import pytest
from bge_m3_server.domain.errors import InferenceError, SelfTestError
from bge_m3_server.domain.self_test import BGE_M3_LEXICAL_WEIGHTS, TEXTS, self_test
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer
from bge_m3_server.domain.types import (
    GraphLayout,
    HeadProjections,
    Heads,
    Projection,
    TokenizedText,
)


@attrs.define(eq=False)
class ScriptedBackend(FakeBackend):
    """Ready heads that a test can bend."""

    layout: GraphLayout = GraphLayout.READY_HEADS
    change: object = lambda outputs: outputs

    def run(self, batch, outputs):
        return self.change(FakeBackend.run(self, batch, outputs))


@attrs.frozen
class GoldenTokenizer:
    """Gives the golden texts their golden ids."""

    def encode(self, texts):
        return [
            TokenizedText(np.array([0, *BGE_M3_LEXICAL_WEIGHTS[text], 2], dtype=np.int64))
            for text in texts
        ]


@attrs.define(eq=False)
class GoldenBackend(FakeBackend):
    """Ready heads with BGE-M3's own lexical weights; `offset` moves the weight of `moved_id`."""

    layout: GraphLayout = GraphLayout.READY_HEADS
    offset: float = 0.0
    moved_id: int = 11679

    def run(self, batch, outputs):
        weights = {
            token_id: weight + (self.offset if token_id == self.moved_id else 0.0)
            for golden in BGE_M3_LEXICAL_WEIGHTS.values()
            for token_id, weight in golden.items()
        }
        results = dict(FakeBackend.run(self, batch, outputs))
        results["sparse_weights"] = np.vectorize(lambda token_id: weights.get(token_id, 0.0))(
            batch.ids
        ).astype(np.float32)
        return results


@pytest.mark.parametrize("layout", GraphLayout)
def test_a_sound_model_passes(layout):
    """Every layout with all its heads is tested and found sound."""
    backend = FakeBackend(layout=layout)

    self_test(FakeTokenizer(), backend)

    assert sum(len(run.batch.ids) for run in backend.runs) == len(TEXTS)


def test_a_dense_only_model_passes():
    """Heads that the model does not have are not asked for."""
    self_test(FakeTokenizer(), FakeBackend(heads=Heads.DENSE))


def test_non_finite_values_stop_the_start():
    """NaN is found before any client sees it."""
    tokenizer = FakeTokenizer()
    backend = FakeBackend(nan_id=tokenizer.word_id(TEXTS[0].split()[0]))

    with pytest.raises(SelfTestError, match="non-finite"):
        self_test(tokenizer, backend)


def test_an_engine_that_fails_stops_the_start():
    """The engine's own message is kept."""
    with pytest.raises(SelfTestError, match="no kernel for Foo"):
        self_test(FakeTokenizer(), FakeBackend(error=InferenceError("no kernel for Foo")))


def test_a_vector_of_the_wrong_width_stops_the_start():
    """A graph that does not keep its contract is refused."""
    backend = ScriptedBackend(
        change=lambda outputs: {**outputs, "dense_vecs": outputs["dense_vecs"][:, :5]}
    )

    with pytest.raises(SelfTestError, match=r"has shape \(5,\), expected \(8,\)"):
        self_test(FakeTokenizer(), backend)


def test_a_zero_vector_stops_the_start():
    """Norms must be 1; a zero vector has none."""
    backend = ScriptedBackend(
        change=lambda outputs: {**outputs, "dense_vecs": 0 * outputs["dense_vecs"]}
    )

    with pytest.raises(SelfTestError, match=r"has norm 0\.0000, expected 1"):
        self_test(FakeTokenizer(), backend)


def test_a_zero_colbert_vector_stops_the_start():
    """ColBERT vectors are checked like dense ones."""
    backend = ScriptedBackend(
        change=lambda outputs: {**outputs, "colbert_vecs": 0 * outputs["colbert_vecs"]}
    )

    with pytest.raises(SelfTestError, match="a ColBERT vector of"):
        self_test(FakeTokenizer(), backend)


def test_a_missing_colbert_vector_stops_the_start():
    """There is one vector per token after the first."""
    backend = ScriptedBackend(
        change=lambda outputs: {**outputs, "colbert_vecs": outputs["colbert_vecs"][:, :3]}
    )

    with pytest.raises(SelfTestError, match=r"has 2 ColBERT vectors, expected 5"):
        self_test(FakeTokenizer(), backend)


def test_a_model_that_says_the_same_to_everything_stops_the_start():
    """Different texts must get different vectors."""
    backend = ScriptedBackend(
        change=lambda outputs: {
            **outputs,
            "dense_vecs": np.repeat(outputs["dense_vecs"][:1], len(outputs["dense_vecs"]), axis=0),
        }
    )

    with pytest.raises(SelfTestError, match="have the same dense vector"):
        self_test(FakeTokenizer(), backend)


def test_the_golden_weights_pass_with_the_scatter_of_low_precisions():
    """What fp16 and int8 change is tolerated."""
    self_test(GoldenTokenizer(), GoldenBackend(offset=0.04), is_bge_m3=True)


def test_other_lexical_weights_are_not_those_of_bge_m3():
    """The message names the text, the ids and the weight that is off."""
    with pytest.raises(SelfTestError, match=r"id 11679: weight 0\.0000, expected 0\.2519"):
        self_test(GoldenTokenizer(), GoldenBackend(offset=-0.2519), is_bge_m3=True)


def test_ids_that_bge_m3_does_not_give_are_found():
    """A wrong tokenizer shows in the ids."""
    with pytest.raises(SelfTestError, match="or from another model"):
        self_test(FakeTokenizer(), FakeBackend(), is_bge_m3=True)


def test_a_bge_m3_without_its_sparse_head_is_refused():
    """Known BGE-M3 files always carry the sparse head."""
    with pytest.raises(SelfTestError, match=r"this model gives \[\]"):
        self_test(GoldenTokenizer(), FakeBackend(heads=Heads.DENSE), is_bge_m3=True)


def test_a_promised_head_without_weights_is_an_engine_fault():
    """A backend whose contract promises a head that it does not carry is refused."""

    @attrs.define(eq=False)
    class Empty(FakeBackend):
        @property
        def projections(self):
            return HeadProjections(colbert=Projection(np.eye(8, dtype=np.float32), np.zeros(8)))

    with pytest.raises(SelfTestError, match="weights are not loaded"):
        self_test(FakeTokenizer(), Empty())


def test_a_limit_that_leaves_no_word_of_either_text_passes():
    """With room for `<s></s>` only, both texts are the same, and so are their vectors."""
    self_test(FakeTokenizer(max_tokens=2), FakeBackend())
