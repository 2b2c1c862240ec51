"""Each engine as its own documentation would have it used: texts in, dense vectors out.

An engine takes the directory of the checkpoint and the number of threads, and returns the function
that embeds. Imports are inside, because each runs where the others are not installed.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

Embed = Callable[[Sequence[str]], np.ndarray]
BATCH_SIZE = 32
MAX_TOKENS = 8192


def reference(directory: Path, threads: int) -> Embed:
    """The fp32 graph in ONNX Runtime, each text alone: nothing is padded, fused or rounded."""
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = False
    session = onnxruntime.InferenceSession(directory / "onnx" / "model.onnx", options)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def vector(text: str) -> np.ndarray:
        ids = np.array([tokenizer.encode(text).ids])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        return session.run(["sentence_embedding"], inputs)[0][0]

    return lambda texts: np.array([vector(text) for text in texts])


def bge_m3_server(_directory: Path, _threads: int) -> Embed:
    """This product's engine without queue and HTTP, on the chunks that its server makes."""
    from bge_m3_server.app.config import load_config
    from bge_m3_server.app.container import build_container
    from bge_m3_server.domain import Heads, NoTelemetry, embed_chunk
    from bge_m3_server.domain.scheduling import EFFICIENT_POSITIONS, Scheduler

    model = build_container(load_config(os.environ, sys.platform)).load_model()

    def embed(texts: Sequence[str]) -> np.ndarray:
        tokenized = model.tokenizer.encode(texts)
        scheduler = Scheduler(time.monotonic)
        scheduler.submit([len(text) for text in tokenized])
        vectors: dict[int, np.ndarray] = {}
        while chunk := scheduler.take(model.cost_model, EFFICIENT_POSITIONS, padding=model.padding):
            rows = [tokenized[text.index] for text in chunk.texts]
            results = embed_chunk(rows, Heads.DENSE, model.backends[0], NoTelemetry())
            for text, result in zip(chunk.texts, results, strict=True):
                vectors[text.index] = result.dense
        return np.array([vectors[index] for index in range(len(texts))])

    return embed


def write_published(precision: str, directory: Path) -> None:
    """The graph in another published precision, as the tools of ONNX Runtime make it."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    source = directory / "onnx" / "model.onnx"
    target = source.with_name(f"model_{precision}.onnx")
    if precision == "int8":
        quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    else:
        # Inferring shapes needs the whole in one message, and the format ends at 2 GB.
        model = convert_float_to_float16(
            onnx.load(source), keep_io_types=True, disable_shape_infer=True
        )
        onnx.save(model, target)


def flag_embedding(directory: Path, threads: int) -> Embed:
    """`BGEM3FlagModel` in fp32."""
    import torch
    from FlagEmbedding import BGEM3FlagModel

    torch.set_num_threads(threads)
    model = BGEM3FlagModel(str(directory), use_fp16=False, devices="cpu")
    return lambda texts: model.encode(
        list(texts), batch_size=BATCH_SIZE, max_length=MAX_TOKENS, return_dense=True
    )["dense_vecs"]


def sentence_transformers(backend: str, directory: Path, threads: int) -> Embed:
    """`SentenceTransformer` on one of its backends; threads of OpenVINO are the process's CPUs."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    settings: dict[str, object] = {}
    if backend != "torch":
        directory = _export(directory, f"sentence_transformers_{backend}")
        settings["model_kwargs"] = {"file_name": f"{backend}/{_EXPORTED[backend]}"}
    if backend == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        settings["model_kwargs"] |= {"session_options": options, "provider": "CPUExecutionProvider"}
    model = SentenceTransformer(str(directory), device="cpu", backend=backend, **settings)
    return lambda texts: model.encode(
        list(texts), batch_size=BATCH_SIZE, show_progress_bar=False, normalize_embeddings=True
    )


_EXPORTED = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}


def export_sentence_transformers(backend: str, directory: Path) -> None:
    """The library's own export of its torch model."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(directory), device="cpu", backend=backend, model_kwargs={"export": True}
    )
    model.save_pretrained(str(_export(directory, f"sentence_transformers_{backend}")))


def bge_m3_lite(precision: str, directory: Path, threads: int) -> Embed:
    """`BGEM3Embedder` on its fused fp32 graph or on its int8 graph."""
    from bge_m3_lite import BGEM3Embedder

    files = _as_lite_finds_files(directory)
    graph = files / _LITE_GRAPHS[precision]
    model = BGEM3Embedder(num_threads=threads, model_path=graph, quiet=True)
    return lambda texts: model.encode(list(texts))["dense_vecs"]


_LITE_GRAPHS = {"fp32": "model_fused.onnx", "int8": "model_int8.onnx"}


def fuse_bge_m3_lite(directory: Path) -> None:
    """What its ``fuse`` command does; the fusion is made for 24 layers only."""
    from bge_m3_lite.fuse import fuse

    files = _as_lite_finds_files(directory)
    if not (files / _LITE_GRAPHS["fp32"]).is_file():
        fuse(files / "model.onnx")


def quantize_bge_m3_lite(directory: Path) -> None:
    """What its ``quantize`` command does, with its own calibration texts."""
    from bge_m3_lite.quantize import QuantConfig, quantize

    fuse_bge_m3_lite(directory)
    files = _as_lite_finds_files(directory)
    quantize(
        files / _LITE_GRAPHS["fp32"],
        files / _LITE_GRAPHS["int8"],
        QuantConfig(),
        tokenizer_path=files / "sentencepiece.bpe.model",
    )


def _as_lite_finds_files(directory: Path) -> Path:
    """Its flat folder, of copies: onnx follows no links to weights.

    It accepts the published files only, by their digests; a random checkpoint has others.
    """
    from bge_m3_lite import hub

    files = _export(directory, "bge_m3_lite")
    files.mkdir(parents=True, exist_ok=True)
    names = ("sentencepiece.bpe.model", "sparse_linear.pt", "colbert_linear.pt")
    for source in (*names, "onnx/model.onnx", "onnx/model.onnx_data"):
        copy = files / Path(source).name
        if not copy.exists():
            shutil.copyfile(directory / source, copy)
    hub.ensure_files = lambda wanted, *_, **__: {file.name: files / file.name for file in wanted}
    return files


def _export(directory: Path, name: str) -> Path:
    return directory / "exports" / name


ENGINES: Mapping[str, Callable[[Path, int], Embed]] = {
    "reference": reference,
    "bge_m3_server": bge_m3_server,
    "published_fp16": bge_m3_server,
    "published_int8": bge_m3_server,
    "flag_embedding": flag_embedding,
    "sentence_transformers_torch": partial(sentence_transformers, "torch"),
    "sentence_transformers_onnx": partial(sentence_transformers, "onnx"),
    "sentence_transformers_openvino": partial(sentence_transformers, "openvino"),
    "bge_m3_lite_fp32": partial(bge_m3_lite, "fp32"),
    "bge_m3_lite_int8": partial(bge_m3_lite, "int8"),
}
PREPARATIONS: Mapping[str, Callable[[Path], None]] = {
    "published_fp16": partial(write_published, "fp16"),
    "published_int8": partial(write_published, "int8"),
    "sentence_transformers_onnx": partial(export_sentence_transformers, "onnx"),
    "sentence_transformers_openvino": partial(export_sentence_transformers, "openvino"),
    "bge_m3_lite_fp32": fuse_bge_m3_lite,
    "bge_m3_lite_int8": quantize_bge_m3_lite,
}
"""What must be made once per checkpoint."""
