"""The table of prepared models in docs/parity.md, on the preview's trained weights.

python -m tests.equivalence.prepared      (part of `make parity`)
"""

from collections.abc import Sequence

import attrs
from bge_m3_server.adapters.models.verification_texts import VERIFICATION_TEXTS
from bge_m3_server.domain import Embedder, Embedding, Heads

from tests.equivalence.compare import Agreement, cosine
from tests.equivalence.parity import write_section
from tests.equivalence.product import load_directory
from tests.equivalence.texts import TEXTS
from tests.support.preview_fixture import preview_cache_dir, preview_files

FORMS = (("openvino", "fp32"), ("cpu", "w8"), ("openvino", "w8"))


def embed(provider: str, model: str, texts: Sequence[str]) -> list[Embedding]:
    """The preview's dense vectors and lexical weights, as the server would pack the texts."""
    loaded = load_directory(
        preview_files().graph_path.parent,
        BGE_M3_CACHE_DIR=str(preview_cache_dir()),
        BGE_M3_DISABLE_AUTO_BUDGET="1",
        BGE_M3_EP=provider,
        BGE_M3_MODEL=model,
    )
    embedder = Embedder(
        loaded.tokenizer, loaded.backends[0], loaded.cost_model, padding=loaded.padding
    )
    return embedder.embed(texts, Heads.DENSE | Heads.SPARSE)


def table() -> str:
    """Markdown: dense cosine to fp32 on ONNX Runtime, on the fixed texts and on those of tests."""
    texts = (*VERIFICATION_TEXTS, *TEXTS)
    reference = embed("cpu", "fp32", texts)
    lines = ["| engine, model | texts | min | mean | p5 |", "|---|---|---|---|---|"]
    for provider, model in FORMS:
        found = embed(provider, model, texts)
        cosines = [
            cosine(ours.dense, theirs.dense) for ours, theirs in zip(found, reference, strict=True)
        ]
        fixed = len(VERIFICATION_TEXTS)
        for name, part in (("fixed", cosines[:fixed]), ("tests'", cosines[fixed:])):
            figures = " | ".join(f"{figure:.5f}" for figure in attrs.astuple(Agreement.of(part)))
            lines.append(f"| {provider}, {model} | {len(part)} {name} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_section("prepared", table())
