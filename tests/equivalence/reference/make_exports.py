"""Exports a checkpoint to ONNX in the two published layouts and three precisions.

``<directory>/onnx/model.onnx`` (+ ``model.onnx_data``)
    fp32; outputs ``sentence_embedding``, ``token_embeddings``.
``<directory>/onnx/model_fp16.onnx``, ``model_int8.onnx``
    output ``last_hidden_state``.
``<directory>-last-hidden-state/onnx/model.onnx`` (+ ``model.onnx_data``)
    fp32; output ``last_hidden_state``.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor, nn
from transformers import XLMRobertaModel

OPSET = 17


class _LastHiddenState(nn.Module):
    """The transformer alone."""

    def __init__(self, transformer: XLMRobertaModel) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return states


class _SentenceAndTokens(_LastHiddenState):
    """The transformer with the dense head on top."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = super().forward(input_ids, attention_mask)
        return nn.functional.normalize(states[:, 0], dim=-1), states


def export(directory: Path) -> None:
    """Export the checkpoint in `directory`; the other fp32 layout goes into a directory beside."""
    transformer = XLMRobertaModel.from_pretrained(directory, attn_implementation="eager").eval()
    published = directory / "onnx"
    _export(
        _SentenceAndTokens(transformer),
        published / "model.onnx",
        ("sentence_embedding", "token_embeddings"),
    )
    beside = directory.with_name(f"{directory.name}-last-hidden-state")
    plain = beside / "onnx" / "model.onnx"
    _export(_LastHiddenState(transformer), plain, ("last_hidden_state",))
    for name in ("tokenizer.json", "sparse_linear.pt", "colbert_linear.pt"):
        (beside / name).unlink(missing_ok=True)
        os.link(directory / name, beside / name)

    half = convert_float_to_float16(onnx.load(plain), keep_io_types=True)
    onnx.save(half, published / "model_fp16.onnx")
    quantize_dynamic(plain, published / "model_int8.onnx", weight_type=QuantType.QInt8)


def _export(module: nn.Module, path: Path, outputs: Sequence[str]) -> None:
    """Trace `module` on a padded batch and write it with its weights in one external file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor([[0, 70, 581, 2], [0, 70, 2, 1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated, and traces asserts
        torch.onnx.export(
            module,
            (ids, (ids != 1).long()),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=list(outputs),
            dynamic_axes={
                name: {0: "batch", 1: "sequence"}
                for name in ("input_ids", "attention_mask", *outputs)
                if name != "sentence_embedding"
            }
            | {"sentence_embedding": {0: "batch"}},
            opset_version=OPSET,
            dynamo=False,
        )
    data = f"{path.name}_data"
    (path.parent / data).unlink(missing_ok=True)  # onnx appends to what is there
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=data)
