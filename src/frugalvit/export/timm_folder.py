"""Export to a folder that timm loads, with a model card for the Hugging Face hub."""

from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from frugalvit.backbones.knn_head import KnnHead
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import save_calibration
from frugalvit.export.format import ExportFormat, ExportJob, Run
from frugalvit.export.model_card import write_card
from frugalvit.runs.run_folder import read_summary


class TimmFolder(ExportFormat):
    """--to timm: model.safetensors and config.json."""

    def write(self, job: ExportJob) -> tuple[nn.Module, Run]:
        if any(isinstance(layer, KnnHead) for layer in job.model.backbone.model.modules()):
            raise UserError("timm has no k-NN classifier. Use --to onnx, or save a 'frugalvit probe logistic'.")
        save_model_folder(job.model.backbone, job.folder, classes=job.model.classes, meta=job.meta)
        save_calibration(job.model.calibration, job.folder)
        return job.model, _load_with_timm(job.folder)


class HubFolder(TimmFolder):
    """--to hf: the same with a model card, README.md."""

    options = frozenset({"license"})

    def write(self, job: ExportJob) -> tuple[nn.Module, Run]:
        written = super().write(job)
        write_card(job, read_summary(Path(job.config.model)) or {})
        return written


def _load_with_timm(folder: Path) -> Run:
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"timm cannot load this model: {' '.join(str(error).split())[:200]}.") from error

    def run(images: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return [model(images)]

    return run
