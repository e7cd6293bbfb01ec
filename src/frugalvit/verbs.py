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
        "frugalvit.training.demo:demo",
        "a small transformer on embedded images, with and without Drloc: minutes on two cores",
    ),
    Verb("data", "frugalvit.config.inspect:DataConfig", "frugalvit.data.inspect:command", "what is in a dataset"),
    Verb(
        "data pack",
        "frugalvit.config.inspect:PackConfig",
        "frugalvit.data.pack:command",
        "write a dataset as WebDataset shards",
    ),
    Verb(
        "train",
        "frugalvit.config.train:TrainConfig",
        "frugalvit.training.commands:train",
        "train a classifier from scratch or fine-tune one, with Drloc",
        several=True,
    ),
    Verb(
        "pretrain",
        "frugalvit.config.pretrain:PretrainConfig",
        "frugalvit.training.pretrain:pretrain",
        "learn features without labels, by views and regions (EsViT)",
        several=True,
    ),
    Verb(
        "compare",
        "frugalvit.config.compare:CompareConfig",
        "frugalvit.training.compare:compare",
        "two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "replay",
        "frugalvit.config.train:ReplayConfig",
        "frugalvit.training.replay:replay",
        "run a failed step again and name its first bad tensor",
    ),
    Verb(
        "predict",
        "frugalvit.config.train:PredictConfig",
        "frugalvit.training.predict:predict",
        "the classes of images",
    ),
    Verb(
        "eval",
        "frugalvit.config.probe:EvalConfig",
        "frugalvit.probing.evaluate:evaluate",
        "how often a trained classifier is right on labelled images, and where it is not",
    ),
    Verb(
        "look correspond",
        "frugalvit.config.look:CorrespondConfig",
        "frugalvit.report.commands:correspond",
        "which regions of two views match, and how often right",
    ),
    Verb(
        "look attend",
        "frugalvit.config.look:AttendConfig",
        "frugalvit.report.commands:attend",
        "where each head of the last block looks from one place",
    ),
    Verb(
        "look explore",
        "frugalvit.config.look:ExploreConfig",
        "frugalvit.report.commands:explore",
        "one page to click through similarities and attention",
    ),
    Verb(
        "report",
        "frugalvit.config.look:ReportConfig",
        "frugalvit.report.commands:report",
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
        "frugalvit.probing.embed:embed",
        "features of images in a file; neighbours, what to label next, near duplicates",
    ),
    Verb(
        "bench",
        "frugalvit.config.probe:BenchConfig",
        "frugalvit.probing.bench:bench",
        "parameters, GFLOPs, images/s and memory, relative to ViT-B",
    ),
    Verb(
        "bench step",
        "frugalvit.config.probe:BenchStepConfig",
        "frugalvit.training.stepbench:bench_step",
        "a whole training step: images/s, memory, share of the device's matrix rate",
    ),
    Verb(
        "detect train",
        "frugalvit.config.transfer:DetectConfig",
        "frugalvit.transfer.detect_commands:train",
        "boxes and masks: Mask R-CNN or Cascade Mask R-CNN on any backbone",
        several=True,
    ),
    Verb(
        "detect compare",
        "frugalvit.config.transfer:DetectCompareConfig",
        "frugalvit.transfer.comparing:detect",
        "detectors under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "detect eval",
        "frugalvit.config.transfer:DetectEvalConfig",
        "frugalvit.transfer.detect_commands:evaluate",
        "COCO AP of a trained detector",
    ),
    Verb(
        "detect predict",
        "frugalvit.config.transfer:DetectPredictConfig",
        "frugalvit.transfer.detect_commands:predict",
        "objects in images, as pictures and COCO JSON",
    ),
    Verb(
        "segment train",
        "frugalvit.config.transfer:SegmentConfig",
        "frugalvit.transfer.segment_commands:train",
        "a class for every pixel: UperNet on any backbone",
        several=True,
    ),
    Verb(
        "segment compare",
        "frugalvit.config.transfer:SegmentCompareConfig",
        "frugalvit.transfer.comparing:segment",
        "segmenters under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "segment eval",
        "frugalvit.config.transfer:SegmentEvalConfig",
        "frugalvit.transfer.segment_commands:evaluate",
        "mIoU of a trained segmenter",
    ),
    Verb(
        "segment predict",
        "frugalvit.config.transfer:SegmentPredictConfig",
        "frugalvit.transfer.segment_commands:predict",
        "a class for every pixel of images, as masks and pictures",
    ),
    Verb(
        "export",
        "frugalvit.config.export:ExportConfig",
        "frugalvit.export:export",
        "a model for timm, the Hugging Face hub, ONNX or torch.export, checked",
    ),
    Verb(
        "advise",
        "frugalvit.config.product:AdviseConfig",
        "frugalvit.advise:advise",
        "what to do with a dataset on this machine, why, and how long it takes",
    ),
    Verb(
        "doctor",
        "frugalvit.config.product:DoctorConfig",
        "frugalvit.doctor:doctor",
        "versions, devices, what is missing, what the caches take",
    ),
    Verb(
        "completion",
        "frugalvit.config.product:CompletionConfig",
        "frugalvit.completion:completion",
        "a script that completes commands and options in bash, zsh or fish",
    ),
    Verb(
        "reproduce",
        "frugalvit.config.reproduce:ReproduceConfig",
        "frugalvit.reproduce:reproduce",
        "rerun a table of docs/RESULTS.md",
    ),
    Verb(
        "list models",
        "frugalvit.config.listing:ModelsConfig",
        "frugalvit.listing:models",
        "backbones, with parameters, grid and input size",
    ),
    Verb(
        "list datasets",
        "frugalvit.config.listing:DatasetsConfig",
        "frugalvit.listing:datasets",
        "datasets known by name, and where they stand",
    ),
    Verb(
        "list recipes",
        "frugalvit.config.listing:RecipesConfig",
        "frugalvit.listing:recipes",
        "named settings for train, pretrain, detect and segment",
    ),
]
