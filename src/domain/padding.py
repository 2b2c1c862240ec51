"""Which texts may share a forward pass, where all rows are as long as the longest."""

import math

import attrs
from attrs.validators import ge

_SHORT_TOKENS_PER_THREAD = 32
"""Positions that keep one CPU thread's matrix units busy: a single text of 64 tokens runs within
a sixth of the rate of a full chunk on two threads, so that beyond it any padding is a loss."""


@attrs.frozen(kw_only=True)
class PaddingRule:
    """Texts share a chunk if they are equally long, or short and of nearly the same length.

    `short_tokens`: the longest text that may be padded to, or be padded.
    `stretch`, `slack_tokens`: the longest may have ``stretch × shortest + slack_tokens``.
    """

    short_tokens: float = math.inf
    stretch: float = attrs.field(default=1.25, validator=ge(1.0))
    slack_tokens: int = attrs.field(default=16, validator=ge(0))

    def allows(self, shortest: int, longest: int) -> bool:
        """Whether texts from `shortest` to `longest` tokens may share a chunk."""
        return shortest == longest or (
            longest <= self.short_tokens and longest <= shortest * self.stretch + self.slack_tokens
        )


GPU_PADDING = PaddingRule()
"""Wide processors need many rows: a fifth of padding at most for long texts, and short ones cost
little more than the pass itself."""

ANY_PADDING = PaddingRule(stretch=math.inf)
"""Whatever fits."""


def cpu_padding(threads: int) -> PaddingRule:
    """On CPUs time follows tokens: only short texts are worth padding, and only a little."""
    return PaddingRule(
        short_tokens=_SHORT_TOKENS_PER_THREAD * threads, stretch=1.05, slack_tokens=2
    )
