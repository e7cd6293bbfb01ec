"""Features -> loss, in plain torch: usable in anybody's loop, without the rest of frugalvit."""

from frugalvit.objectives.localization import (
    LOCALIZATION_WEIGHTS,
    DenseLocalization,
    RelativeLocalization,
    draw_pairs,
    localization_weight_at,
)

__all__ = [
    "DenseLocalization",
    "LOCALIZATION_WEIGHTS",
    "RelativeLocalization",
    "draw_pairs",
    "localization_weight_at",
]
