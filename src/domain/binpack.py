"""Grouping texts of similar length into forward passes that fit the workspace."""

from collections.abc import Sequence

from .cost_model import CostModel
from .padding import ANY_PADDING, PaddingRule
from .types import Chunk


def bin_pack(
    lengths: Sequence[int], cost_model: CostModel, padding: PaddingRule = ANY_PADDING
) -> list[Chunk]:
    """Pack texts into chunks, shortest first.

    Lengths are walked in ascending order and a chunk is closed when the next text would not fit,
    so each chunk holds neighbours in length and little padding. A text that fits nowhere gets a
    chunk of its own: nothing is dropped.

    Args:
        lengths: tokens of each text, special tokens included.
        cost_model: decides what fits.
        padding: decides what may share a chunk.
    """
    chunks: list[Chunk] = []
    open_indices: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if open_indices and not (
            padding.allows(lengths[open_indices[0]], lengths[index])
            and cost_model.fits(len(open_indices) + 1, lengths[index])
        ):
            chunks.append(_close(open_indices, lengths))
            open_indices = []
        open_indices.append(index)
    if open_indices:
        chunks.append(_close(open_indices, lengths))
    return chunks


def _close(indices: list[int], lengths: Sequence[int]) -> Chunk:
    return Chunk(indices=tuple(indices), max_tokens=lengths[indices[-1]])
