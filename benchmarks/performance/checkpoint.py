"""One random checkpoint of BGE-M3's shape, in every format that the contenders read.

One directory, laid out like the published repository, the same weights in all of it:

- ``onnx/model.onnx`` and ``model.onnx_data``: what this server reads;
- ``config.json`` and ``model.safetensors``: transformers, and all that stand on it;
- ``sparse_linear.pt``, ``colbert_linear.pt``: the two further heads;
- ``modules.json``, ``1_Pooling``, ``2_Normalize``: sentence-transformers;
- ``tokenizer.json``, ``sentencepiece.bpe.model``: XLM-RoBERTa's own 250 002 pieces, out of the
  package that the preview model is built from. Any other --vocabulary gets one piece per ``w<n>``.

Memory stays at the size of the largest tensor.

    .venv/bin/python -m benchmarks.performance.checkpoint .cache/bench/checkpoint
"""

import argparse
import base64
import json
import shutil
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
import onnx
from bge_m3_server.adapters.models.preview import build_preview
from sentencepiece import sentencepiece_model_pb2

from benchmarks.synthetic_bge_m3 import BGE_M3, LAYER_NORM_EPSILON, Shape, write_synthetic_bge_m3
from tests.support.tiny_models import write_linear

VOCABULARY = 250_002
MAX_TOKENS = 8192
FULL = attrs.evolve(BGE_M3, vocabulary=VOCABULARY)

MASK = {"content": "<mask>", "lstrip": True, "normalized": False, "rstrip": False}
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def write_checkpoint(directory: Path, shape: Shape, cache_dir: Path) -> Path:
    """Write all formats into `directory`, unless a finished checkpoint of `shape` is there.

    `cache_dir`: where the preview model is built, whose tokenizer is taken. Returns `directory`.
    """
    finished = directory / "shape.json"
    wanted = attrs.asdict(shape)
    if finished.is_file() and json.loads(finished.read_text()) == wanted:
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    graph_path = write_synthetic_bge_m3(directory, shape)
    write_safetensors(graph_path, directory / "model.safetensors")
    _write_heads(directory, shape.hidden)
    _write_json(directory / "config.json", _config(shape))
    _write_sentence_transformers(directory)
    if shape.vocabulary == VOCABULARY:
        source = build_preview(cache_dir).tokenizer_path
        shutil.copyfile(source, directory / "tokenizer.json")
        write_sentencepiece(source, directory / "sentencepiece.bpe.model")
    _write_json(
        directory / "tokenizer_config.json",
        {
            **SPECIAL_TOKENS,
            "mask_token": {"__type": "AddedToken", "single_word": False, **MASK},
            "model_max_length": MAX_TOKENS,
            "tokenizer_class": "XLMRobertaTokenizer",
        },
    )
    _write_json(directory / "special_tokens_map.json", {**SPECIAL_TOKENS, "mask_token": MASK})
    _write_json(finished, wanted)
    return directory


def write_safetensors(graph_path: Path, path: Path) -> None:
    """Copy the weights of a graph, transposing those of linear layers, one after the other.

    ONNX multiplies by (in, out) where torch keeps (out, in). Constants of the graph are left out:
    they lie in the graph itself. The format: the length of a JSON header, the header, the data.
    """
    tensors = {
        tensor.name: tensor
        for tensor in onnx.load(graph_path, load_external_data=False).graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(np.prod(tensor.dims))
        dims = tensor.dims[::-1] if _is_linear(tensor) else tensor.dims
        header[name] = {"dtype": "F32", "shape": list(dims), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            _copy(tensor, graph_path.parent, file)


def _copy(tensor: onnx.TensorProto, directory: Path, file: BinaryIO) -> None:
    place = {entry.key: entry.value for entry in tensor.external_data}
    values = np.fromfile(
        directory / place["location"],
        dtype="<f4",
        count=int(np.prod(tensor.dims)),
        offset=int(place["offset"]),
    ).reshape(tensor.dims)
    np.ascontiguousarray(values.T if _is_linear(tensor) else values).tofile(file)


def _is_linear(tensor: onnx.TensorProto) -> bool:
    return len(tensor.dims) == 2 and not tensor.name.startswith("embeddings.")


def write_sentencepiece(tokenizer_path: Path, path: Path) -> None:
    """Turn a Unigram ``tokenizer.json`` of XLM-RoBERTa into the file that it was made from.

    There ``<unk>``, ``<s>``, ``</s>`` come first, and neither ``<pad>`` nor ``<mask>`` exists.
    """
    content = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    charsmap = content["normalizer"]["normalizers"][0]["precompiled_charsmap"]
    model = sentencepiece_model_pb2.ModelProto()
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    for piece, kind in (("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)):
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for piece, score in vocabulary[4:-1]:
        model.pieces.add(piece=piece, score=score)
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.UNIGRAM
    model.trainer_spec.vocab_size = len(model.pieces)
    model.normalizer_spec.name = "nmt_nfkc"
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
    path.write_bytes(model.SerializeToString())


def _write_heads(directory: Path, hidden: int) -> None:
    generator = np.random.default_rng(0)
    for name, outputs in (("sparse", 1), ("colbert", hidden)):
        weight = generator.normal(0, hidden**-0.5, (outputs, hidden)).astype(np.float32)
        bias = generator.normal(0, 0.1, outputs).astype(np.float32)
        write_linear(directory / f"{name}_linear.pt", weight, bias)


def _config(shape: Shape) -> Mapping[str, object]:
    return {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention_heads,
        "intermediate_size": shape.intermediate,
        "hidden_act": "gelu",
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "type_vocab_size": 1,
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "transformers_version": "4.33.0",  # as published; none at all draws a false warning
    }


def _write_sentence_transformers(directory: Path) -> None:
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _write_json(
        directory / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, (path, kind) in enumerate(modules)
        ],
    )
    for path, _ in modules[1:]:
        (directory / path).mkdir(exist_ok=True)
    _write_json(
        directory / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": BGE_M3.hidden,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    _write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=FULL.layers)
    parser.add_argument("--vocabulary", type=int, default=FULL.vocabulary)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    arguments = parser.parse_args()
    shape = attrs.evolve(FULL, layers=arguments.layers, vocabulary=arguments.vocabulary)
    started = time.perf_counter()
    write_checkpoint(arguments.directory, shape, arguments.cache)
    size_bytes = sum(path.stat().st_size for path in arguments.directory.rglob("*"))
    print(
        f"{arguments.directory}: {size_bytes / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s"
    )


if __name__ == "__main__":
    main()
