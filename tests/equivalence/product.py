"""The server's own path over a model directory, without HTTP."""

from pathlib import Path

from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.app.engine import LoadedModel
from bge_m3_server.domain import Embedder, Embedding, Heads

ALL_HEADS = Heads.DENSE | Heads.SPARSE | Heads.COLBERT


def load_directory(directory: Path, **variables: str) -> LoadedModel:
    """What `bge-m3-server serve` would load from `directory`: as it is, on ONNX Runtime's CPU."""
    environment = {
        "BGE_M3_MODEL_DIR": str(directory),
        "BGE_M3_MODEL": "fp32",
        "BGE_M3_EP": "cpu",
        "BGE_M3_INTRA_THREADS": "2",
        **variables,
    }
    config = load_config(environment, "linux")
    container = build_container(config)
    return container.load_model()


def embedder_of(model: LoadedModel) -> Embedder:
    """An `Embedder` over a loaded model, with the server's own budget."""
    return Embedder(model.tokenizer, model.backends[0], model.cost_model)


def embed_all(embedder: Embedder, texts, heads: Heads = ALL_HEADS) -> list[Embedding]:
    """Embed all texts in one call."""
    return embedder.embed(list(texts), heads)
