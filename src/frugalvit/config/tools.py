"""Options of export, list, doctor, advise, reproduce, look and report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.types import ROOT, Auto, Device, Seed, Side

EXPORTS = {
    "timm": "frugalvit.export.timm_folder:TimmFolder",
    "hf": "frugalvit.export.timm_folder:HubFolder",
    "onnx": "frugalvit.export.onnx:OnnxFormat",
    "pt2": "frugalvit.export.onnx:TorchExportFormat",
}
"""The choices of ``export --to``, and the class of each as ``module:name`` (a subclass of ``ExportFormat``)."""

if TYPE_CHECKING:
    ExportName = str
else:
    ExportName = Literal[tuple(EXPORTS)]


class ExportConfig(Config):
    model: str = option(help="a run, a checkpoint, an exported folder or a model name", positional=True)
    to: ExportName = option(
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


class ModelsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?; without one, our own models", positional=True)


class DatasetsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)
    root: str | None = option(None, ROOT)


class RecipesConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)


class DoctorConfig(Config):
    """Versions, devices, what is missing, and what the caches take."""

    cache: bool = option(True, "add up the cache folder (a walk over its files)")


class AdviseConfig(Config):
    """What to do with a dataset on this machine, why, and how long it takes."""

    data: str = option(help="a folder, a table, shards, or the name of a dataset", positional=True)
    device: Device = option("auto", "where to compute")
    trial: int = option(3, "steps to measure each training with, for the expected time; 0: no times", ge=0)


class CompletionConfig(Config):
    """A script that completes the command's words and options in a shell."""

    shell: Literal["bash", "zsh", "fish"] = option(help="bash, zsh or fish", positional=True)


class ReproduceConfig(Config):
    """Rerun a table from data in a folder; what is finished is not done again."""

    table: str = option("", "a table's name; without one, the tables there are", positional=True)
    data: str = option(".", "the folder that holds flowers102/, cifar100/, …")
    out: str = option("runs/reproduce", "where the runs and tables go", short="-o")
    only: list[str] = option(
        default_factory=list, help="only these of the table's settings; several machines can share a table so"
    )
    seeds: int = option(3, "runs of each setting", ge=1)
    epochs: float | None = option(
        None, "another length than the table's, for a trial; meant for the runs it begins from too", gt=0
    )
    steps: int | None = option(None, "the same in steps; counts instead of epochs", ge=1)
    backbone: str | None = option(None, "another backbone than the table's, in the runs it begins from too")
    img_size: int | None = option(None, "another input size than the table's, in the runs it begins from too", ge=8)
    device: Device = option("auto", "where to compute")


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
