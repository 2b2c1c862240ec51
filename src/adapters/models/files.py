from pathlib import Path
import attrs
@attrs.frozen
class ModelFiles:
    model_id: str
    graph_path: Path
    tokenizer_path: Path
    sparse_path: Path | None = None
    colbert_path: Path | None = None
    precision: str = "fp32"
