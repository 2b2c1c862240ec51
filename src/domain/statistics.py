"""Sequence-length statistics of one request, for its log line."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class LengthStats:
    """Tokens per text, special tokens included; `total` counts no padding."""

    minimum: int = 0
    maximum: int = 0
    mean: int = 0
    p95: int = 0
    total: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthStats":
        """All zeros for an empty request; mean and p95 are whole numbers, rounded down."""
        if not lengths:
            return cls()
        ordered = sorted(lengths)
        count, total = len(ordered), sum(ordered)
        return cls(
            minimum=ordered[0],
            maximum=ordered[-1],
            mean=total // count,
            p95=ordered[count * 95 // 100],
            total=total,
        )
