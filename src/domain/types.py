"""Values that travel through the domain: frozen, with array shapes in the docstrings."""

import enum
from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Heads(enum.Flag):
    """Which of BGE-M3's three outputs are wanted."""

    DENSE = enum.auto()
    SPARSE = enum.auto()
    COLBERT = enum.auto()


@attrs.frozen(eq=False)
class TokenizedText:
    """One text as the model sees it.

    `ids`: (tokens,) int64, special tokens included, already cut to the model's limit.
    `truncated`: tokens beyond the limit were dropped.
    """

    ids: Ids
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


@attrs.frozen
class Chunk:
    """Texts that share one forward pass.

    `indices`: places of the texts in the request, shortest text first.
    `max_tokens`: length that every row is padded to.
    """

    indices: tuple[int, ...]
    max_tokens: int

    def __len__(self) -> int:
        return len(self.indices)


@attrs.frozen
class ChunkStats:
    """What one forward pass is about to cost.

    `estimated_bytes`: workspace by the cost model, None when nobody estimated it.
    """

    batch: int
    max_tokens: int
    total_tokens: int
    estimated_bytes: int | None = None

    @property
    def padding_ratio(self) -> float:
        """Padded positions over all positions; 0 for equal lengths."""
        positions = self.batch * self.max_tokens
        return 1.0 - self.total_tokens / positions if positions else 0.0


@attrs.frozen(eq=False)
class TokenBatch:
    """Right-padded input of one forward pass.

    `ids`, `mask`: (batch, max_tokens) int64; mask is 1 on real tokens, 0 on padding.
    `lengths`: (batch,) int64, real tokens of each row.
    """

    ids: Ids
    mask: Ids
    lengths: Ids


@attrs.frozen(eq=False)
class SparseVector:
    """Lexical weights of one text.

    `indices`: (n,) int64, ascending unique vocabulary ids.
    `values`: (n,) float32, all > 0.
    """

    indices: Ids
    values: Floats

    def __len__(self) -> int:
        return len(self.indices)

    def as_dict(self) -> dict[int, float]:
        """Vocabulary id → weight."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))


@attrs.frozen(eq=False)
class Embedding:
    """Everything asked for about one text; heads that were not asked for are None.

    `dense`: (dim,) float32, L2 norm 1.
    `colbert`: (tokens - 1, dim) float32, a unit vector per token after ``<s>``, with ``</s>``.
    `token_count`: tokens the model read, special tokens included.
    """

    token_count: int
    truncated: bool = False
    dense: Floats | None = None
    sparse: SparseVector | None = None
    colbert: Floats | None = None


@attrs.frozen(eq=False)
class Projection:
    """A trained linear head: `weight` (out, hidden) float32, `bias` (out,) float32."""

    weight: Floats
    bias: Floats

    def __call__(self, hidden: Floats) -> Floats:
        """(..., hidden) → (..., out)."""
        projected: Floats = hidden @ self.weight.T + self.bias
        return projected


@attrs.frozen(eq=False)
class HeadProjections:
    """The heads that BGE-M3 keeps outside its transformer graph."""

    sparse: Projection | None = None
    colbert: Projection | None = None


class GraphLayout(enum.Enum):
    """How a graph hands over its results; values are for messages and logs."""

    SENTENCE_AND_TOKENS = "sentence_embedding + token_embeddings"
    LAST_HIDDEN_STATE = "last_hidden_state"
    READY_HEADS = "dense_vecs / sparse_weights / colbert_vecs"


class Attention(enum.Enum):
    """How much memory a graph's attention takes."""

    MATERIALISED = "materialised"
    """A score for each pair of tokens: memory grows with the square of the length."""

    BLOCKWISE = "blockwise"
    """Block by block where no text is padded: memory grows with the length."""


@attrs.frozen
class ModelContract:
    """What a loaded graph promises, read from the graph itself.

    `outputs_by_head`: the graph output that each available head is computed from.
    `input_names`: every input the graph asks for.
    `hidden_size`: width of the dense vector.
    `max_tokens`: longest text the position table allows, special tokens included; None if unknown.
    `attention_heads`: heads per layer (sizes the attention workspace); None if unknown.
    `attention`: how that workspace grows.
    """

    layout: GraphLayout
    input_names: tuple[str, ...]
    outputs_by_head: Mapping[Heads, str]
    hidden_size: int
    max_tokens: int | None = None
    precision: str = "fp32"
    attention_heads: int | None = None
    attention: Attention = Attention.MATERIALISED

    @property
    def heads(self) -> Heads:
        """All heads this model can give."""
        available = Heads(0)
        for head in self.outputs_by_head:
            available |= head
        return available

    def outputs_for(self, heads: Heads) -> tuple[str, ...]:
        """Names of the graph outputs that must be computed for `heads`, without repeats."""
        return tuple(dict.fromkeys(self.outputs_by_head[head] for head in heads))


@attrs.frozen
class MemoryLimit:
    """How much memory this process may use, and who says so (``cgroup_v2``, ``host_ram``, …)."""

    limit_bytes: int
    source: str


@attrs.frozen
class ResidentMemory:
    """Physical memory of this process.

    `anonymous_bytes`: what only this process has; the kernel cannot drop it.
    `file_bytes`: mapped files, which the kernel drops and reads again as it likes.
    """

    anonymous_bytes: int
    file_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both: what counts as resident."""
        return self.anonymous_bytes + self.file_bytes


@attrs.frozen(kw_only=True)
class ProbeKey:
    """Everything that changes what a forward pass costs; coefficients of another key are foreign.

    `model_fingerprint`: of the graph file, which holds every operation.
    `engine`: its name and the options that matter to memory.
    """

    server_version: str
    model_id: str
    model_fingerprint: str
    precision: str
    engine: str
    engine_version: str
    intra_threads: int
    max_tokens: int
    cpu_model: str
    architecture: str


@attrs.frozen
class CpuCount:
    """CPUs that this process may keep busy, and who says so (``affinity``, ``cgroup_v2``, …)."""

    count: int
    source: str


@attrs.frozen
class GpuDevice:
    """One accelerator; figures are None where the source cannot tell."""

    index: int
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_pct: int | None = None
    temperature_celsius: int | None = None
