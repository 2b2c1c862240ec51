"""The path of a text: tokenise once → pack → run each chunk → pool → scatter back."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from .binpack import bin_pack
from .cost_model import CostModel
from .errors import HeadUnavailableError, InferenceError, InvalidInputError, NonFiniteOutputError
from .padding import ANY_PADDING, PaddingRule
from .pooling import l2_normalise, pool_colbert, pool_sparse, sparse_token_weights
from .ports import InferenceBackend, Telemetry, Tokenizer
from .types import (
    ChunkStats,
    Embedding,
    Floats,
    GraphLayout,
    HeadProjections,
    Heads,
    ModelContract,
    Projection,
    TokenBatch,
    TokenizedText,
)

PAD_ID = 1
"""``<pad>`` of the XLM-RoBERTa vocabulary."""


_Nothing = contextlib.AbstractContextManager[None]


class NoTelemetry:
    """A `Telemetry` that records nothing."""

    def request(self, _route: str, _attributes: Mapping[str, str | int]) -> _Nothing:
        """No span."""
        return contextlib.nullcontext()

    def chunk(self, _stats: ChunkStats) -> _Nothing:
        """No span."""
        return contextlib.nullcontext()


@attrs.frozen
class Embedder:
    """Texts in, embeddings out, in the caller's thread.

    >>> embedder = Embedder(tokenizer, backend, cost_model)
    >>> embedder.embed(["hello"], Heads.DENSE | Heads.SPARSE)
    """

    tokenizer: Tokenizer
    backend: InferenceBackend
    cost_model: CostModel
    telemetry: Telemetry = attrs.field(factory=NoTelemetry)
    padding: PaddingRule = ANY_PADDING

    def embed(self, texts: Sequence[str], heads: Heads = Heads.DENSE) -> list[Embedding]:
        """Embed `texts`; one result per text, in order.

        Raises:
            HeadUnavailableError: the model lacks one of `heads`.
            NonFiniteOutputError: the model gave NaN or infinity for a text; `index` tells which.
            InferenceError: the engine failed.
        """
        require_heads(self.backend.contract, heads)
        every = self.tokenizer.encode(texts)
        places, tokenized = distinct(every)
        results: dict[int, Embedding] = {}
        for chunk in bin_pack([len(text) for text in tokenized], self.cost_model, self.padding):
            rows = [tokenized[index] for index in chunk.indices]
            estimate = self.cost_model.chunk_cost_bytes(len(chunk), chunk.max_tokens)
            outcomes = embed_chunk(rows, heads, self.backend, self.telemetry, estimate)
            for index, outcome in zip(chunk.indices, outcomes, strict=True):
                if isinstance(outcome, NonFiniteOutputError):
                    first = places.index(index)
                    raise NonFiniteOutputError(f"input[{first}]: {outcome}", index=first)
                results[index] = outcome
        return [results[place] for place in places]


def distinct(
    texts: Sequence[TokenizedText],
) -> tuple[list[int], list[TokenizedText]]:
    """Each different text once, and for every text the place of its like among them."""
    seen: dict[tuple[bytes, bool], int] = {}
    places: list[int] = []
    kept: list[TokenizedText] = []
    for text in texts:
        key = (text.ids.tobytes(), text.truncated)
        if key not in seen:
            seen[key] = len(kept)
            kept.append(text)
        places.append(seen[key])
    return places, kept


def require_heads(contract: ModelContract, heads: Heads) -> None:
    """Raise unless the model can give all of `heads`, and at least one is asked for."""
    if not heads:
        raise InvalidInputError(
            "no output was asked for: choose at least one of dense, sparse, colbert"
        )
    for head in heads:
        if head not in contract.heads:
            available = ", ".join(_name(known) for known in contract.heads)
            raise HeadUnavailableError(
                f"the loaded model has no {_name(head)} output; it has: {available}"
            )


def embed_chunk(
    texts: Sequence[TokenizedText],
    heads: Heads,
    backend: InferenceBackend,
    telemetry: Telemetry,
    estimated_bytes: int | None = None,
) -> list[Embedding | NonFiniteOutputError]:
    """One forward pass over `texts`; a text whose output is not finite fails alone.

    Raises:
        InferenceError: the engine failed on the whole chunk.
    """
    batch = pad(texts)
    rows, max_tokens = batch.ids.shape
    stats = ChunkStats(rows, max_tokens, int(batch.lengths.sum()), estimated_bytes)
    contract = backend.contract
    with telemetry.chunk(stats):
        outputs = backend.run(batch, contract.outputs_for(heads))
    pooled = _pool(outputs, batch, heads, contract, backend.projections)
    return [
        attrs.evolve(result, truncated=text.truncated) if isinstance(result, Embedding) else result
        for result, text in zip(pooled, texts, strict=True)
    ]


def pad(texts: Sequence[TokenizedText]) -> TokenBatch:
    """Right-pad to the longest text, and to one position at least."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    width = max(1, int(lengths.max(initial=0)))
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    ids = np.full((len(texts), width), PAD_ID, dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text.ids
    return TokenBatch(ids=ids, mask=mask, lengths=lengths)


def _pool(
    outputs: Mapping[str, Floats],
    batch: TokenBatch,
    heads: Heads,
    contract: ModelContract,
    projections: HeadProjections,
) -> Iterator[Embedding | NonFiniteOutputError]:
    """Turn graph outputs into one result per row, with only the heads asked for."""

    def output(head: Heads) -> Floats | None:
        if head not in heads:
            return None
        return np.asarray(outputs[contract.outputs_by_head[head]], dtype=np.float32)

    dense, sparse, colbert = output(Heads.DENSE), output(Heads.SPARSE), output(Heads.COLBERT)
    with np.errstate(invalid="ignore"):  # rows with infinity are refused below
        if dense is not None:
            # Of (batch, seq, hidden) states, that of `<s>` stands for the sentence.
            is_hidden_state = contract.layout is GraphLayout.LAST_HIDDEN_STATE
            dense = l2_normalise(dense[:, 0] if is_hidden_state else dense)
        if sparse is not None and contract.layout is not GraphLayout.READY_HEADS:
            sparse = sparse_token_weights(sparse, _trained(projections.sparse))

    for row, length in enumerate(batch.lengths.tolist()):
        raw = {
            Heads.DENSE: None if dense is None else dense[row],
            Heads.SPARSE: None if sparse is None else sparse[row, :length],
            Heads.COLBERT: None if colbert is None else colbert[row, :length],
        }
        broken = [head for head, values in raw.items() if not _finite(values)]
        if broken:
            names = ", ".join(map(_name, broken))
            yield NonFiniteOutputError(
                f"the model returned non-finite {names} values for a text of {length} tokens"
            )
            continue
        weights, states = raw[Heads.SPARSE], raw[Heads.COLBERT]
        yield Embedding(
            token_count=length,
            dense=raw[Heads.DENSE],
            sparse=None if weights is None else pool_sparse(batch.ids[row, :length], weights),
            colbert=None if states is None else _colbert(states, contract, projections),
        )


def _colbert(states: Floats, contract: ModelContract, projections: HeadProjections) -> Floats:
    if contract.layout is GraphLayout.READY_HEADS:
        return l2_normalise(states[1:])
    return pool_colbert(states, _trained(projections.colbert))


def _trained(projection: Projection | None) -> Projection:
    if projection is None:  # a backend whose contract promises a head that it does not carry
        raise InferenceError("the backend's contract promises a head whose weights are not loaded")
    return projection


def _finite(values: Floats | None) -> bool:
    return values is None or bool(np.isfinite(values).all())


def _name(head: Heads) -> str:
    return str(head.name).lower()
