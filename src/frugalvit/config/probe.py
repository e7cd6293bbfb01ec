"""Options of ``frugalvit probe``, ``embed`` and ``bench``."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.types import (
    LABEL_PART,
    MIRROR,
    ROOT,
    Auto,
    Count,
    Device,
    Labelling,
    LabelPart,
    Positive,
    Precision,
    Seed,
    Side,
    Strength,
)

# What the probes take where nothing is said, here and when they are called from Python.
KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
WEIGHT_DECAYS = (0.0,)
EPOCHS = 100
BATCH = 256
MAX_ITERATIONS = 1000


_FEATURES = "pooled, or the last blocks' token means (of a ViT its class tokens)"


_WEIGHTS = "decides the random weights of a model that is a name alone"


class LookConfig(Config):
    """How a model looks at images."""

    img_size: Side | tuple[Side, Side] | None = option(
        None, "input size in pixels, or height,width; default: the model's"
    )
    batch: int = option(64, "images at once", ge=1)
    device: Device = option("auto", "where to compute")
    precision: Precision = option("auto", "auto: bf16 where the hardware has it")
    workers: int | Auto = option("auto", "threads that decode images")
    cache: bool = option(True, "keep features on disk and use those of an earlier call")


class ExtractConfig(LookConfig):
    """How features are taken from a model."""

    backbone: str | None = option(None, "the architecture of a bare checkpoint")
    seed: Seed = option(0, "decides splits that have to be made, and all that is random")


class EvalConfig(LookConfig):
    """How often a trained classifier is right on labelled images, and what it takes for what."""

    model: str = option(help="a run, one of its checkpoints, or an exported folder", positional=True)
    data: str = option(help="folder, CSV/JSONL, dataset name, hf:…, or WebDataset shards", positional=True)
    root: str | None = option(None, ROOT)
    classes: str | None = option(None, "keep only the images of the classes in this file, one name per line")
    split: Literal["auto", "all", "train", "val", "test"] = option(
        "auto", "which images; auto: test, else val, else all there are"
    )
    mirror: bool = option(False, MIRROR)
    out: str | None = option(None, "a CSV file for the answer to every image", short="-o")


class FeaturesConfig(ExtractConfig):
    """Which features are taken from a model."""

    features: Literal["pooled", "last_blocks"] = option("pooled", _FEATURES)
    blocks: int = option(4, "how many last blocks, where features are last_blocks", ge=1)

    @pydantic.model_validator(mode="after")
    def _blocks_of_last_blocks(self) -> Self:
        """An option that would do nothing is refused."""
        if self.features != "last_blocks" and "blocks" in self.model_fields_set:
            raise ValueError("--blocks is of --features last_blocks: give that too, or leave it out")
        return self


class ProbeConfig(FeaturesConfig):
    """What every probe of one dataset takes."""

    model: str = option(help="run folder, checkpoint, exported folder or model name", positional=True)
    data: str = option(help="folder, CSV/JSONL, dataset name, hf:…, or WebDataset shards", positional=True)
    root: str | None = option(None, ROOT)
    labels: LabelPart = option(1.0, f"{LABEL_PART}; val's count among them, --seed decides which")


class KnnConfig(ProbeConfig):
    """Weighted votes of the k nearest training images, or of train and val together where a test split is scored."""

    seed: Seed = option(0, f"{_WEIGHTS}, and which labels --labels takes")
    ks: list[Count] = option(list(KS), "numbers of neighbours, all from one pass")
    temperature: float = option(TEMPERATURE, "votes weigh exp(cosine / temperature)", gt=0)


class LinearConfig(ProbeConfig):
    """A linear classifier by SGD, several learning rates at once, the best on validation images."""

    lrs: list[Positive] = option(list(LEARNING_RATES), "learning rates (x batch / 256)")
    weight_decays: list[Strength] = option(list(WEIGHT_DECAYS), "weight decays, each with every learning rate")
    epochs: int = option(EPOCHS, "passes over the training features", ge=1)
    probe_batch: int = option(BATCH, "features a step", ge=1)
    views: int = option(
        0, "augmented views (random resized crop, flip) of every training image; 0: the centre crop", ge=0
    )
    features: Literal["pooled", "last_blocks"] = option("last_blocks", _FEATURES)
    val_fraction: float = option(0.2, "share of train held out where there is no validation split", gt=0, lt=1)


class LogisticConfig(ProbeConfig):
    """Logistic regression by L-BFGS, λ searched on validation images."""

    max_iterations: int = option(MAX_ITERATIONS, "of L-BFGS, for every λ", ge=1)
    val_fraction: float = option(0.2, "share of train held out where there is no validation split", gt=0, lt=1)


class SuiteConfig(ExtractConfig):
    """Logistic regression on the 18 datasets of EsViT's Table 9, as far as they are here."""

    model: str = option(help="run folder, checkpoint, exported folder or model name", positional=True)
    against: str | None = option(None, "a second model: count the datasets on which the first one wins")
    root: str | None = option(None, ROOT)
    datasets: list[str] = option([], "only these of the 18 (default: all that are present)")
    own: list[str] = option([], "further datasets: folders, tables or names")
    download: bool = option(False, "fetch the datasets that can be downloaded")
    out: str = option("suite", "folder of the results; a dataset already there is not computed again", short="-o")
    val_fraction: float = option(0.2, "share of train held out where there is no validation split", gt=0, lt=1)
    max_iterations: int = option(MAX_ITERATIONS, "of L-BFGS, for every λ", ge=1)


class EmbedConfig(FeaturesConfig):
    """The features of images in a file, the nearest neighbours of one, what to label next, and near duplicates."""

    model: str = option(help="run folder, checkpoint, exported folder or model name", positional=True)
    data: str = option(help="folder, CSV/JSONL, dataset name, hf:…, or WebDataset shards", positional=True)
    out: str | None = option(
        None, "features.npz or features.parquet; to_label.csv or duplicates.csv where those are asked for", short="-o"
    )
    root: str | None = option(None, ROOT)
    split: Literal["all", "train", "val", "test"] = option(
        "all",
        "which images; a val that is not there is the one that train makes by itself; "
        "without this --select leaves val and test out",
    )
    seed: Seed = option(0, f"{_WEIGHTS}, and the samples of --select where images are very many")
    labels: Labelling = option("auto", "folders: folder names are classes; ignore: no labels")
    features: Literal["pooled", "last_blocks", "grid"] = option(  # type: ignore[assignment]
        "pooled", "pooled, last_blocks, or the grid of tokens"
    )
    neighbours: str | None = option(None, "an image file: draw its nearest neighbours")
    count: int = option(10, "how many neighbours", ge=1)
    select: int | None = option(
        None, "so many images that stand for the others best, to be labelled, as a table and a picture", ge=1
    )
    known: str | None = option(None, "a table or folder of images that are labelled already: select others")
    duplicates: float | None = option(None, "group images whose cosine is at least this, e.g. 0.98", gt=0, le=1)
    picture: str | None = option(None, "where the picture goes; default: neighbours.png, or beside the table")

    @pydantic.model_validator(mode="after")
    def _one_thing_at_a_time(self) -> Self:
        """Each of these writes a file of its own kind."""
        asked = [name for name in ("neighbours", "select", "duplicates") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"--{asked[0]} and --{asked[1]} are two questions: ask one at a time")
        if self.known is not None and self.select is None:
            raise ValueError("--known is of --select, which takes other images than those: give that too")
        if "picture" in self.model_fields_set and not asked:
            raise ValueError("--picture is of --neighbours, --select or --duplicates: features alone have none")
        if "count" in self.model_fields_set and self.neighbours is None:
            raise ValueError("--count is of --neighbours: give an image, or leave it out")
        return self


class BenchConfig(Config):
    """Parameters, GFLOPs, images/s and memory of models, relative to ViT-B (EsViT, Table 7 and Fig. 1)."""

    models: list[str] = option(help="run folders, exported folders or model names", positional=True)
    img_size: Side | tuple[Side, Side] | None = option(None, "input size in pixels; default: each model's own")
    batch: Count | Auto = option("auto", "images at once; auto: 64 on a GPU, 8 elsewhere")
    steps: int = option(20, "timed passes; the median counts", ge=1)
    device: Device = option("auto", "where to compute")
    precision: Precision = option("auto", "auto: bf16 where the hardware has it")
    compile: bool = option(False, "torch.compile the models first")
    reference: str | None = option("vit_base", "the model that throughput is relative to; none: no such column")
    plot: str | None = option(None, "accuracy against throughput over the runs given (Fig. 1): a .png, .svg or .pdf")


class BenchStepConfig(Config):
    """A whole training step, input to moving average: images/s, memory, and how much of the device it uses."""

    kind: Literal["train", "pretrain"] = option(help="train: supervised; pretrain: EsViT", positional=True)
    data: str | None = option(None, "images to use; default: random ones")
    backbone: str = option("swin_tiny_w7", "model name")
    img_size: int = option(224, "input size in pixels", ge=8)
    batch: int = option(64, "images a step", ge=2)
    prototypes: int = option(65536, "of each head, in pre-training", ge=2)
    localization: float = option(0.5, "λ of the localization loss in supervised training; 0: without", ge=0)
    steps: int = option(30, "timed steps; the median of groups of five counts", ge=5)
    device: Device = option("auto", "where to compute")
    precision: Precision = option("auto", "auto: bf16 where the hardware has it")
    compile: bool | Literal["auto", "graphs"] = option(
        "auto",
        "torch.compile the step, on a GPU; graphs: replay it as CUDA graphs; auto: as a long run would",
    )
    against: bool = option(False, "time the paper's algorithm as written, too: loops, full softmax, no compiling")
    workers: int = option(2, "worker processes of the usual DataLoader that --against compares the input with", ge=0)
    profile: str | None = option(None, "write where the time goes, by kernel, into this text file")

    @pydantic.model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        """An option that would do nothing is refused."""
        for name, kind in (("localization", "train"), ("prototypes", "pretrain")):
            if self.kind != kind and name in self.model_fields_set:
                raise ValueError(f"--{name} is of 'bench step {kind}', not of '{self.kind}'; leave it out")
        if not self.against and "workers" in self.model_fields_set:
            raise ValueError("--workers is of the usual input, which --against compares with: give that too")
        return self
