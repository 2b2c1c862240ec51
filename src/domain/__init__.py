"""Texts into dense, sparse and multi-vector embeddings within a memory budget.

Usable without the server: see docs/embedding-the-domain.md. Fakes are in `.testing`.
"""

from .binpack import bin_pack
from .cost_model import CostModel
from .embedder import Embedder, NoTelemetry, embed_chunk, require_heads
from .errors import (
    BgeM3Error,
    CacheDirectoryError,
    ConfigError,
    ContractError,
    CorruptFileError,
    DownloadError,
    HeadUnavailableError,
    InferenceError,
    InvalidInputError,
    ModelError,
    NonFiniteOutputError,
    NotReadyError,
    NoWorkersError,
    ProviderError,
    SelfTestError,
    UnavailableError,
    UnsafeWeightsError,
)
from .pooling import l2_normalise, pool_colbert, pool_sparse, slice_dense, sparse_token_weights
from .ports import Clock, GpuInfo, InferenceBackend, MemoryProbe, Telemetry, Tokenizer
from .statistics import LengthStats
from .types import (
    Chunk,
    ChunkStats,
    Embedding,
    GpuDevice,
    GraphLayout,
    HeadProjections,
    Heads,
    MemoryLimit,
    ModelContract,
    Projection,
    SparseVector,
    TokenBatch,
    TokenizedText,
)
from .validation import replace_lone_surrogates, validate_texts

__all__ = [
    "BgeM3Error",
    "CacheDirectoryError",
    "Chunk",
    "ChunkStats",
    "Clock",
    "ConfigError",
    "ContractError",
    "CorruptFileError",
    "CostModel",
    "DownloadError",
    "Embedder",
    "Embedding",
    "GpuDevice",
    "GpuInfo",
    "GraphLayout",
    "HeadProjections",
    "HeadUnavailableError",
    "Heads",
    "InferenceBackend",
    "InferenceError",
    "InvalidInputError",
    "LengthStats",
    "MemoryLimit",
    "MemoryProbe",
    "ModelContract",
    "ModelError",
    "NoTelemetry",
    "NoWorkersError",
    "NonFiniteOutputError",
    "NotReadyError",
    "Projection",
    "ProviderError",
    "SelfTestError",
    "SparseVector",
    "Telemetry",
    "TokenBatch",
    "TokenizedText",
    "Tokenizer",
    "UnavailableError",
    "UnsafeWeightsError",
    "bin_pack",
    "embed_chunk",
    "l2_normalise",
    "pool_colbert",
    "pool_sparse",
    "replace_lone_surrogates",
    "require_heads",
    "slice_dense",
    "sparse_token_weights",
    "validate_texts",
]
