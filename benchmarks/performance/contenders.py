"""Who is measured, and how each is started: a new contender is a line of a table."""

import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

PEERS = Path(__file__).parent / "peers"
PRODUCT = "bge-m3-server"

PRODUCT_SETTINGS = (("cpu", "fp32"), ("cpu", "w8"), ("openvino", "w8"), ("openvino", "fp32"))
"""``BGE_M3_EP`` and ``BGE_M3_MODEL``, each measured over HTTP and as the bare engine."""

PUBLISHED_PRECISIONS = (
    *(("cpu", "int8"), ("openvino", "int8")),
    *(("cpu", "fp16"), ("openvino", "fp16")),
)
"""Likewise, over HTTP only: the other files that are published."""


@attrs.frozen(eq=False)
class Contender:
    """A program to start.

    `environment`: whose virtual environment: a requirements file in `peers`, or the product.
    `command`: arguments after the interpreter; ``{directory}``, ``{threads}``, ``{port}`` and
    ``{bin}`` are filled in.
    `ready_path`: of an HTTP server, 200 once it serves; None for a worker that reads lines.
    `engine`: of a worker, or whose preparation an HTTP server needs.
    """

    name: str
    environment: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = attrs.field(factory=dict)
    ready_path: str | None = None
    engine: str = ""

    @property
    def is_http(self) -> bool:
        """Asked over a socket."""
        return self.ready_path is not None


def worker(
    name: str, environment: str, engine: str, variables: Mapping[str, str] | None = None
) -> Contender:
    """A contender that `peers/worker.py` loads."""
    command = (str(PEERS / "worker.py"), engine, "{directory}", "--threads", "{threads}")
    return Contender(name, environment, command, variables or {}, engine=engine)


def _infinity(dtype: str) -> Contender:
    return Contender(
        name=f"infinity-emb, torch {dtype}, HTTP",
        environment="infinity",
        command=(
            *("{bin}/infinity_emb", "v2", "--model-id", "{directory}", "--engine", "torch"),
            *("--device", "cpu", "--dtype", dtype, "--served-model-name", "bge-m3"),
            *("--host", "127.0.0.1", "--port", "{port}", "--url-prefix", "/v1"),
        ),
        variables={"INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"},
        ready_path="/health",
    )


def _product(engine: str, model: str, files: str = "") -> Contender:
    """Over HTTP; `files`: the worker's engine whose preparation makes what is served."""
    return Contender(
        name=f"{PRODUCT} {engine} {model}, HTTP",
        environment=PRODUCT,
        command=("-m", "bge_m3_server.app.cli", "serve"),
        variables=_variables(engine, model),
        ready_path="/ready",
        engine=files,
    )


def _bare(engine: str, model: str) -> Contender:
    """All threads work on one pass: nothing runs beside it."""
    variables = {**_variables(engine, model), "BGE_M3_WORKERS": "1"}
    return worker(f"{PRODUCT} {engine} {model}, bare engine", PRODUCT, "bge_m3_server", variables)


def _variables(engine: str, model: str) -> Mapping[str, str]:
    return {
        "BGE_M3_EP": engine,
        "BGE_M3_MODEL": model,
        "BGE_M3_MODEL_DIR": "{directory}",
        "BGE_M3_CACHE_DIR": "{cache}/product",
        "BGE_M3_BIND": "127.0.0.1:{port}",
    }


BASELINE = "FlagEmbedding fp32, FastAPI, HTTP"
"""What the ratios of the tables are against."""

CONTENDERS: tuple[Contender, ...] = (
    *(side(*settings) for settings in PRODUCT_SETTINGS for side in (_product, _bare)),
    *(_product(engine, model, f"published_{model}") for engine, model in PUBLISHED_PRECISIONS),
    Contender(
        BASELINE,
        "torch",
        (
            *("-m", "uvicorn", "--app-dir", str(PEERS), "flag_embedding_service:app"),
            *("--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"),
        ),
        {"MODEL_DIRECTORY": "{directory}"},
        ready_path="/health",
    ),
    worker("FlagEmbedding fp32", "torch", "flag_embedding"),
    worker("sentence-transformers torch fp32", "torch", "sentence_transformers_torch"),
    worker("sentence-transformers ONNX fp32", "torch", "sentence_transformers_onnx"),
    worker("sentence-transformers OpenVINO", "torch", "sentence_transformers_openvino"),
    _infinity("float32"),
    _infinity("bfloat16"),
    worker("bge-m3-lite fp32", "bge_m3_lite", "bge_m3_lite_fp32"),
    worker("bge-m3-lite int8", "bge_m3_lite", "bge_m3_lite_int8"),
)

REFERENCE = worker("ONNX Runtime fp32, text by text", PRODUCT, "reference")
"""Whose vectors the others' are compared with."""


def product_python() -> Path:
    """The interpreter that runs this: the product is installed beside it."""
    return Path(sys.executable)
