"""Pre-training as in EsViT's Algorithm 1: a loop over pairs of crops, with every softmax in full.

The baseline of ``frugalvit bench step --against``, and an oracle for the fast losses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.data.loader import Batch
from frugalvit.features import Features
from frugalvit.objectives.esvit import Matching
from frugalvit.tasks.pretraining.task import PretrainingTask


class ReferencePretrainingTask(PretrainingTask):
    """The same student, teacher and heads as ``PretrainingTask``; only the losses are computed differently."""

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        crops: list[Tensor] = batch.images  # type: ignore[assignment]
        large, small = crops[: self.global_crops], crops[self.global_crops :]
        with torch.no_grad():
            teacher = _split_by_crop(self.teacher(torch.cat(large)), large)
        student = [
            part for group in (large, small) if group for part in _split_by_crop(self.student(torch.cat(group)), group)
        ]
        temperature = self.teacher_temp.at(step)
        total = crops[0].new_zeros(())
        for level, weight, is_region in ((self.views, self.weights[0], False), (self.regions, self.weights[1], True)):
            if level is not None:
                total = total + weight * _pair_loss(level, student, teacher, temperature, is_region)
        return {"loss": total}


def _pair_loss(
    level: Matching, student: list[Features], teacher: list[Features], temperature: float, is_region: bool
) -> Tensor:
    rows = (lambda f: f.grid.flatten(2).mT) if is_region else (lambda f: f.pooled[:, None])
    logits = [level.student(rows(crop)) for crop in student]
    with torch.no_grad():
        bottlenecks = [level.teacher.project(rows(crop)) for crop in teacher]
        outputs = [F.linear(vectors, level.teacher.weight()) for vectors in bottlenecks]
        targets = [((output.float() - level.center) / temperature).softmax(-1) for output in outputs]
        level.accumulate_center(torch.cat(bottlenecks, 1))
    losses = []
    for t, target in enumerate(targets):
        for s, output in enumerate(logits):
            if s == t:
                continue
            matched = target
            if is_region:
                ours, theirs = (F.normalize(rows(crop).detach().float(), dim=-1) for crop in (student[s], teacher[t]))
                best = (ours @ theirs.mT).argmax(-1)  # (B, T)
                matched = target.gather(1, best[..., None].expand(-1, -1, target.shape[-1]))
            losses.append((-matched * (output.float() / level.student_temp).log_softmax(-1)).sum(-1).mean())
    return torch.stack(losses).mean()


def _split_by_crop(features: Features, crops: list[Tensor]) -> list[Features]:
    parts = zip(features.grid.chunk(len(crops)), features.pooled.chunk(len(crops)), strict=True)
    return [Features(grid, pooled) for grid, pooled in parts]
