"""How much memory the server may use, and what it can do with it."""

import math
from collections.abc import Iterable, Sequence

import attrs

from .cost_model import BGE_M3_ATTENTION_HEADS, BGE_M3_HIDDEN_SIZE, FLOAT32_BYTES, CostModel
from .errors import ConfigError, RequestTooLargeError
from .padding import LONGEST_PADDED_TOKENS
from .ports import MemoryProbe
from .probe_fit import Coefficients
from .types import Attention, MemoryLimit, ModelContract

OS_HEADROOM_BYTES = 256 * 1024**2
"""Left to the kernel, request bodies and answers."""

LEAST_USEFUL_TOKENS = 512
"""A server that cannot embed one text of this length is refused at start."""

OVERRIDE_SOURCE = "override"
"""Who says how much memory there is where a setting does."""

RESIDENT_SCATTER_BYTES = 16 * 1024**2
"""By so much the same model's resident memory differs from one start to the next."""

SHORT_TEXT_TOKENS = 16
"""A server for nothing but shorter texts is no way out."""

SMALL_MODEL_FACTOR = 7.0
"""How many times its conservative activations a model narrower than BGE-M3 may hold.

glibc keeps freed blocks of up to 32 MiB in its heap, where the holes between them are of no use to
larger ones: a model of width 384 was seen to hold 6.5 times as much for one text of 512 tokens.
Larger blocks, such as the scores of long texts, go back at once.
"""

HIGH_UTILIZATION_PCT = 90.0


def tightest_limit(probes: Iterable[MemoryProbe]) -> MemoryLimit | None:
    """The smallest answer of all probes: a group's limit may exceed what the host can give."""
    limits = [limit for probe in probes if (limit := probe.limit()) is not None]
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def conservative_coefficients(
    contract: ModelContract, bytes_per_value: int = FLOAT32_BYTES
) -> Coefficients:
    """`CostModel.conservative`, from the model's own shape, and more for a small one."""
    model = CostModel.conservative(
        attention_heads=contract.attention_heads or BGE_M3_ATTENTION_HEADS,
        hidden_size=contract.hidden_size,
        bytes_per_value=bytes_per_value,
    )
    coefficients = Coefficients(model.a_bytes_per_token, model.b_bytes_per_token_sq)
    if contract.attention is Attention.BLOCKWISE:
        masked_bytes = LONGEST_PADDED_TOKENS * coefficients.b_bytes_per_token_sq
        coefficients = Coefficients(coefficients.a_bytes_per_token + masked_bytes, 0.0)
    if contract.hidden_size >= BGE_M3_HIDDEN_SIZE:
        return coefficients
    a_bytes_per_token = SMALL_MODEL_FACTOR * coefficients.a_bytes_per_token
    return attrs.evolve(coefficients, a_bytes_per_token=a_bytes_per_token)


@attrs.frozen(kw_only=True)
class Budget:
    """The shares of the memory that this process may use.

    `available_bytes`: all of it. `model_bytes`: resident once the model is loaded, the interpreter
    and every session included. `workers`: forward passes that run at the same time.
    """

    available_bytes: int
    model_bytes: int
    workers: int
    safety_factor: float

    @property
    def free_bytes(self) -> int:
        """What the model and the headroom leave."""
        return max(0, self.available_bytes - self.model_bytes - OS_HEADROOM_BYTES)

    @property
    def workspace_bytes(self) -> int:
        """For all forward passes that run at the same time."""
        return math.floor(self.free_bytes * self.safety_factor)

    @property
    def workspace_bytes_per_worker(self) -> int:
        """For one forward pass."""
        return math.floor(self.free_bytes * self.safety_factor / self.workers)

    @property
    def model_bytes_per_worker(self) -> int:
        """The model's share of each worker: together they are what is really resident."""
        return self.model_bytes // self.workers

    @property
    def probe_workspace_bytes(self) -> int:
        """For one forward pass while the probe has a share like a worker's."""
        return self.workspace_bytes // (self.workers + 1)

    def worst_case_peak_bytes(self, workspace_bytes: int | None = None) -> int:
        """Every worker at its ceiling, or `workspace_bytes` in all where others are allowed."""
        if workspace_bytes is None:
            workspace_bytes = self.workers * self.workspace_bytes_per_worker
        return workspace_bytes + self.model_bytes + OS_HEADROOM_BYTES

    def utilization_pct(self, workspace_bytes: int | None = None) -> float:
        """The worst case as a share of what is available."""
        if not self.available_bytes:
            return 0.0
        return 100 * self.worst_case_peak_bytes(workspace_bytes) / self.available_bytes


def require_useful(
    budget: Budget, source: str, coefficients: Coefficients, max_tokens: int, *, is_8_bit: bool
) -> int:
    """The longest text that fits; at least one of 512 tokens (or `max_tokens`) must.

    Args:
        budget: what there is.
        source: who says how much memory there is.
        coefficients: what a text costs.
        max_tokens: the longest text that is accepted at all.
        is_8_bit: the model cannot be had any smaller.

    Raises:
        ConfigError: shows the arithmetic and three ways out.
    """
    per_worker = budget.workspace_bytes_per_worker
    if is_useful(coefficients, per_worker, max_tokens):
        return longest_text(coefficients.cost_model(per_worker), max_tokens)
    least = min(LEAST_USEFUL_TOKENS, max_tokens)
    need_bytes = math.ceil(coefficients.cost_bytes(1, least))
    ways = [
        way
        for way in (
            _more_memory(budget, need_bytes),
            _fewer_workers(budget, need_bytes) or _larger_share(budget, need_bytes),
            None
            if is_8_bit
            else "load a smaller model: BGE_M3_MODEL=w8 or int8 need a quarter of fp32's memory",
            _shorter_texts(budget, coefficients, least),
            _other_source(source),
            "end other processes that use this memory",
        )
        if way
    ]
    raise ConfigError(
        f"memory does not suffice for one text of {least} tokens per worker:\n"
        f"    {_mib(budget.available_bytes)} available ({source})\n"
        f"  - {_mib(budget.model_bytes)} resident with the model loaded\n"
        f"  - {_mib(OS_HEADROOM_BYTES)} headroom\n"
        f"  x {budget.safety_factor:g} safety factor / {_count(budget.workers, 'worker')}\n"
        f"  = {_mib(per_worker)} of workspace for each worker; {_mib(need_bytes)} are needed\n"
        "Ways out:\n" + "\n".join(f"  {number}. {way}" for number, way in enumerate(ways[:3], 1))
    )


def is_useful(coefficients: Coefficients, workspace_bytes: int, max_tokens: int) -> bool:
    """Whether texts of a usual length fit, alone, into so much workspace."""
    least = min(LEAST_USEFUL_TOKENS, max_tokens)
    return coefficients.cost_model(workspace_bytes).fits(1, least)


def require_fits(
    lengths: Sequence[int], cost_model: CostModel, inputs: Sequence[int] | None = None
) -> None:
    """Refuse texts that do not fit the workspace even alone.

    `inputs`: where the client has the texts; their own places if left out.

    Raises:
        RequestTooLargeError: names the first such text, what it needs and what would fit.
    """
    for index, tokens in zip(inputs or range(len(lengths)), lengths, strict=True):
        if not cost_model.fits(1, tokens):
            raise RequestTooLargeError(
                f"input[{index}] has {tokens} tokens, which need "
                f"{_mib(cost_model.chunk_cost_bytes(1, tokens))} of workspace; this server has "
                f"{_mib(cost_model.max_workspace_bytes)} for it: send texts of at most "
                f"{longest_text(cost_model, tokens)} tokens",
                param=f"input[{index}]",
            )


def longest_text(cost_model: CostModel, max_tokens: int) -> int:
    """Tokens of the longest single text that fits, at most `max_tokens`; 0 if none does."""
    low, high = 0, max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost_model.fits(1, middle) else (low, middle - 1)
    return low


def largest_batch(cost_model: CostModel, tokens: int, max_batch: int) -> int:
    """The most texts of `tokens` tokens that fit together, at most `max_batch`; 0 if none does."""
    low, high = 0, max_batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost_model.fits(middle, tokens) else (low, middle - 1)
    return low


def _more_memory(budget: Budget, need_bytes: int) -> str:
    least_bytes = budget.model_bytes + OS_HEADROOM_BYTES + RESIDENT_SCATTER_BYTES
    least_bytes += math.ceil(need_bytes * budget.workers / budget.safety_factor)
    return f"give the process {math.ceil(least_bytes / 2**20)} MiB or more"


def _fewer_workers(budget: Budget, need_bytes: int) -> str | None:
    fitting = budget.workspace_bytes // need_bytes
    if 1 <= fitting < budget.workers:
        return f"share it between fewer workers: BGE_M3_WORKERS={fitting}"
    return None


def _larger_share(budget: Budget, need_bytes: int) -> str | None:
    """The least safety factor with which one worker would do."""
    free_bytes = budget.free_bytes - RESIDENT_SCATTER_BYTES
    if free_bytes < need_bytes:
        return None
    factor = math.ceil(100 * need_bytes / free_bytes) / 100
    settings = ["BGE_M3_WORKERS=1"] * (budget.workers > 1)
    if factor > budget.safety_factor:
        settings.append(f"BGE_M3_MEMORY_SAFETY_FACTOR={factor:g}")
    return f"use more of it: {', and '.join(settings)}" if settings else None


def _shorter_texts(budget: Budget, coefficients: Coefficients, least: int) -> str | None:
    fitting = longest_text(coefficients.cost_model(budget.workspace_bytes_per_worker), least)
    if fitting < SHORT_TEXT_TOKENS:
        return None
    return f"accept only shorter texts: BGE_M3_MAX_SEQ_LENGTH={fitting}"


def _other_source(source: str) -> str:
    if source == OVERRIDE_SOURCE:
        return "have it detected: leave BGE_M3_AVAILABLE_MEMORY_BYTES unset"
    return f"where {source} tells too little, say what there is: BGE_M3_AVAILABLE_MEMORY_BYTES"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.0f} MiB"
