"""What BGE-M3 is published as: repositories at pinned revisions, and their files."""

from collections.abc import Mapping

import attrs

from .files import COLBERT_HEAD, SPARSE_HEAD, TOKENIZER


@attrs.frozen
class Source:
    """Files of one repository at one revision."""

    repository: str
    revision: str
    names: tuple[str, ...]

    @property
    def cache_folder(self) -> str:
        """Name of the repository's folder in a hub cache."""
        return f"models--{self.repository.replace('/', '--')}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@attrs.frozen
class Variant:
    """One published precision of BGE-M3: `graph` is the model file among those of `source`."""

    precision: str
    graph: str
    source: Source


_BAAI = ("BAAI/bge-m3", "5617a9f61b028005a4858fdac845db406aefb181")
_XENOVA = ("Xenova/bge-m3", "4de13258303883538bd53b696b452bf8099f0858")

HEADS = Source(*_BAAI, (SPARSE_HEAD, COLBERT_HEAD))
"""The trained heads, which only BAAI's repository has; they fit every variant."""

VARIANTS: Mapping[str, Variant] = {
    "fp32": Variant(
        "fp32",
        "onnx/model.onnx",
        Source(
            *_BAAI,
            ("onnx/model.onnx", "onnx/model.onnx_data", "onnx/Constant_7_attr__value", TOKENIZER),
        ),
    ),
    "fp16": Variant(
        "fp16", "onnx/model_fp16.onnx", Source(*_XENOVA, ("onnx/model_fp16.onnx", TOKENIZER))
    ),
    "int8": Variant(
        "int8", "onnx/model_int8.onnx", Source(*_XENOVA, ("onnx/model_int8.onnx", TOKENIZER))
    ),
}

PUBLISHED = frozenset(str(source) for source in (HEADS, *(v.source for v in VARIANTS.values())))
"""Every pinned source, as file records name it."""
