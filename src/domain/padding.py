"""Which texts may share a forward pass, where all rows are as long as the longest."""

import math

import attrs
from attrs.validators import ge

_SHORT_TOKENS_PER_THREAD = 32
"""Positions that keep one CPU thread's matrix units busy: a single text of 64 tokens runs within
a sixth of the rate of a full chunk on two threads, so that beyond it any padding is a loss."""


LONGEST_PADDED_TOKENS = 256
"""Where masks cost memory, no longer text is padded, so that attention takes memory linear in the
length."""


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


def cpu_padding(threads: int, *, are_masks_free: bool = False) -> PaddingRule:
    """On CPUs time follows tokens: only a little padding is worth it.

    Where attention is blockwise only without a mask, texts beyond a length that keeps all
    `threads` busy are not padded at all. Where masks cost nothing (`are_masks_free`), texts that
    are within 3 % may always share a chunk: that saves more than the padding costs.
    """
    if are_masks_free:
        return PaddingRule(stretch=1.03, slack_tokens=2)
    short_tokens = min(_SHORT_TOKENS_PER_THREAD * threads, LONGEST_PADDED_TOKENS)
    return PaddingRule(short_tokens=short_tokens, stretch=1.05, slack_tokens=2)
