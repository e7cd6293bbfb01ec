"""Images -> Features: our networks and every timm network with a final grid."""

from frugalvit.backbones.base import Backbone, GridModel
from frugalvit.backbones.factory import create_backbone
from frugalvit.backbones.registry import ModelInfo, list_models

__all__ = ["Backbone", "GridModel", "ModelInfo", "create_backbone", "list_models"]
