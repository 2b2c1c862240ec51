"""How much workspace one forward pass needs."""

import math

import attrs
from attrs.validators import ge

CONSERVATIVE_BYTES_PER_TOKEN = 16384.0
"""Activations of one token position: a few hidden-sized float32 rows alive at the same time."""

DEFAULT_MAX_WORKSPACE_BYTES = 2 * 1024**3
"""Ceiling of one forward pass until memory has been measured."""

BGE_M3_ATTENTION_HEADS = 16


def _finite_and_not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{attribute.name} must be a finite number >= 0, got {value}")


@attrs.frozen
class CostModel:
    """Workspace of a (count, max_tokens) chunk: a · count·tokens + b · count·tokens².

    The linear term is activations, the quadratic one the attention scores.
    """

    a_bytes_per_token: float = attrs.field(validator=_finite_and_not_negative)
    b_bytes_per_token_sq: float = attrs.field(validator=_finite_and_not_negative)
    max_workspace_bytes: int = attrs.field(validator=ge(0))

    @classmethod
    def conservative(
        cls,
        max_workspace_bytes: int = DEFAULT_MAX_WORKSPACE_BYTES,
        attention_heads: int = BGE_M3_ATTENTION_HEADS,
    ) -> "CostModel":
        """Coefficients for a model nobody has measured.

        Materialised attention keeps about two copies (scores and probabilities) of one float32
        per head and token pair: b = heads × 4 bytes × 2.
        """
        return cls(CONSERVATIVE_BYTES_PER_TOKEN, attention_heads * 4.0 * 2.0, max_workspace_bytes)

    def chunk_cost_bytes(self, count: int, max_tokens: int) -> int:
        """Estimated workspace; each term is rounded down on its own."""
        positions = count * max_tokens
        return math.floor(self.a_bytes_per_token * positions) + math.floor(
            self.b_bytes_per_token_sq * positions * max_tokens
        )

    def fits(self, count: int, max_tokens: int) -> bool:
        """Whether the chunk stays within the ceiling; a chunk that meets it exactly fits."""
        return self.chunk_cost_bytes(count, max_tokens) <= self.max_workspace_bytes
