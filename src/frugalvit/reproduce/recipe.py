"""What a table of docs/RESULTS.md is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["train", "pretrain", "detect", "segment"]


@dataclass(frozen=True)
class Recipe:
    """One table: the data it needs, the values all its runs share, and its settings (the last is the baseline).

    settings: each setting's options as ``compare`` reads them; ``{esvit}`` stands for the run that ``starts`` names.
    starts: runs that settings begin from, as (table, setting), which may begin from others; made where they are absent.
    """

    about: str
    data: str
    common: dict[str, Any]
    settings: dict[str, str]
    kind: Kind = "train"
    backbones: tuple[str, ...] = ("swin_tiny_w7",)
    starts: dict[str, tuple[str, str]] = field(default_factory=dict)
    metric: str = "top1"
