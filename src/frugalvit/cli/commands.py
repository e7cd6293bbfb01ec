"""COMMANDS: one line per command, with its configuration, its function and its help."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frugalvit.probing.registry import PROBES
from frugalvit.utils.checkout import import_benchmark

if TYPE_CHECKING:
    from frugalvit.config.base import Config


@dataclass(frozen=True)
class Command:
    """One command. Its configuration and its function are imported when it is called."""

    name: str
    config: str
    function: str
    help: str
    distributed: bool = False
    """True if it uses the processes of torchrun or srun; other commands run on rank 0 alone."""

    def load_config(self) -> type[Config]:
        return pkgutil.resolve_name(f"frugalvit.config.{self.config}")

    def load_function(self) -> Callable[[Any], Any]:
        module, name = self.function.split(":")
        if module.startswith("benchmarks."):
            return getattr(import_benchmark(module.removeprefix("benchmarks.")), name)
        return pkgutil.resolve_name(f"frugalvit.{self.function}")


# fmt: off
# ruff: noqa: E501
COMMANDS = [
    Command("demo", "compare:DemoConfig", "cli.demo:demo", "learn digits from 200 labels, in minutes"),
    Command("data", "data:DataConfig", "cli.data_command:show_data", "show what a dataset holds; find wrong labels"),
    Command("data pack", "data:PackConfig", "data.webdataset.pack:command", "write a dataset as WebDataset shards"),
    Command("train", "train:TrainConfig", "tasks.classification.train:train", "train a classifier from scratch, or fine-tune one", distributed=True),
    Command("pretrain", "pretrain:PretrainConfig", "tasks.pretraining.train:pretrain", "learn features without labels, by views and regions (EsViT)", distributed=True),
    Command("distil", "distil:DistilConfig", "tasks.distillation.train:distil", "learn the features of a published network without labels", distributed=True),
    Command("pretrain compare", "compare:PretrainCompareConfig", "comparison.pretraining:compare_pretraining", "compare objectives and backbones without labels, by frozen probes", distributed=True),
    Command("compare", "compare:CompareConfig", "comparison.compare:compare", "compare two or more settings over several seeds, with a paired test", distributed=True),
    Command("predict", "train:PredictConfig", "tasks.classification.predict:predict", "classify images"),
    Command("eval", "probe:EvalConfig", "tasks.classification.evaluate:evaluate", "score a classifier on labelled images"),
    Command("look correspond", "tools:CorrespondConfig", "cli.look:correspond", "draw and score matches of two views"),
    Command("look attend", "tools:AttendConfig", "cli.look:attend", "draw the attention of each head from one point"),
    Command("look explore", "tools:ExploreConfig", "cli.look:explore", "write a page to explore similarity and attention"),
    Command("report", "tools:ReportConfig", "cli.look:report", "write one page about one or several runs"),
    *(Command(f"probe {name}", *probe) for name, probe in PROBES.items()),
    Command("embed", "probe:EmbedConfig", "embedding.embed:embed", "write features of images; find neighbours, near duplicates and images to label next"),
    Command("bench", "probe:BenchConfig", "benchmarks.inference:bench", "parameters, GFLOPs, images/s and memory, relative to ViT-B"),
    Command("bench step", "probe:BenchStepConfig", "benchmarks.train_step:bench_step", "time a full training step: images/s, memory, share of the device's matrix rate"),
    Command("detect train", "dense:DetectConfig", "tasks.detection.commands:train", "train Mask R-CNN or Cascade Mask R-CNN on any backbone", distributed=True),
    Command("detect compare", "dense:DetectCompareConfig", "comparison.compare:compare", "compare detectors over several seeds, with a paired test", distributed=True),
    Command("detect eval", "dense:DetectEvalConfig", "tasks.detection.commands:evaluate", "COCO AP of a detector"),
    Command("detect predict", "dense:DetectPredictConfig", "tasks.detection.commands:predict", "find objects in images, as pictures and COCO JSON"),
    Command("segment train", "dense:SegmentConfig", "tasks.segmentation.commands:train", "train UperNet on any backbone", distributed=True),
    Command("segment compare", "dense:SegmentCompareConfig", "comparison.compare:compare", "compare segmenters over several seeds, with a paired test", distributed=True),
    Command("segment eval", "dense:SegmentEvalConfig", "tasks.segmentation.commands:evaluate", "mIoU of a segmenter"),
    Command("segment predict", "dense:SegmentPredictConfig", "tasks.segmentation.commands:predict", "predict a class for every pixel, as masks and pictures"),
    Command("export", "tools:ExportConfig", "export.command:export", "export to timm, the Hugging Face hub, ONNX or torch.export"),
    Command("serve", "train:ServeConfig", "cli.serve:serve", "answer photos on a local web page, and as JSON"),
    Command("advise", "tools:AdviseConfig", "cli.advise:advise", "propose commands for a dataset, with expected times"),
    Command("doctor", "tools:DoctorConfig", "cli.doctor:doctor", "check versions, devices and extras"),
    Command("reproduce", "tools:ReproduceConfig", "benchmarks.reproduce:reproduce", "rerun a table of docs/RESULTS.md"),
    Command("list models", "tools:ModelsConfig", "cli.list_command:models", "backbones with parameters, grid and input size"),
    Command("list datasets", "tools:DatasetsConfig", "cli.list_command:datasets", "named datasets and their locations"),
    Command("list recipes", "tools:RecipesConfig", "cli.list_command:recipes", "named sets of values with cost and results"),
]
# fmt: on
