"""The benchmark model of BGE-M3's shape, in small."""

import numpy as np
import pytest
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.embedder import NoTelemetry, embed_chunk
from bge_m3_server.domain.types import GraphLayout, HeadProjections, Heads

from benchmarks.synthetic_bge_m3 import BGE_M3, Shape, write_synthetic_bge_m3

SMALL = Shape(
    layers=2, hidden=64, attention_heads=4, intermediate=256, positions=130, vocabulary=32
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic")
    write_synthetic_bge_m3(path, SMALL)
    return path


def test_the_defaults_are_bge_m3():
    """Everything that memory and time depend on has the published size."""
    assert Shape(24, 1024, 16, 4096, 8194, 2048) == BGE_M3


def test_the_same_bytes_every_time(directory, tmp_path):
    """Two runs give the same files."""
    write_synthetic_bge_m3(tmp_path, SMALL)
    for name in ("onnx/model.onnx", "onnx/model.onnx_data", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


def test_the_server_can_serve_it(directory):
    """Layout, external weights, tokenizer and limits are what the server expects."""
    files = local_model(directory)
    backend = load_backend(
        files.graph_path, HeadProjections(), SessionSettings(1, directory), cpu_providers(None)
    )
    tokenizer = load_tokenizer(files.tokenizer_path, 128)
    texts = tokenizer.encode(["w1 w2 w3", "w1 w2", "nothing known"])
    alone = embed_chunk(texts[:1], Heads.DENSE, backend, NoTelemetry())
    together = embed_chunk(texts, Heads.DENSE, backend, NoTelemetry())

    assert backend.contract.layout is GraphLayout.SENTENCE_AND_TOKENS
    assert backend.contract.max_tokens == 128
    assert [len(text) for text in texts] == [5, 4, 4]
    np.testing.assert_allclose(alone[0].dense, together[0].dense, atol=1e-5)
    assert float(together[0].dense @ together[1].dense) < 0.99999
