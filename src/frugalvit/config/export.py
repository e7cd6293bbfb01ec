"""What can be set when a model leaves the house."""

from __future__ import annotations

from typing import Literal

from frugalvit.config.base import Config, option
from frugalvit.config.kinds import Side


class ExportConfig(Config):
    model: str = option(help="a run, a checkpoint, an exported folder or a model name", positional=True)
    to: Literal["timm", "hf", "onnx", "pt2"] = option(
        "timm", "timm: weights and config.json; hf: the same with a model card; onnx, pt2: a program"
    )
    out: str | None = option(
        None, "folder to write; it must not exist, or be empty (default: MODEL-FORMAT)", short="-o"
    )
    output: Literal["auto", "logits", "features"] = option(
        "auto", "of onnx and pt2: logits, or features (pooled and grid); auto: logits where there is a classifier"
    )
    images: str | None = option(
        None, "images (a file, a folder or a dataset) to check the export on (default: the run's own data, or noise)"
    )
    backbone: str | None = option(None, "what a bare checkpoint belongs to")
    img_size: Side | None = option(None, "input size in pixels instead of the model's own")
    license: str = option(
        "unknown", "of hf: the licence you give the weights, as the hub spells it (apache-2.0, mit …)"
    )
