"""Random XLM-RoBERTa checkpoints that are the same on every machine, with or without torch.

Every tensor comes from a bit stream of its own, named by checkpoint and tensor, through integer
arithmetic and one multiplication: no random distribution, whose stream a NumPy release may change.
"""

import zlib
from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

VOCABULARY = 250_002
"""Pieces of the XLM-RoBERTa tokenizer."""

POSITIONS = 8194
"""Rows of the position table: 8192 usable ones from row 2 on."""

LAYER_NORM_EPSILON = 1e-5


@attrs.frozen
class Checkpoint:
    """Shape of one checkpoint; its name also seeds its weights.

    `sparse_bias`: chosen so that a third to a half of all tokens have a weight above zero.
    """

    name: str
    hidden_size: int
    layers: int
    attention_heads: int
    sparse_bias: float

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.hidden_size


TINY = Checkpoint("tiny", hidden_size=64, layers=2, attention_heads=4, sparse_bias=0.06)
SMALL = Checkpoint("small", hidden_size=128, layers=3, attention_heads=4, sparse_bias=-0.02)
WIDE = Checkpoint("wide", hidden_size=1024, layers=2, attention_heads=16, sparse_bias=-0.12)
CHECKPOINTS = (TINY, SMALL, WIDE)


def transformer_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state dict of transformers' `XLMRobertaModel`.

    The spreads give attention that prefers some tokens and residual branches as strong as what
    they are added to, so that the state of ``<s>`` depends on the text.
    """
    hidden, wide = checkpoint.hidden_size, checkpoint.intermediate_size
    weights: dict[str, Tensor] = {}

    def add(name: str, *shape: int, spread: float, centre: float = 0.0) -> None:
        weights[name] = _tensor(f"{checkpoint.name}/{name}", shape, spread, centre)

    def linear(name: str, outputs: int, inputs: int, gain: float) -> None:
        add(f"{name}.weight", outputs, inputs, spread=gain * inputs**-0.5)
        add(f"{name}.bias", outputs, spread=0.1)

    def layer_norm(name: str) -> None:
        add(f"{name}.weight", hidden, spread=0.1, centre=1.0)
        add(f"{name}.bias", hidden, spread=0.1)

    add("embeddings.word_embeddings.weight", VOCABULARY, hidden, spread=1.0)
    add("embeddings.position_embeddings.weight", POSITIONS, hidden, spread=0.5)
    add("embeddings.token_type_embeddings.weight", 1, hidden, spread=0.2)
    layer_norm("embeddings.LayerNorm")
    for index in range(checkpoint.layers):
        layer = f"encoder.layer.{index}"
        linear(f"{layer}.attention.self.query", hidden, hidden, gain=1.6)
        linear(f"{layer}.attention.self.key", hidden, hidden, gain=1.6)
        linear(f"{layer}.attention.self.value", hidden, hidden, gain=1.2)
        linear(f"{layer}.attention.output.dense", hidden, hidden, gain=1.2)
        layer_norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", wide, hidden, gain=1.0)
        linear(f"{layer}.output.dense", hidden, wide, gain=0.7)
        layer_norm(f"{layer}.output.LayerNorm")
    linear("pooler.dense", hidden, hidden, gain=1.0)  # in the file, but read by no head
    return weights


def head_weights(checkpoint: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    """State dicts of ``sparse_linear`` and ``colbert_linear``, values as float16 holds them."""
    hidden = checkpoint.hidden_size

    def tensor(name: str, *shape: int, spread: float, centre: float = 0.0) -> Tensor:
        values = _tensor(f"{checkpoint.name}/{name}", shape, spread, centre)
        return values.astype(np.float16).astype(np.float32)

    return {
        "sparse_linear": {
            "weight": tensor("sparse_linear.weight", 1, hidden, spread=0.2 * hidden**-0.5),
            "bias": tensor("sparse_linear.bias", 1, spread=0.0, centre=checkpoint.sparse_bias),
        },
        "colbert_linear": {
            "weight": tensor("colbert_linear.weight", hidden, hidden, spread=hidden**-0.5),
            "bias": tensor("colbert_linear.bias", hidden, spread=0.1),
        },
    }


def _tensor(name: str, shape: tuple[int, ...], spread: float, centre: float) -> Tensor:
    """Uniform values of standard deviation `spread` around `centre`."""
    count = int(np.prod(shape))
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 4))
    integers = bits.astype("<u8", copy=False).view("<i2")[:count].reshape(shape)
    step = np.float32(spread * 3**0.5 / 2**15)
    values: Tensor = integers.astype(np.float32) * step
    return values + np.float32(centre) if centre else values
