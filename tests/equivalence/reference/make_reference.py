"""Runs FlagEmbedding's own `BGEM3FlagModel` and keeps what it returns."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from FlagEmbedding import BGEM3FlagModel

from tests.equivalence.checkpoints import TINY, WIDE, Checkpoint
from tests.equivalence.numbers import Numbers
from tests.equivalence.texts import LONG_TEXTS, PAIRS, TEXTS

MAX_TOKENS = 8192
SMALL_LIMIT_TOKENS = 128

LONGEST_WIDE_TOKENS = 64
"""Texts beyond it are left to the narrower checkpoints: they would cost minutes."""

BATCH = 4
"""FlagEmbedding sorts by length, so that small batches pad little."""

WEIGHTS: Sequence[Sequence[float] | None] = (
    None,
    (1.0, 1.0, 1.0),
    (0.4, 0.2, 0.4),
    (1.0, 0.3, 1.0),
    (2.0, 0.0, 0.0),
    (0.0, 0.0, 1.0),
)
"""Weights of dense, sparse and ColBERT; None leaves them to FlagEmbedding."""


def write_reference(checkpoint: Checkpoint, directory: Path) -> None:
    """Write ``reference_8192.npz``, ``reference_128.npz`` and ``scores.json`` into `directory`.

    The long texts and the smaller limit are computed with the smallest checkpoint only.
    """
    model = BGEM3FlagModel(str(directory), use_fp16=False, devices="cpu")
    texts = list(TEXTS)
    if checkpoint is WIDE:
        lengths = [len(ids) for ids in model.tokenizer(texts)["input_ids"]]
        texts = [
            text
            for text, tokens in zip(texts, lengths, strict=True)
            if tokens <= LONGEST_WIDE_TOKENS
        ]
    full = encode(model, texts, MAX_TOKENS, batch=BATCH)
    if checkpoint is TINY:
        long_texts = list(LONG_TEXTS.values())
        full = joined(full, encode(model, long_texts, MAX_TOKENS, batch=1))
        cut = encode(model, [*texts, *long_texts], SMALL_LIMIT_TOKENS, batch=BATCH)
        cut.save(directory / f"reference_{SMALL_LIMIT_TOKENS}.npz")
    full.save(directory / f"reference_{MAX_TOKENS}.npz")
    content = [score(model, weights) for weights in WEIGHTS]
    (directory / "scores.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def encode(model: BGEM3FlagModel, texts: Sequence[str], max_length: int, batch: int) -> Numbers:
    """All three heads of `texts`."""
    output = model.encode(
        list(texts),
        batch_size=batch,
        max_length=max_length,
        return_dense=True,
        return_sparse=True,
        return_colbert_vecs=True,
    )
    return Numbers(
        texts=texts,
        dense=output["dense_vecs"],
        sparse=[
            {int(token): float(weight) for token, weight in weights.items()}
            for weights in output["lexical_weights"]
        ],
        colbert=output["colbert_vecs"],
    )


def joined(first: Numbers, second: Numbers) -> Numbers:
    """Both, one after the other."""
    return Numbers(
        texts=[*first.texts, *second.texts],
        dense=np.concatenate([first.dense, second.dense]),
        sparse=[*first.sparse, *second.sparse],
        colbert=[*first.colbert, *second.colbert],
    )


def score(model: BGEM3FlagModel, weights: Sequence[float] | None) -> dict[str, object]:
    """The five scores of `PAIRS`.

    One pair at a time: in a batch, the zero vectors that pad the shorter passages take part in
    the maximum and lift a query token's negative similarities to zero.
    """
    scores = model.compute_score(
        list(PAIRS),
        batch_size=1,
        max_query_length=MAX_TOKENS,
        max_passage_length=MAX_TOKENS,
        weights_for_different_modes=None if weights is None else list(weights),
    )
    return {"weights": weights, "pairs": PAIRS, "scores": scores}
