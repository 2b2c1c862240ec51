"""Wire shapes of the HTTP door, as msgspec reads them and OpenAPI shows them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Texts = Annotated[
    str | list[str],
    Meta(description="One text, or a list of texts. Token ids are refused."),
]


class SparseEmbeddingsRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Texts to embed. Unknown fields are ignored; `null` means absent."""

    input: Texts
    model: Annotated[
        str | None, Meta(description="Any name; the one loaded model answers.", examples=["bge-m3"])
    ] = None


class EmbeddingsRequest(SparseEmbeddingsRequest, kw_only=True, frozen=True):
    """Texts to embed, as OpenAI clients send them."""

    encoding_format: Annotated[
        str | None,
        Meta(
            description="`float` (default) or `base64`: little-endian float32 bytes.",
            examples=["float", "base64"],
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(description="Keep the first so many components, scaled to length 1 again."),
    ] = None
    user: Annotated[Any, Meta(description="Accepted and ignored.")] = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens that the model read, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True):
    """The dense vector of one text: a float list, or base64 when asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(msgspec.Struct, frozen=True):
    """Dense vectors in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: Usage


class SparseValues(msgspec.Struct, frozen=True):
    """Lexical weights: ascending vocabulary ids, and a weight above 0 for each."""

    indices: list[int]
    values: list[float]


class SparseItem(msgspec.Struct, frozen=True):
    """The lexical weights of one text."""

    index: int
    sparse_values: SparseValues


class SparseEmbeddingsResponse(msgspec.Struct, frozen=True):
    """Lexical weights in the order of the texts."""

    data: list[SparseItem]
    model: str
    usage: Usage


class BothItem(msgspec.Struct, frozen=True):
    """Both outputs of one text."""

    index: int
    embedding: list[float] | str
    sparse_values: SparseValues


class BothEmbeddingsResponse(msgspec.Struct, frozen=True):
    """Dense vectors and lexical weights of one forward pass, in the order of the texts."""

    object: Literal["list"]
    model: str
    data: list[BothItem]
    usage: Usage


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: `code` is the HTTP status, or OpenAI's own word where it has one."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorResponse(msgspec.Struct, frozen=True):
    """The one shape of every failure of every route."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The served model; `notice` says so when it is a stand-in for BGE-M3."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bge-m3-server"
    type: str = "bge-m3"
    dimensions: int
    max_tokens: int
    notice: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models; empty while the model loads."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alive, of those configured.

    `suspect` ones take far longer than expected over their work; `replaced` counts those that died
    or hung.
    """

    live: int
    total: int
    busy: int | UnsetType = UNSET
    suspect: int | UnsetType = UNSET
    replaced: int | UnsetType = UNSET


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """Work that waits, the bounds beyond which more is refused, and how fast it is done."""

    waiting_texts: int
    waiting_tokens: int
    limit_tokens: int
    held_bytes: int
    limit_bytes: int
    drain_tokens_per_second: float | None = None


class CacheReport(msgspec.Struct, frozen=True):
    """Texts that were, and were not, in the result cache; and how full it is."""

    hits: int
    misses: int
    held_bytes: int
    limit_bytes: int


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, in brief."""

    id: str
    dimensions: int
    notice: str | UnsetType = UNSET


class TuningReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workspace budget comes from; null is a figure that nobody has measured."""

    a_bytes_per_token: float | None = None
    b_bytes_per_token_sq: float | None = None
    fixed_bytes: int | None = None
    max_workspace_bytes: int | None = None
    probe_status: str | None = None
    memory_source: str | None = None
    available_bytes: int | None = None
    model_rss_bytes_per_worker: int | None = None
    worst_case_peak_bytes: int | None = None
    utilization_pct: float | None = None
    total_workspace_bytes: int | None = None
    coefficients_source: str | None = None
    reason: str | None = None
    longest_text_tokens: int | None = None
    excess_passes: int = 0
    fit_r_squared: float | None = None
    fit_worst_relative_error: float | None = None
    fit_margin: float | None = None


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness; what is not known in a state is left out."""

    status: Literal["loading", "fail", "idle", "warn", "ok"]
    workers: WorkerCounts | UnsetType = UNSET
    queue: QueueReport | UnsetType = UNSET
    cache: CacheReport | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    max_seq_length: int | UnsetType = UNSET
    model: ModelHealth | UnsetType = UNSET
    tuning: TuningReport | UnsetType = UNSET


class ReadyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to send work here, and why not."""

    status: Literal["ready", "not ready"]
    reason: str | UnsetType = UNSET


class DeepHealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a small piece of real work fared just now."""

    status: Literal["loading", "fail", "idle", "ok"]
    elapsed_ms: float | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class LiveReport(msgspec.Struct, frozen=True):
    """The process answers."""

    status: Literal["live"] = "live"
