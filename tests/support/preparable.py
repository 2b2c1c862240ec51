"""A small model of BGE-M3's structure with all three heads, and the means to prepare it."""

import threading
from pathlib import Path

import attrs
import numpy as np
import onnx
from bge_m3_server.adapters.models.contract import ATTENTION_HEADS_KEY
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.models.prepare import Engine, Source
from bge_m3_server.adapters.models.torch_weights import read_heads
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.types import HeadProjections

from benchmarks.synthetic_bge_m3 import Shape, write_synthetic_bge_m3
from tests.support.tiny_models import tiny_tokenizer, write_linear

SMALL = Shape(layers=2, hidden=64, attention_heads=4, intermediate=256, positions=66, vocabulary=64)


EXACT_ENOUGH, TOO_COARSE = 3, 32
"""Gains with which 8 bits suffice, and with which they do not."""


def write_preparable(directory: Path, shape: Shape = SMALL, gain: float = EXACT_ENOUGH) -> Path:
    """Write graph, tokenizer and heads; the graph tells the number of its attention heads.

    The tokenizer knows letters and a few words, so that sentences are more than ``<unk>``.
    `gain`: by what the matrices are multiplied, which makes their rounding weigh more.
    """
    graph_path = write_synthetic_bge_m3(directory, shape)
    model = onnx.load(graph_path)
    for tensor in model.graph.initializer:
        if tensor.name.startswith("encoder") and len(tensor.dims) == 2:
            values = onnx.numpy_helper.to_array(tensor) * np.float32(gain)
            tensor.raw_data = values.tobytes()
    data = f"{graph_path.name}_data"
    (graph_path.parent / data).unlink()  # onnx appends to what is there
    model.metadata_props.add(key=ATTENTION_HEADS_KEY, value=str(shape.attention_heads))
    onnx.save_model(
        model, graph_path, save_as_external_data=True, location=data, size_threshold=1024
    )
    tokenizer = tiny_tokenizer(min(shape.vocabulary, 64))
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    rng = np.random.default_rng(0)
    for name, rows in (("sparse_linear.pt", 1), ("colbert_linear.pt", shape.hidden)):
        weight = rng.normal(0, shape.hidden**-0.5, (rows, shape.hidden))
        write_linear(directory / name, weight, rng.normal(0, 0.1, rows))
    return graph_path


def load_on_cpu(graph_path, projections=None):
    """One thread of ONNX Runtime."""
    settings = SessionSettings(intra_threads=1, cache_dir=graph_path.parent)
    return load_backend(
        graph_path, projections or HeadProjections(), settings, cpu_providers(settings)
    )


@attrs.define
class Loads:
    """How often the source was loaded, by all threads."""

    count: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def of(self, directory: Path) -> Source:
        """The model of `directory` as a source that counts here."""
        return self.of_files(local_model(directory))

    def of_files(self, files) -> Source:
        """A model wherever its files lie."""

        def load():
            with self.lock:
                self.count += 1
            return load_on_cpu(files.graph_path, read_heads(files))

        return Source(
            files,
            lambda max_tokens: load_tokenizer(files.tokenizer_path, max_tokens),
            load,
        )


ORT = Engine(
    name="cpu",
    environment="version 1",
    is_fused=True,
    convert=lambda path: path,
    load=load_on_cpu,
)
