"""Options of export, list, doctor, advise, reproduce, look and report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from frugalvit.config.base import Config, option
from frugalvit.config.types import ARCHITECTURE, DATA, MODEL, PRETRAINED, ROOT, Auto, Count, Device, Seed, Side

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
    """Export a model and check the export."""

    model: str = option(help=MODEL, positional=True)
    to: ExportName = option("timm", "timm: weights and config.json; hf: also a model card; onnx, pt2: a program")
    out: str | None = option(None, "new folder to write (default: MODEL-FORMAT)", short="-o")
    output: Literal["auto", "logits", "features"] = option(
        "auto", "output of onnx and pt2: logits, or pooled and grid features; auto: logits of a classifier"
    )
    int8: bool = option(False, "also write model_int8.onnx, and measure it on held-out images (--images, or the run's)")
    images: str | None = option(None, "file, folder or dataset to check the export with (default: the run's, or noise)")
    backbone: str | None = option(None, ARCHITECTURE)
    img_size: Side | None = option(None, "input size in pixels (default: the model's)")
    license: str = option("unknown", "licence of the weights, as the hub spells it (apache-2.0, mit …); for hf")
    push: str | None = option(None, "also upload the folder to the Hugging Face hub as this model (USER/NAME)")
    private: bool = option(False, "only you see the model on the hub", needs="push")


class RecipesConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)


class DatasetsConfig(RecipesConfig):
    root: str | None = option(None, ROOT)


class ModelsConfig(Config):
    pattern: str = option("", "part of a name, with * and ? (default: built-in models)", positional=True)


class DoctorConfig(Config):
    """Check versions, devices and missing packages."""


class AdviseConfig(Config):
    """Propose commands for a dataset on this machine."""

    data: str = option(help=DATA, positional=True)
    device: Device = option("auto", "device to compute on")
    trial: int = option(3, "steps of each training to measure; 0: no expected times", ge=0)


class ReproduceConfig(Config):
    """Rerun a table; finished runs are not repeated."""

    table: str = option("", "name of a table (default: list the tables)", positional=True)
    data: str = option(".", "folder that holds flowers102/, cifar100/, …")
    out: str = option("runs/reproduce", "folder for the runs and tables", short="-o")
    only: list[str] = option([], "run only these settings of the table")
    seeds: int = option(3, "runs of each setting", ge=1)
    epochs: float | None = option(None, "replace the table's length, also in the runs that it starts from", gt=0)
    steps: int | None = option(None, "length in steps instead of epochs", ge=1)
    backbone: str | None = option(None, "replace the table's backbone, also in the runs that it starts from")
    img_size: int | None = option(None, "replace the table's input size, also in the runs that it starts from", ge=8)
    device: Device = option("auto", "device to compute on")


class _LookConfig(Config):
    model: str = option(help=MODEL, positional=True)
    backbone: str | None = option(None, ARCHITECTURE)
    pretrained: bool = option(False, PRETRAINED)
    img_size: Side | None = option(None, "input size in pixels (default: the model's)")
    device: Device = option("auto", "device to compute on")
    out: str | None = option(None, "file to write, or a folder for it (default: a new name in this folder)", short="-o")


class CorrespondConfig(_LookConfig):
    """Draw the matching regions of two views (EsViT, Fig. 6) and score them (Fig. 8).

    Tables count rows and columns of regions from 1, --json from 0.
    """

    images: list[str] = option([], "one image (its second view is mirrored and grey) or two", positional=True)
    against: list[str] = option([], "more models to draw and score")
    data: str | None = option(None, "score the matches on this dataset")
    split: Literal["auto", "train", "val", "test"] = option(
        "auto", "of --data; auto: val, else test or train", needs="data"
    )
    limit: int = option(1000, "images to score, spread evenly over the split", ge=1, needs="data")
    batch: int = option(64, "images per batch", ge=1, needs="data")
    top: int = option(10, "number of most similar pairs", ge=1)
    seed: Seed = option(0, "seed of the second views' colours")
    format: Literal["png", "svg", "pdf"] = option("png", "format of the figures")


class AttendConfig(_LookConfig):
    """Draw the attention of each head of a block from one point (EsViT, Fig. 7 and 10 to 12).

    The first picture shows the block's regions and windows: regions that a white line separates do not interact.
    """

    image: str = option(help="image file", positional=True)
    query: str = option("0.5,0.5", "x,y in pixels (120,80) or as shares of the view (0.5,0.5); class: the class token")
    block: Count | None = option(None, "number of the block, from 1 (default: the last)")
    against: list[str] = option([], "more models to draw, each in a figure of its own")
    format: Literal["png", "svg", "pdf"] = option("png", "format of the figure")


class ExploreConfig(_LookConfig):
    """Write a page with the similarities and the attention of every region."""

    images: list[str] = option(help="image files", positional=True)
    against: list[str] = option([], "more models to switch between")
    second_views: bool | Auto = option("auto", "add the mirrored, grey view of every image; auto: for a single image")
    seed: Seed = option(0, "seed of the second views' colours")


class ReportConfig(Config):
    """Write a page about one or several runs."""

    runs: list[str] = option(help="run folders, or folders of runs", positional=True)
    out: str | None = option(None, "file to write (default: report.html in the folder; several need --out)", short="-o")
    images: list[str] = option([], "images for the explorer of each run's model")
    device: Device = option("auto", "device to compute on")
