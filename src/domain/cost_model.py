"""How much workspace one forward pass needs."""

import math

import attrs
from attrs.validators import ge

DEFAULT_MAX_WORKSPACE_BYTES = 2 * 1024**3
"""Ceiling of one forward pass until memory has been measured."""

BGE_M3_ATTENTION_HEADS = 16
BGE_M3_HIDDEN_SIZE = 1024
FLOAT32_BYTES = 4

_ROWS_PER_TOKEN = 24
_ATTENTION_COPIES = 3


def _finite_and_not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{attribute.name} must be a finite number >= 0, got {value}")


@attrs.frozen
class CostModel:
    """Workspace of a (count, max_tokens) chunk: a · count·tokens + b · count·tokens² + fixed.

    The linear term is activations, the quadratic one the attention scores; the fixed part is what
    an engine keeps for itself, however small the chunk.
    """

    a_bytes_per_token: float = attrs.field(validator=_finite_and_not_negative)
    b_bytes_per_token_sq: float = attrs.field(validator=_finite_and_not_negative)
    max_workspace_bytes: int = attrs.field(validator=ge(0))
    fixed_bytes: float = attrs.field(default=0.0, validator=_finite_and_not_negative)

    @classmethod
    def conservative(
        cls,
        max_workspace_bytes: int = DEFAULT_MAX_WORKSPACE_BYTES,
        attention_heads: int = BGE_M3_ATTENTION_HEADS,
        hidden_size: int = BGE_M3_HIDDEN_SIZE,
        bytes_per_value: int = FLOAT32_BYTES,
    ) -> "CostModel":
        """Coefficients for a model that nobody has measured; by default one like BGE-M3.

        A token needs 24 rows of the hidden size at the same time: the feed-forward part is four
        times as wide and holds several copies while its activation is computed (up to 21 were
        measured on ONNX Runtime). A token pair needs three values per head: scores, masked scores,
        probabilities (2.9 were measured). Fused attention needs less, which a probe finds out.
        """
        return cls(
            float(_ROWS_PER_TOKEN * hidden_size * bytes_per_value),
            float(_ATTENTION_COPIES * attention_heads * bytes_per_value),
            max_workspace_bytes,
        )

    def chunk_cost_bytes(self, count: int, max_tokens: int) -> int:
        """Estimated workspace; each term is rounded down on its own."""
        positions = count * max_tokens
        if positions == 0:
            return 0
        return (
            math.floor(self.a_bytes_per_token * positions)
            + math.floor(self.b_bytes_per_token_sq * positions * max_tokens)
            + math.ceil(self.fixed_bytes)
        )

    def fits(self, count: int, max_tokens: int) -> bool:
        """Whether the chunk stays within the ceiling; a chunk that meets it exactly fits."""
        return self.chunk_cost_bytes(count, max_tokens) <= self.max_workspace_bytes
