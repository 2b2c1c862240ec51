"""What everyone is asked to embed: texts of exactly so many tokens, made from a seed."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
from tokenizers import Tokenizer

SPECIAL_TOKENS = 2
"""``<s>`` and ``</s>``, which every text is counted with."""

MAX_WORD_LETTERS = 6
"""Without longer ones a text of 8192 tokens has about 30 700 characters: all servers take it."""

QUICK_TEXTS, QUICK_TOKENS = 4, 128


@attrs.frozen
class Workload:
    """One row of the result.

    `lengths`: tokens of each text, special ones included.
    `concurrency`: 0: all texts in one call, again and again; otherwise `lengths` are those of one
    request, and so many clients ask at once, each again as soon as it is answered.
    """

    name: str
    lengths: tuple[int, ...]
    concurrency: int = 0

    @property
    def tokens(self) -> int:
        """Of one call."""
        return sum(self.lengths)


@attrs.frozen
class Spread:
    """A log-normal distribution between two lengths; `sigma` is that of the logarithm."""

    low: int
    high: int
    sigma: float
    seed: int


def log_normal_lengths(count: int, median: float, spread: Spread) -> tuple[int, ...]:
    """Lengths as those of real corpora spread; what lies beyond the ends is cut to them."""
    drawn = np.random.default_rng(spread.seed).lognormal(np.log(median), spread.sigma, count)
    return tuple(np.clip(drawn.round(), spread.low, spread.high).astype(int).tolist())


def lengths_of_sum(count: int, total: int, spread: Spread) -> tuple[int, ...]:
    """Log-normal lengths, both ends of `spread` among them, of exactly `total` tokens.

    Raises:
        ValueError: so many texts between these limits cannot have that sum.
    """
    low, high = spread.low, spread.high
    if not count * low <= total <= count * high or (count > 1 and total < high + (count - 1) * low):
        raise ValueError(f"{count} texts of {low} to {high} tokens cannot have {total} in all")
    drawn = np.sort(np.random.default_rng(spread.seed).lognormal(0, spread.sigma, count))
    scaled = (low + (drawn - drawn[0]) / (drawn[-1] - drawn[0]) * (high - low)).round().astype(int)
    inner = scaled[1:-1]
    while (missing := total - int(scaled.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable = np.flatnonzero((inner + step >= low) & (inner + step <= high))
        inner[movable[-abs(missing) :]] += step
    order = np.random.default_rng(spread.seed + 1).permutation(count)
    return tuple(scaled[order].tolist())


def workloads(*, quick: bool = False) -> list[Workload]:
    """All rows; `quick` ones have few and short texts, to try the programs and not the speed."""
    rows = [
        Workload("1×16", (16,)),
        Workload("8×128", (128,) * 8),
        Workload("32×64", (64,) * 32),
        Workload("4×512", (512,) * 4),
        Workload("1×2048", (2048,)),
        Workload("1×8192", (8192,)),
        Workload("mixed corpus", log_normal_lengths(48, 128, Spread(8, 2048, 1.1, seed=1))),
        Workload("32×~160", lengths_of_sum(32, 5120, Spread(120, 200, 0.1, seed=2))),
        Workload("64 mixed", lengths_of_sum(64, 5832, Spread(3, 528, 1.0, seed=3))),
        *(Workload(f"queries at {clients}", (12,), clients) for clients in (1, 8, 32)),
    ]
    if not quick:
        return rows
    return [
        attrs.evolve(
            row,
            lengths=tuple(min(length, QUICK_TOKENS) for length in row.lengths[:QUICK_TEXTS]),
            concurrency=min(row.concurrency, QUICK_TEXTS) if row.concurrency else 0,
        )
        for row in rows
    ]


@attrs.frozen
class TextMaker:
    """Texts of a wanted number of tokens.

    `words`: each is one token; frequent ones first, as vocabularies are ordered.
    """

    tokenizer: Tokenizer
    words: Sequence[str]

    def texts(self, name: str, variant: int, lengths: Sequence[int]) -> list[str]:
        """Texts of this `name` and `variant` alone, so that no cache can answer for a model.

        Words are drawn by Zipf's law, the one of rank r with a probability of about 1/r: as in
        natural text, a few rows of the embedding table are read often and most of them never.

        Raises:
            ValueError: a text has not the tokens that were asked for.
        """
        generator = np.random.default_rng([zlib.crc32(name.encode()), variant])
        texts = [
            " ".join(
                self.words[int(rank) - 1] for rank in len(self.words) ** generator.random(size)
            )
            for size in (length - SPECIAL_TOKENS for length in lengths)
        ]
        found = [len(encoding.ids) for encoding in self.tokenizer.encode_batch(texts)]
        if found != list(lengths):
            raise ValueError(f"texts of {lengths} tokens were wanted and {found} came out")
        return texts


def text_maker(tokenizer_path: Path) -> TextMaker:
    """All whole and short words of the tokenizer's own vocabulary."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [piece.removeprefix("▁") for piece, _ in pieces if not piece.startswith("<")]
    marked = any(piece.startswith("▁") for piece, _ in pieces)
    if marked:
        words = [piece[1:] for piece, _ in pieces if piece.startswith("▁") and piece[1:].isalpha()]
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(words)]
    whole = [
        word
        for word, count in zip(words, counts, strict=True)
        if count == 1 + SPECIAL_TOKENS and len(word) <= MAX_WORD_LETTERS
    ]
    return TextMaker(tokenizer, whole)
