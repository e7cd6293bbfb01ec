"""Losses on features, in plain torch: any training loop can use them without the rest of frugalvit."""

from frugalvit.objectives.chunked import assigned_cross_entropy as assigned_cross_entropy
from frugalvit.objectives.chunked import should_chunk as should_chunk
from frugalvit.objectives.chunked import sinkhorn_center as sinkhorn_center
from frugalvit.objectives.distillation import FeatureDistillation as FeatureDistillation
from frugalvit.objectives.distillation import distillation_targets as distillation_targets
from frugalvit.objectives.drloc import DenseLocalization as DenseLocalization
from frugalvit.objectives.drloc import RelativeLocalization as RelativeLocalization
from frugalvit.objectives.drloc import draw_pairs as draw_pairs
from frugalvit.objectives.esvit import ProjectionHead as ProjectionHead
from frugalvit.objectives.esvit import RegionMatching as RegionMatching
from frugalvit.objectives.esvit import ViewMatching as ViewMatching
from frugalvit.objectives.esvit import koleo_loss as koleo_loss
from frugalvit.objectives.esvit import match_regions as match_regions
from frugalvit.objectives.esvit import region_loss as region_loss
from frugalvit.objectives.esvit import update_average as update_average
from frugalvit.objectives.esvit import update_center as update_center
from frugalvit.objectives.esvit import view_loss as view_loss
from frugalvit.objectives.instances import InstanceClassification as InstanceClassification
from frugalvit.objectives.pseudo_labels import FlexMatch as FlexMatch
from frugalvit.objectives.pseudo_labels import SoftMatch as SoftMatch
from frugalvit.objectives.pseudo_labels import pseudo_label_loss as pseudo_label_loss
from frugalvit.objectives.registry import Objective as Objective
from frugalvit.objectives.registry import ObjectiveContext as ObjectiveContext
from frugalvit.objectives.registry import get_objective as get_objective
from frugalvit.objectives.registry import list_objectives as list_objectives
from frugalvit.objectives.registry import register_objective as register_objective
