"""Options of probe, embed, eval and bench."""

from typing import Any, Literal, Self

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.types import (
    ARCHITECTURE,
    CLASSIFIER,
    COVERAGE,
    DATA,
    LABEL_PART,
    LABELS,
    MIRROR,
    MODEL,
    PRECISION,
    PRETRAINED,
    ROOT,
    TARGET_OF_PROBE,
    VAL_FRACTION,
    Auto,
    Count,
    Device,
    Labelling,
    LabelPart,
    Positive,
    Precision,
    Seed,
    Side,
    Whole,
)

# Defaults of the probes, on the command line and in Python.
KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EPOCHS = 100
BATCH = 256
MAX_ITERATIONS = 1000


_FEATURES = "pooled, or the token means of the last blocks (class tokens of a ViT)"
_BLOCKS = "number of last blocks, for --features last_blocks"
_SEED = "seed of the random weights of a model without weights"
_SIZE = "input size in pixels, or height,width (default: the model's)"


class FrozenModelConfig(Config):
    """Input and device of a frozen model."""

    img_size: Side | tuple[Side, Side] | None = option(None, _SIZE)
    batch: int = option(64, "images per batch", ge=1)
    device: Device = option("auto", "device to compute on")
    precision: Precision = option("auto", PRECISION)
    workers: int | Auto = option("auto", "threads that decode images")
    cache: bool = option(True, "cache features on disk")


class ExtractConfig(FrozenModelConfig):
    """Options of every command that extracts features."""

    backbone: str | None = option(None, ARCHITECTURE)
    pretrained: bool = option(False, PRETRAINED)
    seed: Seed = option(0, "seed of splits and of all random numbers")


class EvalConfig(FrozenModelConfig):
    """Score a classifier on labelled images."""

    model: str = option(help=CLASSIFIER, positional=True)
    data: str = option(help=DATA, positional=True)
    root: str | None = option(None, ROOT)
    classes: str | None = option(None, "file with the classes to use, one name per line")
    split: Literal["auto", "all", "train", "val", "test"] = option("auto", "split to score; auto: test, val or all")
    mirror: bool = option(False, MIRROR)
    coverage: float | None = option(None, COVERAGE)
    out: str | None = option(None, "CSV file for the prediction of every image", short="-o")


class FeaturesConfig(ExtractConfig):
    """The features to extract."""

    features: Literal["pooled", "last_blocks"] = option("pooled", _FEATURES)
    blocks: int = option(4, _BLOCKS, ge=1, needs="features=last_blocks")


class ProbeConfig(FeaturesConfig):
    """Options of every probe on one dataset."""

    model: str = option(help=MODEL, positional=True)
    data: str = option(help=DATA, positional=True)
    root: str | None = option(None, ROOT)
    target: Literal["auto", "class", "labels"] = option("auto", TARGET_OF_PROBE)
    labels: LabelPart = option(1.0, f"{LABEL_PART}, val included")
    save: str | None = option(None, "new folder: save the classifier as a run for predict, eval, export and report")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _save_pooled_features(cls, values: Any) -> Any:
        """Use pooled features with --save: a saved classifier reads them."""
        is_saved = isinstance(values, dict) and values.get("save") is not None
        return {"features": "pooled"} | values if is_saved else values

    @pydantic.model_validator(mode="after")
    def _check_saved_features(self) -> Self:
        if self.save is not None and self.features != "pooled":
            raise ValueError(f"--features {self.features} cannot be used with --save; use pooled")
        return self


class KnnConfig(ProbeConfig):
    """Weighted k-NN; the index is train, or train and val if a test split is scored."""

    seed: Seed = option(0, f"{_SEED}, and of --labels")
    ks: list[Count] = option(list(KS), "numbers of neighbours")
    temperature: float = option(TEMPERATURE, "temperature of the votes' weights, exp(cosine / temperature)", gt=0)


class LinearConfig(ProbeConfig):
    """A linear classifier by SGD; the learning rate is chosen on validation images."""

    lrs: list[Positive] = option(list(LEARNING_RATES), "learning rates (x batch / 256)")
    epochs: int = option(EPOCHS, "passes over the training features", ge=1)
    probe_batch: int = option(BATCH, "features per step", ge=1)
    views: Whole | Auto = option(
        "auto", "augmented views of every training image; 0: the centre crop; auto: 4, fewer if features exceed 8 GB"
    )
    features: Literal["pooled", "last_blocks"] = option("last_blocks", _FEATURES)
    val_fraction: float = option(0.2, VAL_FRACTION, gt=0, lt=1)


class LogisticConfig(ProbeConfig):
    """Logistic regression by L-BFGS, λ searched on validation images."""

    unlabelled: str | None = option(
        None, "spread the labels to unlabelled images first: a folder or table, or rest, DATA's images without a label"
    )
    max_iterations: int = option(MAX_ITERATIONS, "iterations of L-BFGS for every λ", ge=1)
    val_fraction: float = option(0.2, VAL_FRACTION, gt=0, lt=1)


class SuiteConfig(ExtractConfig):
    """Logistic regression on those of EsViT's 18 datasets (Table 9) that are present."""

    model: str = option(help=MODEL, positional=True)
    against: str | None = option(None, "a second model to compare with")
    root: str | None = option(None, ROOT)
    datasets: list[str] = option([], "datasets to use (default: all that are present)")
    own: list[str] = option([], "more datasets: folders, tables or names")
    download: bool = option(False, "download datasets that are missing")
    out: str = option("suite", "folder of the results; a dataset with results is not repeated", short="-o")
    val_fraction: float = option(0.2, VAL_FRACTION, gt=0, lt=1)
    max_iterations: int = option(MAX_ITERATIONS, "iterations of L-BFGS for every λ", ge=1)


class EmbedConfig(FeaturesConfig):
    """Write the features of images; find neighbours, near duplicates and images to label next."""

    model: str = option(help=MODEL, positional=True)
    data: str = option(help=DATA, positional=True)
    out: str | None = option(
        None, "features.npz or .parquet; to_label.csv (--select); duplicates.csv; a folder (--engine ray)", short="-o"
    )
    engine: Literal["memory", "ray"] = option(
        "memory", "ray: any number of images, into a folder --out; a repeated command continues (frugalvit[scale])"
    )
    actors: Count | Auto = option("auto", "workers of Ray; auto: one a GPU, else one a core", needs="engine=ray")
    root: str | None = option(None, ROOT)
    split: Literal["all", "train", "val", "test"] = option("all", "images to use; without it --select uses train")
    seed: Seed = option(0, f"{_SEED}, and of the samples of --select")
    label_source: Labelling = option("auto", LABELS)
    features: Literal["pooled", "last_blocks", "grid"] = option(  # type: ignore[assignment]
        "pooled", "pooled, last_blocks, or the grid of tokens"
    )
    neighbours: str | None = option(None, "draw the nearest neighbours of this image file")
    count: int = option(10, "number of neighbours", ge=1, needs="neighbours")
    select: int | None = option(None, "choose this many representative images to label, as a table and a picture", ge=1)
    known: str | None = option(
        None, "table or folder of the images that have labels, for --select; it chooses others", needs="select"
    )
    duplicates: float | None = option(None, "group images with at least this cosine similarity, e.g. 0.98", gt=0, le=1)
    picture: str | None = option(
        None, "file (default: neighbours.png, or beside the table)", needs="neighbours or select or duplicates"
    )

    @pydantic.model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        """Allow one of the three outputs."""
        outputs = [name for name in ("neighbours", "select", "duplicates") if getattr(self, name) is not None]
        if len(outputs) > 1:
            raise ValueError(f"--{outputs[0]} and --{outputs[1]} cannot be combined; run the command twice")
        if self.engine == "ray" and self.features == "grid":
            raise ValueError("--features grid does not fit a table; use pooled or last_blocks with --engine ray")
        if self.engine == "ray" and self.picture:
            raise ValueError("--picture has no effect with --engine ray, which writes tables; drop it")
        return self


class BenchConfig(Config):
    """Parameters, GFLOPs, images/s and memory of models, relative to ViT-B (EsViT, Table 7 and Fig. 1)."""

    models: list[str] = option(help="run folders, exported folders or model names", positional=True)
    img_size: Side | tuple[Side, Side] | None = option(None, _SIZE)
    batch: Count | Auto = option("auto", "images per batch; auto: 64 on a GPU, 8 elsewhere")
    steps: int = option(20, "timed forward passes; the result is their median", ge=1)
    device: Device = option("auto", "device to compute on")
    precision: Precision = option("auto", PRECISION)
    compile: bool = option(False, "torch.compile the models")
    reference: str | None = option("vit_base", "model that throughput is relative to; none: no such column")
    plot: str | None = option(None, "plot accuracy against throughput (Fig. 1) to a .png, .svg or .pdf")


class BenchStepConfig(Config):
    """Time a full training step, from the input to the EMA."""

    kind: Literal["train", "pretrain"] = option(help="train: supervised; pretrain: EsViT", positional=True)
    data: str | None = option(None, "images to use (default: random images)")
    backbone: str = option("swin_tiny_w7", "model name")
    img_size: int = option(224, "input size in pixels", ge=8)
    batch: int = option(64, "images per step", ge=2)
    prototypes: int = option(65536, "prototypes of each head; for pretrain", ge=2, needs="kind=pretrain")
    localization: float = option(0.5, "λ of Drloc; 0: without; for train", ge=0, needs="kind=train")
    steps: int = option(30, "timed steps; the median of groups of five is reported", ge=5)
    device: Device = option("auto", "device to compute on")
    precision: Precision = option("auto", PRECISION)
    compile: bool | Literal["auto", "graphs"] = option("auto", "torch.compile the step on a GPU; graphs: CUDA graphs")
    against: bool = option(False, "also time the paper's algorithm as written: loops, full softmax, no compilation")
    workers: int = option(2, "worker processes of the baseline DataLoader, for --against", ge=0, needs="against")
    profile: str | None = option(None, "write the time of each kernel to this text file")
