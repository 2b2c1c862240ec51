"""Fakes for tests against the domain: no model, no files, the same answer on every machine.

They keep the ports' promises, so a test that passes with them fails only on the code around them.
"""

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from .errors import InferenceError
from .pooling import sparse_token_weights
from .types import (
    ChunkStats,
    Floats,
    GraphLayout,
    HeadProjections,
    Heads,
    Ids,
    ModelContract,
    Projection,
    TokenBatch,
    TokenizedText,
)

BOS_ID, EOS_ID = 0, 2
"""``<s>`` and ``</s>``."""

_FIRST_WORD_ID, _MASK_ID = 4, 250_001

_PADDING_STATE = 1e3
"""An engine leaves any number on padding; a large one shows where it leaks into a result."""

_OUTPUTS_BY_LAYOUT: Mapping[GraphLayout, Mapping[Heads, str]] = {
    GraphLayout.SENTENCE_AND_TOKENS: {
        Heads.DENSE: "sentence_embedding",
        Heads.SPARSE: "token_embeddings",
        Heads.COLBERT: "token_embeddings",
    },
    GraphLayout.LAST_HIDDEN_STATE: {
        Heads.DENSE: "last_hidden_state",
        Heads.SPARSE: "last_hidden_state",
        Heads.COLBERT: "last_hidden_state",
    },
    GraphLayout.READY_HEADS: {
        Heads.DENSE: "dense_vecs",
        Heads.SPARSE: "sparse_weights",
        Heads.COLBERT: "colbert_vecs",
    },
}


@attrs.frozen
class FakeTokenizer:
    """A `Tokenizer` that makes one token of each word between white space.

    `max_tokens`: longest result, ``<s>`` and ``</s>`` included.
    """

    max_tokens: int = 8192

    def encode(self, texts: Sequence[str]) -> list[TokenizedText]:
        """``<s>``, one id per word, ``</s>``."""
        return [self._encode(text) for text in texts]

    def word_id(self, word: str) -> int:
        """The id of `word`: never a special one, equal in every process."""
        return _FIRST_WORD_ID + zlib.crc32(word.encode()) % (_MASK_ID - _FIRST_WORD_ID)

    def _encode(self, text: str) -> TokenizedText:
        words = text.split()
        kept = words[: self.max_tokens - 2]
        ids = [BOS_ID, *map(self.word_id, kept), EOS_ID]
        return TokenizedText(np.array(ids, dtype=np.int64), truncated=len(kept) < len(words))


@attrs.frozen(eq=False)
class FakeRun:
    """One call of `FakeBackend.run`: the batch and the outputs that were asked for."""

    batch: TokenBatch
    outputs: tuple[str, ...]


@attrs.define(eq=False)
class FakeBackend:
    """An `InferenceBackend` whose three layouts hold the same numbers.

    A row depends only on its own real ids and their positions, never on its neighbours. Vectors
    come with any length: scaling them to 1 is not left to the graph.

    `heads`: what the contract offers.
    `error`: raised by every run while it is set.
    `nan_id`: a text with this id comes out as NaN.
    `runs`, `releases`: every call so far, failed ones included.
    """

    layout: GraphLayout = GraphLayout.LAST_HIDDEN_STATE
    heads: Heads = Heads.DENSE | Heads.SPARSE | Heads.COLBERT
    hidden_size: int = 8
    error: InferenceError | None = None
    nan_id: int | None = None
    runs: list[FakeRun] = attrs.field(factory=list, init=False)
    releases: int = attrs.field(default=0, init=False)
    closed: bool = attrs.field(default=False, init=False)

    @property
    def contract(self) -> ModelContract:
        """The layout's real output names, for the heads on offer."""
        outputs = _OUTPUTS_BY_LAYOUT[self.layout]
        return ModelContract(
            layout=self.layout,
            input_names=("input_ids", "attention_mask"),
            outputs_by_head={head: name for head, name in outputs.items() if head in self.heads},
            hidden_size=self.hidden_size,
            max_tokens=8192,
        )

    @property
    def projections(self) -> HeadProjections:
        """Heads of the offer; none where the graph applies them itself."""
        if self.layout is GraphLayout.READY_HEADS:
            return HeadProjections()
        return HeadProjections(
            sparse=self._projection(out=1) if Heads.SPARSE in self.heads else None,
            colbert=self._projection(self.hidden_size) if Heads.COLBERT in self.heads else None,
        )

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """Give `outputs`, and only these."""
        self.runs.append(FakeRun(batch, tuple(outputs)))
        if self.error is not None:
            raise self.error
        states = np.full((*batch.ids.shape, self.hidden_size), _PADDING_STATE, dtype=np.float32)
        for row, mask in enumerate(batch.mask == 1):
            states[row, mask] = self._hidden_states(batch.ids[row, mask])
        available = {
            "last_hidden_state": states,
            "token_embeddings": states,
            "sentence_embedding": states[:, 0],
            "dense_vecs": states[:, 0],
            "sparse_weights": sparse_token_weights(states, self._projection(out=1)),
            "colbert_vecs": self._projection(self.hidden_size)(states),
        }
        return {name: available[name] for name in outputs}

    def release(self) -> None:
        """Count it."""
        self.releases += 1

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _hidden_states(self, ids: Ids) -> Floats:
        """A wave per id and position; the state of ``<s>`` sums them up, so it knows its text."""
        if self.nan_id in ids:
            return np.full((len(ids), self.hidden_size), np.nan, dtype=np.float32)
        dimensions = np.arange(1, self.hidden_size + 1)
        states: Floats = np.sin(
            np.outer(ids + 1, np.sqrt(dimensions)) + np.outer(np.arange(len(ids)), dimensions)
        ).astype(np.float32)
        states[0] = states.sum(axis=0)
        return states

    def _projection(self, out: int) -> Projection:
        entries = np.arange(1, out * self.hidden_size + 1, dtype=np.float32)
        return Projection(
            weight=np.cos(entries).reshape(out, self.hidden_size),
            bias=np.full(out, 0.5, dtype=np.float32),
        )


@attrs.define
class FakeClock:
    """A `Clock` that moves only by `advance`."""

    now_seconds: float = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; a clock never goes backwards."""
        if seconds < 0:
            raise ValueError(f"a clock never goes backwards: cannot advance by {seconds} s")
        self.now_seconds += seconds


@attrs.define(eq=False)
class RecordingTelemetry:
    """A `Telemetry` that keeps every span once it has ended, failed ones included.

    `requests`: route and attributes.
    `chunks`: what each forward pass was about to cost.
    """

    requests: list[tuple[str, Mapping[str, str | int]]] = attrs.field(factory=list, init=False)
    chunks: list[ChunkStats] = attrs.field(factory=list, init=False)

    @contextlib.contextmanager
    def request(self, route: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
        """A span that ends up in `requests`."""
        try:
            yield
        finally:
            self.requests.append((route, attributes))

    @contextlib.contextmanager
    def chunk(self, stats: ChunkStats, /) -> Iterator[None]:
        """A span that ends up in `chunks`."""
        try:
            yield
        finally:
            self.chunks.append(stats)
