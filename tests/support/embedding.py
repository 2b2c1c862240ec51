"""Texts through the embedder, with a fake tokenizer and, unless given, a fake model."""

from bge_m3_server.domain import CostModel, Embedder, Heads
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer

EVERY_HEAD = Heads.DENSE | Heads.SPARSE | Heads.COLBERT
ROOMY = CostModel(1.0, 0.0, 10**9)


def embed(texts, heads=EVERY_HEAD, *, backend=None, cost_model=ROOMY, max_tokens=8192):
    return Embedder(FakeTokenizer(max_tokens), backend or FakeBackend(), cost_model).embed(
        texts, heads
    )


def tokenized(*texts):
    return FakeTokenizer().encode(texts)
