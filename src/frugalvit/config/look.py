"""What can be set when looking at a model, and for reports."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.kinds import Auto, Device, Seed, Side


class _LookConfig(Config):
    model: str = option(help="a run, a checkpoint, an exported folder or a model name", positional=True)
    backbone: str | None = option(None, "what a bare checkpoint belongs to")
    img_size: Side | None = option(None, "look at this many pixels a side instead of the model's own")
    device: Device = option("auto", "where to compute")
    out: str | None = option(None, "file to write, or a folder for it (default: a new name in this folder)", short="-o")


class CorrespondConfig(_LookConfig):
    """Which regions of two views match (EsViT, Fig. 6), and how often they match right (Fig. 8).

    Tables count rows and columns of regions from 1, as people do; --json counts them from 0, as arrays do.
    """

    images: list[str] = option(
        default_factory=list, help="one image (its second view is mirrored and grey) or two", positional=True
    )
    against: list[str] = option(default_factory=list, help="further models, shown and scored beside the first")
    data: str | None = option(None, "score the matches over the images of this dataset")
    split: Literal["auto", "train", "val", "test"] = option("auto", "its split; auto: val, else test, else train")
    limit: int = option(1000, "images to score, spread evenly over the split", ge=1)
    batch: int = option(64, "images at once", ge=1)
    top: int = option(10, "how many of the most similar pairs count", ge=1)
    fit: Literal["crop", "whole"] = option(
        "crop", "the evaluation's centre crop, or the whole image in its proportions"
    )
    seed: Seed = option(0, "colours of the second views follow from it")
    format: Literal["png", "svg", "pdf"] = option("png", "of the figures")

    @pydantic.model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        """An option that would do nothing is refused."""
        for name in ("split", "limit", "batch"):
            if self.data is None and name in self.model_fields_set:
                raise ValueError(f"--{name} is of the images that are scored: give --data, or leave it out")
        if not self.images and "fit" in self.model_fields_set:
            raise ValueError("--fit is of the images that are drawn: name one or two, or leave it out")
        return self


class AttendConfig(_LookConfig):
    """Where each head of the last block looks from one place (EsViT, Fig. 7 and 10 to 12)."""

    image: str = option(help="an image file", positional=True)
    query: str = option(
        "0.5,0.5", "x,y in pixels of the image (120,80) or as shares of the view (0.5,0.5); or: class, the class token"
    )
    mass: float = option(0.6, "share of a head's attention that its mask holds", gt=0, lt=1)
    fit: Literal["crop", "whole"] = option(
        "crop", "the evaluation's centre crop, or the whole image in its proportions"
    )
    format: Literal["png", "svg", "pdf"] = option("png", "of the figure")


class ExploreConfig(_LookConfig):
    """One page to click through: similarities and attention of every region."""

    images: list[str] = option(help="image files", positional=True)
    against: list[str] = option(default_factory=list, help="further models to switch between")
    second_views: bool | Auto = option(
        "auto", "add every image's mirrored, grey view; auto: when there is one image only"
    )
    seed: Seed = option(0, "colours of the second views follow from it")


class ReportConfig(Config):
    """One page about one or several runs."""

    runs: list[str] = option(help="run folders, or folders of runs", positional=True)
    out: str | None = option(
        None, "file to write; needed for several folders (default: report.html in the folder)", short="-o"
    )
    images: list[str] = option(default_factory=list, help="let each run's model look at these images, for the explorer")
    device: Device = option("auto", "where to compute what the models see")
