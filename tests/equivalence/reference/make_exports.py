"""Exports a checkpoint to ONNX in the two published layouts and three precisions.

``<directory>/onnx/model.onnx`` (+ ``model.onnx_data``)
    fp32; outputs ``sentence_embedding``, ``token_embeddings``.
``<directory>/onnx/model_fp16.onnx``, ``model_int8.onnx``
    output ``last_hidden_state``.
``<directory>-last-hidden-state/onnx/model.onnx`` (+ ``model.onnx_data``)
    fp32; output ``last_hidden_state``.

torch traces the narrow checkpoints. The wide one is written node by node, from the same weights:
tracing a gigabyte of weights takes minutes and ten times the memory.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor, nn
from transformers import XLMRobertaModel

from tests.equivalence.checkpoints import WIDE, Checkpoint
from tests.support.xlmr_onnx import write_xlmr

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


def export(checkpoint: Checkpoint, directory: Path) -> None:
    """Export the checkpoint in `directory`; the other fp32 layout goes into a directory beside."""
    beside = directory.with_name(f"{directory.name}-last-hidden-state")
    published, plain = (folder / "onnx" / "model.onnx" for folder in (directory, beside))
    if checkpoint is WIDE:
        write_xlmr(checkpoint, published, "sentence_and_tokens")
        write_xlmr(checkpoint, plain, "last_hidden_state")
    else:
        transformer = XLMRobertaModel.from_pretrained(directory, attn_implementation="eager").eval()
        heads = ("sentence_embedding", "token_embeddings")
        _trace(_SentenceAndTokens(transformer), published, heads)
        _trace(_LastHiddenState(transformer), plain, ("last_hidden_state",))
    for name in ("tokenizer.json", "sparse_linear.pt", "colbert_linear.pt"):
        (beside / name).unlink(missing_ok=True)
        (beside / name).hardlink_to(directory / name)

    half = convert_float_to_float16(onnx.load(plain), keep_io_types=True)
    onnx.save(half, published.with_name("model_fp16.onnx"))
    quantize_dynamic(plain, published.with_name("model_int8.onnx"), weight_type=QuantType.QInt8)


def _trace(module: nn.Module, path: Path, outputs: Sequence[str]) -> None:
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
