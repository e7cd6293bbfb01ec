"""Losses on features, in plain torch: any training loop can use them without the rest of frugalvit."""

from frugalvit.objectives.chunked import assigned_cross_entropy, should_chunk, sinkhorn_center
from frugalvit.objectives.distillation import FeatureDistillation, distillation_targets
from frugalvit.objectives.drloc import (
    DenseLocalization,
    RelativeLocalization,
    draw_pairs,
    localization_weight_at,
)
from frugalvit.objectives.esvit import (
    ProjectionHead,
    RegionMatching,
    ViewMatching,
    koleo_loss,
    match_regions,
    region_loss,
    update_average,
    update_center,
    view_loss,
)
from frugalvit.objectives.pseudo_labels import FlexMatch, FreeMatch, SoftMatch, pseudo_label_loss
from frugalvit.objectives.registry import (
    Objective,
    ObjectiveContext,
    get_objective,
    list_objectives,
    register_objective,
)

__all__ = [
    "RelativeLocalization",
    "DenseLocalization",
    "localization_weight_at",
    "draw_pairs",
    "FeatureDistillation",
    "distillation_targets",
    "ProjectionHead",
    "update_average",
    "ViewMatching",
    "view_loss",
    "update_center",
    "RegionMatching",
    "region_loss",
    "match_regions",
    "FlexMatch",
    "FreeMatch",
    "SoftMatch",
    "pseudo_label_loss",
    "assigned_cross_entropy",
    "should_chunk",
    "sinkhorn_center",
    "koleo_loss",
    "Objective",
    "ObjectiveContext",
    "register_objective",
    "get_objective",
    "list_objectives",
]
