"""Images -> Features: our own networks and every timm network with a final grid."""

from __future__ import annotations

from frugalvit.backbones.base import Backbone, GridModel
from frugalvit.backbones.factory import ModelInfo, create_backbone, list_models

__all__ = ["Backbone", "GridModel", "ModelInfo", "create_backbone", "list_models"]
