"""Every command there is: one row per verb, with the place of its configuration and of its function."""

from __future__ import annotations

from dataclasses import dataclass

from frugalvit.probing.registry import PROBES


@dataclass(frozen=True)
class Command:
    """A command: its words, where its configuration and its function live, and one line of help."""

    words: str
    config: str
    function: str
    help: str
    distributed: bool = False
    """Whether it uses the processes that torchrun or srun has started; only the first stays for the other commands."""


COMMANDS = [
    Command(
        "demo",
        "frugalvit.config.compare:DemoConfig",
        "frugalvit.cli.demo:demo",
        "a small transformer on embedded images, with and without Drloc: minutes on two cores",
    ),
    Command("data", "frugalvit.config.data:DataConfig", "frugalvit.data.inspect:command", "what is in a dataset"),
    Command(
        "data pack",
        "frugalvit.config.data:PackConfig",
        "frugalvit.data.webdataset.pack:command",
        "write a dataset as WebDataset shards",
    ),
    Command(
        "train",
        "frugalvit.config.train:TrainConfig",
        "frugalvit.tasks.classification.train:train",
        "train a classifier from scratch or fine-tune one, with Drloc",
        distributed=True,
    ),
    Command(
        "pretrain",
        "frugalvit.config.pretrain:PretrainConfig",
        "frugalvit.tasks.pretraining.train:pretrain",
        "learn features without labels, by views and regions (EsViT)",
        distributed=True,
    ),
    Command(
        "compare",
        "frugalvit.config.compare:CompareConfig",
        "frugalvit.comparison.compare:compare",
        "two or more settings over several seeds, with a paired test",
        distributed=True,
    ),
    Command(
        "replay",
        "frugalvit.config.train:ReplayConfig",
        "frugalvit.cli.replay:replay",
        "run a failed step again and name its first bad tensor",
    ),
    Command(
        "predict",
        "frugalvit.config.train:PredictConfig",
        "frugalvit.tasks.classification.predict:predict",
        "the classes of images",
    ),
    Command(
        "eval",
        "frugalvit.config.probe:EvalConfig",
        "frugalvit.tasks.classification.evaluate:evaluate",
        "how often a trained classifier is right on labelled images, and where it is not",
    ),
    Command(
        "look correspond",
        "frugalvit.config.tools:CorrespondConfig",
        "frugalvit.cli.look:correspond",
        "which regions of two views match, and how often right",
    ),
    Command(
        "look attend",
        "frugalvit.config.tools:AttendConfig",
        "frugalvit.cli.look:attend",
        "where each head of the last block looks from one place",
    ),
    Command(
        "look explore",
        "frugalvit.config.tools:ExploreConfig",
        "frugalvit.cli.look:explore",
        "one page to click through similarities and attention",
    ),
    Command(
        "report",
        "frugalvit.config.tools:ReportConfig",
        "frugalvit.cli.look:report",
        "one page about one or several runs",
    ),
    *(Command(f"probe {name}", *probe) for name, probe in PROBES.items()),
    Command(
        "embed",
        "frugalvit.config.probe:EmbedConfig",
        "frugalvit.embedding.embed:embed",
        "features of images in a file; neighbours, what to label next, near duplicates",
    ),
    Command(
        "bench",
        "frugalvit.config.probe:BenchConfig",
        "frugalvit.benchmarking.inference:bench",
        "parameters, GFLOPs, images/s and memory, relative to ViT-B",
    ),
    Command(
        "bench step",
        "frugalvit.config.probe:BenchStepConfig",
        "frugalvit.benchmarking.train_step:bench_step",
        "a whole training step: images/s, memory, share of the device's matrix rate",
    ),
    Command(
        "detect train",
        "frugalvit.config.dense:DetectConfig",
        "frugalvit.tasks.detection.commands:train",
        "boxes and masks: Mask R-CNN or Cascade Mask R-CNN on any backbone",
        distributed=True,
    ),
    Command(
        "detect compare",
        "frugalvit.config.dense:DetectCompareConfig",
        "frugalvit.comparison.dense:detect",
        "detectors under two or more settings over several seeds, with a paired test",
        distributed=True,
    ),
    Command(
        "detect eval",
        "frugalvit.config.dense:DetectEvalConfig",
        "frugalvit.tasks.detection.commands:evaluate",
        "COCO AP of a trained detector",
    ),
    Command(
        "detect predict",
        "frugalvit.config.dense:DetectPredictConfig",
        "frugalvit.tasks.detection.commands:predict",
        "objects in images, as pictures and COCO JSON",
    ),
    Command(
        "segment train",
        "frugalvit.config.dense:SegmentConfig",
        "frugalvit.tasks.segmentation.commands:train",
        "a class for every pixel: UperNet on any backbone",
        distributed=True,
    ),
    Command(
        "segment compare",
        "frugalvit.config.dense:SegmentCompareConfig",
        "frugalvit.comparison.dense:segment",
        "segmenters under two or more settings over several seeds, with a paired test",
        distributed=True,
    ),
    Command(
        "segment eval",
        "frugalvit.config.dense:SegmentEvalConfig",
        "frugalvit.tasks.segmentation.commands:evaluate",
        "mIoU of a trained segmenter",
    ),
    Command(
        "segment predict",
        "frugalvit.config.dense:SegmentPredictConfig",
        "frugalvit.tasks.segmentation.commands:predict",
        "a class for every pixel of images, as masks and pictures",
    ),
    Command(
        "export",
        "frugalvit.config.tools:ExportConfig",
        "frugalvit.export.command:export",
        "a model for timm, the Hugging Face hub, ONNX or torch.export, checked",
    ),
    Command(
        "advise",
        "frugalvit.config.tools:AdviseConfig",
        "frugalvit.cli.advise:advise",
        "what to do with a dataset on this machine, why, and how long it takes",
    ),
    Command(
        "doctor",
        "frugalvit.config.tools:DoctorConfig",
        "frugalvit.cli.doctor:doctor",
        "versions, devices, what is missing, what the caches take",
    ),
    Command(
        "completion",
        "frugalvit.config.tools:CompletionConfig",
        "frugalvit.cli.completion:completion",
        "a script that completes commands and options in bash, zsh or fish",
    ),
    Command(
        "reproduce",
        "frugalvit.config.tools:ReproduceConfig",
        "frugalvit.reproduce.command:reproduce",
        "rerun a table of docs/RESULTS.md",
    ),
    Command(
        "list models",
        "frugalvit.config.tools:ModelsConfig",
        "frugalvit.cli.list_command:models",
        "backbones, with parameters, grid and input size",
    ),
    Command(
        "list datasets",
        "frugalvit.config.tools:DatasetsConfig",
        "frugalvit.cli.list_command:datasets",
        "datasets known by name, and where they stand",
    ),
    Command(
        "list recipes",
        "frugalvit.config.tools:RecipesConfig",
        "frugalvit.cli.list_command:recipes",
        "named settings for train, pretrain, detect and segment",
    ),
]
