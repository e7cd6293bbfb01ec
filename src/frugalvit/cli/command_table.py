"""Every command there is: one row per verb, with the place of its configuration and of its function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A command: its words, where its configuration and its function live, and one line of help."""

    words: str
    config: str
    function: str
    help: str
    several: bool = False
    """Whether it uses the processes that torchrun or srun has started; only the first stays for the other commands."""


VERBS = [
    Verb(
        "demo",
        "frugalvit.config.compare:DemoConfig",
        "frugalvit.cli.demo:demo",
        "a small transformer on embedded images, with and without Drloc: minutes on two cores",
    ),
    Verb("data", "frugalvit.config.data:DataConfig", "frugalvit.data.inspect:command", "what is in a dataset"),
    Verb(
        "data pack",
        "frugalvit.config.data:PackConfig",
        "frugalvit.data.webdataset.pack:command",
        "write a dataset as WebDataset shards",
    ),
    Verb(
        "train",
        "frugalvit.config.train:TrainConfig",
        "frugalvit.tasks.classification.train:train",
        "train a classifier from scratch or fine-tune one, with Drloc",
        several=True,
    ),
    Verb(
        "pretrain",
        "frugalvit.config.pretrain:PretrainConfig",
        "frugalvit.tasks.pretraining.train:pretrain",
        "learn features without labels, by views and regions (EsViT)",
        several=True,
    ),
    Verb(
        "compare",
        "frugalvit.config.compare:CompareConfig",
        "frugalvit.comparison.compare:compare",
        "two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "replay",
        "frugalvit.config.train:ReplayConfig",
        "frugalvit.cli.replay:replay",
        "run a failed step again and name its first bad tensor",
    ),
    Verb(
        "predict",
        "frugalvit.config.train:PredictConfig",
        "frugalvit.tasks.classification.predict:predict",
        "the classes of images",
    ),
    Verb(
        "eval",
        "frugalvit.config.probe:EvalConfig",
        "frugalvit.tasks.classification.evaluate:evaluate",
        "how often a trained classifier is right on labelled images, and where it is not",
    ),
    Verb(
        "look correspond",
        "frugalvit.config.tools:CorrespondConfig",
        "frugalvit.cli.look:correspond",
        "which regions of two views match, and how often right",
    ),
    Verb(
        "look attend",
        "frugalvit.config.tools:AttendConfig",
        "frugalvit.cli.look:attend",
        "where each head of the last block looks from one place",
    ),
    Verb(
        "look explore",
        "frugalvit.config.tools:ExploreConfig",
        "frugalvit.cli.look:explore",
        "one page to click through similarities and attention",
    ),
    Verb(
        "report",
        "frugalvit.config.tools:ReportConfig",
        "frugalvit.cli.look:report",
        "one page about one or several runs",
    ),
    Verb(
        "probe knn",
        "frugalvit.config.probe:KnnConfig",
        "frugalvit.probing.commands:knn",
        "votes of the nearest training images on frozen features",
    ),
    Verb(
        "probe linear",
        "frugalvit.config.probe:LinearConfig",
        "frugalvit.probing.commands:linear",
        "a linear classifier on frozen features, by SGD",
    ),
    Verb(
        "probe logistic",
        "frugalvit.config.probe:LogisticConfig",
        "frugalvit.probing.commands:logistic",
        "logistic regression on frozen features, regularisation searched",
    ),
    Verb(
        "probe suite",
        "frugalvit.config.probe:SuiteConfig",
        "frugalvit.probing.suite:suite",
        "the 18 datasets of EsViT's Table 9, as far as they are here",
    ),
    Verb(
        "embed",
        "frugalvit.config.probe:EmbedConfig",
        "frugalvit.embedding.embed:embed",
        "features of images in a file; neighbours, what to label next, near duplicates",
    ),
    Verb(
        "bench",
        "frugalvit.config.probe:BenchConfig",
        "frugalvit.benchmarking.inference:bench",
        "parameters, GFLOPs, images/s and memory, relative to ViT-B",
    ),
    Verb(
        "bench step",
        "frugalvit.config.probe:BenchStepConfig",
        "frugalvit.benchmarking.train_step:bench_step",
        "a whole training step: images/s, memory, share of the device's matrix rate",
    ),
    Verb(
        "detect train",
        "frugalvit.config.dense:DetectConfig",
        "frugalvit.tasks.detection.commands:train",
        "boxes and masks: Mask R-CNN or Cascade Mask R-CNN on any backbone",
        several=True,
    ),
    Verb(
        "detect compare",
        "frugalvit.config.dense:DetectCompareConfig",
        "frugalvit.comparison.dense:detect",
        "detectors under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "detect eval",
        "frugalvit.config.dense:DetectEvalConfig",
        "frugalvit.tasks.detection.commands:evaluate",
        "COCO AP of a trained detector",
    ),
    Verb(
        "detect predict",
        "frugalvit.config.dense:DetectPredictConfig",
        "frugalvit.tasks.detection.commands:predict",
        "objects in images, as pictures and COCO JSON",
    ),
    Verb(
        "segment train",
        "frugalvit.config.dense:SegmentConfig",
        "frugalvit.tasks.segmentation.commands:train",
        "a class for every pixel: UperNet on any backbone",
        several=True,
    ),
    Verb(
        "segment compare",
        "frugalvit.config.dense:SegmentCompareConfig",
        "frugalvit.comparison.dense:segment",
        "segmenters under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "segment eval",
        "frugalvit.config.dense:SegmentEvalConfig",
        "frugalvit.tasks.segmentation.commands:evaluate",
        "mIoU of a trained segmenter",
    ),
    Verb(
        "segment predict",
        "frugalvit.config.dense:SegmentPredictConfig",
        "frugalvit.tasks.segmentation.commands:predict",
        "a class for every pixel of images, as masks and pictures",
    ),
    Verb(
        "export",
        "frugalvit.config.tools:ExportConfig",
        "frugalvit.export:export",
        "a model for timm, the Hugging Face hub, ONNX or torch.export, checked",
    ),
    Verb(
        "advise",
        "frugalvit.config.tools:AdviseConfig",
        "frugalvit.cli.advise:advise",
        "what to do with a dataset on this machine, why, and how long it takes",
    ),
    Verb(
        "doctor",
        "frugalvit.config.tools:DoctorConfig",
        "frugalvit.cli.doctor:doctor",
        "versions, devices, what is missing, what the caches take",
    ),
    Verb(
        "completion",
        "frugalvit.config.tools:CompletionConfig",
        "frugalvit.cli.completion:completion",
        "a script that completes commands and options in bash, zsh or fish",
    ),
    Verb(
        "reproduce",
        "frugalvit.config.tools:ReproduceConfig",
        "frugalvit.reproduce:reproduce",
        "rerun a table of docs/RESULTS.md",
    ),
    Verb(
        "list models",
        "frugalvit.config.tools:ModelsConfig",
        "frugalvit.cli.list_command:models",
        "backbones, with parameters, grid and input size",
    ),
    Verb(
        "list datasets",
        "frugalvit.config.tools:DatasetsConfig",
        "frugalvit.cli.list_command:datasets",
        "datasets known by name, and where they stand",
    ),
    Verb(
        "list recipes",
        "frugalvit.config.tools:RecipesConfig",
        "frugalvit.cli.list_command:recipes",
        "named settings for train, pretrain, detect and segment",
    ),
]
