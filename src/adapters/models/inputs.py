"""What a graph is fed: each input that an export may ask for, made from a token batch."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...domain.embedder import PAD_ID
from ...domain.types import Ids, TokenBatch

_INPUTS: Mapping[str, Callable[[TokenBatch], Ids]] = {
    "input_ids": lambda batch: batch.ids,
    "attention_mask": lambda batch: batch.mask,
    "token_type_ids": lambda batch: np.zeros_like(batch.ids),
    "position_ids": lambda batch: xlm_r_position_ids(batch.mask),
}


def graph_inputs(names: Sequence[str], batch: TokenBatch) -> dict[str, Ids]:
    """The inputs `names` of a contract, each (batch, seq) int64."""
    return {name: _INPUTS[name](batch) for name in names}


def xlm_r_position_ids(mask: Ids) -> Ids:
    """Positions of (batch, seq) as XLM-RoBERTa counts them: padding 1, real tokens from 2."""
    positions: Ids = np.cumsum(mask, axis=1, dtype=np.int64) * mask + PAD_ID
    return positions
