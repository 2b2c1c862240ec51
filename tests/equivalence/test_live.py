"""The server against the real FlagEmbedding, on checkpoints that both load."""

import json

import numpy as np
import openai
import pytest
from bge_m3_server.domain import HeadWeights, score_pair

from tests.equivalence.checkpoints import CHECKPOINTS, WIDE
from tests.equivalence.compare import (
    agreement,
    assert_same,
    assert_same_dense,
    assert_same_sparse,
)
from tests.equivalence.numbers import Numbers
from tests.equivalence.parity import FLOORS, PRECISIONS, sample
from tests.equivalence.product import embed_all, embedder_of, load_directory
from tests.equivalence.test_golden import MODES
from tests.equivalence.texts import BATCHES, LONG_TEXTS, TEXTS
from tests.support.server_process import post, running_server

NAMES = [checkpoint.name for checkpoint in CHECKPOINTS]
LAYOUT_SUFFIXES = {"named heads": "", "last_hidden_state": "-last-hidden-state"}


def reference(reference_dir, name, limit=8192):
    return Numbers.load(reference_dir / name / f"reference_{limit}.npz")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    """A checkpoint."""
    return request.param


@pytest.fixture(scope="module", params=LAYOUT_SUFFIXES.values(), ids=LAYOUT_SUFFIXES)
def embedder(request, reference_dir, name):
    """The server's path over one fp32 layout of a checkpoint."""
    return embedder_of(load_directory(reference_dir / f"{name}{request.param}"))


def test_every_text_has_the_same_numbers_in_fp32(embedder, reference_dir, name):
    """All texts of all scripts, up to and beyond 8192 tokens, all three heads."""
    numbers = reference(reference_dir, name)

    assert len(numbers) >= 200
    for first in range(0, len(numbers), 64):
        places = range(first, min(first + 64, len(numbers)))
        texts = [numbers.texts[place] for place in places]
        assert_same(embed_all(embedder, texts), numbers, places)


def test_batches_of_mixed_lengths_have_the_same_numbers(embedder, reference_dir, name):
    """1 to 64 texts of mixed lengths in one call give what each text gives."""
    numbers = reference(reference_dir, name)
    place_of = {text: place for place, text in enumerate(numbers.texts)}
    for batch in BATCHES[-1:] if name == WIDE.name else BATCHES:
        places = [place_of[TEXTS[index]] for index in batch if TEXTS[index] in place_of]
        embeddings = embed_all(embedder, [numbers.texts[place] for place in places])
        assert_same(embeddings, numbers, places)


def test_the_long_texts_are_among_those_compared(reference_dir):
    """The comparison reaches 8192 tokens, and texts that are cut there."""
    numbers = reference(reference_dir, "tiny")
    lengths = [len(vectors) + 1 for vectors in numbers.colbert]

    assert set(LONG_TEXTS.values()) <= set(numbers.texts)
    assert max(lengths) == 8192
    assert lengths.count(8192) >= 4
    assert min(lengths) == 2


def test_a_smaller_limit_cuts_where_flagembedding_cuts(reference_dir):
    """BGE_M3_MAX_SEQ_LENGTH equals FlagEmbedding's max_length, special tokens included."""
    numbers = reference(reference_dir, "tiny", limit=128)
    embedder = embedder_of(load_directory(reference_dir / "tiny", BGE_M3_MAX_SEQ_LENGTH="128"))
    embeddings = embed_all(embedder, numbers.texts)

    assert_same(embeddings, numbers, range(len(numbers)))
    assert max(embedding.token_count for embedding in embeddings) == 128
    assert any(embedding.truncated for embedding in embeddings)


def test_openvino_has_the_same_numbers_in_fp32(reference_dir, name):
    """The other engine computes the same model."""
    numbers = sample(reference(reference_dir, name))
    embedder = embedder_of(load_directory(reference_dir / name, BGE_M3_EP="openvino"))

    assert_same(embed_all(embedder, numbers.texts), numbers, range(len(numbers)))


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp32"])
def test_lower_precisions_stay_above_their_floors(reference_dir, name, precision):
    """fp16 and int8 agree with fp32 FlagEmbedding as well as docs/parity.md says."""
    numbers = sample(reference(reference_dir, name))
    embedder = embedder_of(load_directory(reference_dir / name, BGE_M3_MODEL=precision))

    assert len(numbers) > 60
    for head, found in agreement(embed_all(embedder, numbers.texts), numbers).items():
        floor = FLOORS[precision][head]
        assert found.minimum >= floor.minimum, (head, found)
        assert found.mean >= floor.mean, (head, found)
        assert found.p5 >= floor.p5, (head, found)


@pytest.mark.parametrize("suffix", LAYOUT_SUFFIXES.values(), ids=LAYOUT_SUFFIXES)
def test_over_http_the_numbers_are_the_same(reference_dir, suffix):
    """A real server and the OpenAI SDK give FlagEmbedding's dense and sparse numbers."""
    numbers = reference(reference_dir, "tiny")
    places = [place for place, text in enumerate(numbers.texts) if len(text) <= 32_768]
    settings = {"BGE_M3_MODEL_DIR": str(reference_dir / f"tiny{suffix}"), "BGE_M3_MODEL": "fp32"}
    with running_server(settings) as server:
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        for first in range(0, len(places), 64):
            batch = places[first : first + 64]
            texts = [numbers.texts[place] for place in batch]
            dense = sdk.embeddings.create(model="bge-m3", input=texts, timeout=120).data
            both = post(server, "/v1/embeddings:both", {"input": texts}).json()["data"]
            for place, from_sdk, item in zip(batch, dense, both, strict=True):
                text = numbers.texts[place]
                for vector in (from_sdk.embedding, item["embedding"]):
                    assert_same_dense(WireEmbedding(np.float32(vector)), numbers.dense[place], text)
                assert_same_sparse(WireEmbedding(sparse=item), numbers.sparse[place], text)


class WireEmbedding:
    """What came over HTTP, in the shape that the comparison takes."""

    def __init__(self, dense=None, sparse=None):
        self.dense = dense
        self.sparse = self
        self._item = sparse

    def as_dict(self):
        values = self._item["sparse_values"]
        return dict(zip(values["indices"], values["values"], strict=True))


def test_all_five_scores_equal_compute_score(embedder, reference_dir, name):
    """Scores of the server's embeddings equal FlagEmbedding's own, to 1e-5."""
    cases = json.loads((reference_dir / name / "scores.json").read_text(encoding="utf-8"))
    pairs = cases[0]["pairs"]
    queries = embed_all(embedder, [query for query, _ in pairs])
    passages = embed_all(embedder, [passage for _, passage in pairs])
    for case in cases:
        weights = None if case["weights"] is None else HeadWeights(*case["weights"])
        ours = [score_pair(*pair, weights) for pair in zip(queries, passages, strict=True)]
        for mode, field in MODES.items():
            np.testing.assert_allclose(
                [getattr(score, field) for score in ours],
                case["scores"][mode],
                rtol=0,
                atol=1e-5,
                equal_nan=True,
                err_msg=f"{mode} {weights}",
            )
