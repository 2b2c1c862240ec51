"""Writes a checkpoint as the directory that `BGEM3FlagModel` loads."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.numpy import save_file

from tests.equivalence.checkpoints import (
    LAYER_NORM_EPSILON,
    POSITIONS,
    VOCABULARY,
    Checkpoint,
    head_weights,
    transformer_weights,
)


def write_checkpoint(checkpoint: Checkpoint, directory: Path, tokenizer: Path) -> None:
    """Write configuration, weights, heads and the tokenizer file `tokenizer` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "hidden_size": checkpoint.hidden_size,
        "num_hidden_layers": checkpoint.layers,
        "num_attention_heads": checkpoint.attention_heads,
        "intermediate_size": checkpoint.intermediate_size,
        "hidden_act": "gelu",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 1,
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "transformers_version": "4.33.0",  # as published; none at all draws a false warning
    }
    _write_json(directory / "config.json", config)
    save_file(
        transformer_weights(checkpoint), directory / "model.safetensors", metadata={"format": "pt"}
    )
    write_heads(checkpoint, directory)
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    special_tokens = {
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    mask = {"content": "<mask>", "lstrip": True, "normalized": False, "rstrip": False}
    _write_json(
        directory / "tokenizer_config.json",
        {
            **special_tokens,
            "mask_token": {"__type": "AddedToken", "single_word": False, **mask},
            "model_max_length": POSITIONS - 2,
            "tokenizer_class": "XLMRobertaTokenizer",
        },
    )


def write_heads(checkpoint: Checkpoint, directory: Path) -> None:
    """Write ``sparse_linear.pt`` and ``colbert_linear.pt`` in float16, as they are published."""
    for name, head in head_weights(checkpoint).items():
        state = {key: torch.from_numpy(value).half() for key, value in head.items()}
        torch.save(state, directory / f"{name}.pt")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
