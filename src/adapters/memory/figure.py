"""Whole numbers as kernels write them."""

_MOST_DIGITS = 20
"""Of a number of 64 bits."""


def parse_figure(text: str) -> int | None:
    """The one number that `text` consists of, blanks aside; None for anything else."""
    figure = text.strip()
    is_figure = figure.isascii() and figure.isdecimal() and len(figure) <= _MOST_DIGITS
    return int(figure) if is_figure else None
