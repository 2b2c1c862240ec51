"""Which texts this server has room for at all."""

from collections.abc import Sequence

from ..domain.budget import require_fits
from ..domain.cost_model import CostModel
from ..domain.errors import NotReadyError, RequestTooLargeError
from .service import ProbeStatus, Tuning

PROBE_RETRY_SECONDS = 10.0
"""A text that is too long for conservative figures may fit once the probe has ended."""


def require_room(
    lengths: Sequence[int], tuning: Tuning, inputs: Sequence[int] | None = None
) -> None:
    """Refuse texts that do not fit even while nothing else runs, unless the ceiling is pinned.

    `inputs`: where the client has the texts; their own places if left out.

    Raises:
        RequestTooLargeError: with what is needed, what there is, and what would fit.
        NotReadyError: the same, but the figures are conservative and soon to be replaced.
    """
    if tuning.total_workspace_bytes is None:
        return
    cost_model = CostModel(
        tuning.a_bytes_per_token,
        tuning.b_bytes_per_token_sq,
        tuning.total_workspace_bytes,
        tuning.fixed_bytes,
    )
    try:
        require_fits(lengths, cost_model, inputs)
    except RequestTooLargeError as error:
        if tuning.probe_status is not ProbeStatus.RUNNING:
            raise
        raise NotReadyError(
            f"{error}; the need is being measured and may prove smaller: try again then",
            retry_after_seconds=PROBE_RETRY_SECONDS,
        ) from error
