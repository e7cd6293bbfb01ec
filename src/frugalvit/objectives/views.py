"""View level: the student must say of its crop what the teacher says of another crop of the same image.

EsViT (Li et al., 2022) section 2.2, after DINO (Caron et al., 2021). With the set P of pairs (student crop s, teacher
crop t), s ≠ t,

    L_V = 1/|P| Σ_{(s,t) in P} M_V(s, t),   M_V = -p_t · log p_s       (1; the print has p_s and p_t exchanged)

    p_t = softmax((logits_t - centre) / τt),   p_s = softmax(logits_s / τs),   averaged over the batch.

Since -p_t · log p_s = lse(s) - p_t · s, one logsumexp serves a student crop against all its teachers, and their mean
over teachers needs only the mean of the teachers' distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from frugalvit.features import Features
from frugalvit.objectives.checks import check_crops
from frugalvit.objectives.matching import Matching, count_pairs, cross_entropy, teacher_probs, teachers_of


def view_loss(
    student_logits: Sequence[Tensor],
    teacher_logits: Sequence[Tensor],
    *,
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
    mixing: Sequence[Tensor] | None = None,
) -> Tensor:
    """L_V over lists of logits (B, K), one per crop; the teacher's crops are the first of the student's, in order.

    center (K) or (1, K). ``mixing`` (B, B) per student crop weighs the images a mixed-up crop shows: its row b says
    how much of every student image the teacher's image b should match; the identity is the plain loss.
    """
    pairs = count_pairs(len(student_logits), len(teacher_logits))
    axes, batch, width = max(2, student_logits[0].ndim), len(student_logits[0]), student_logits[0].shape[-1]
    for what, crops in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        check_crops(what, crops, axes, batch, width, axis=-1)
    with torch.autocast(student_logits[0].device.type, enabled=False), torch.no_grad():
        targets = [teacher_probs(logits, center, teacher_temp) for logits in teacher_logits]
    loss = student_logits[0].new_zeros((), dtype=torch.float32)
    for crop, logits in enumerate(student_logits):
        chosen = [targets[t] for t in teachers_of(crop, len(targets))]
        if not chosen:
            continue
        target = sum(chosen[1:], start=chosen[0])  # Σ_t p_t
        if mixing is not None:
            target = mixing[crop].to(target).mT @ target
        loss = loss + cross_entropy(logits, target, student_temp).mean()
    return loss / pairs


class ViewMatching(Matching):
    """L_V on ``Features.pooled``, whose width (``backbone.pooled_dim``) ``dim`` is; see :class:`Matching`."""

    level = "pooled"

    def _rows(self, features: Features) -> Tensor:
        return features.pooled[:, None]

    def _plain_loss(
        self,
        student_logits: Sequence[Tensor],
        teacher_logits: Sequence[Tensor],
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor,
    ) -> Tensor:
        return view_loss(
            [logits[:, 0] for logits in student_logits],
            [logits[:, 0] for logits in teacher_logits],
            center=self.center,
            student_temp=self.student_temp,
            teacher_temp=teacher_temp,
        )

    @torch.no_grad()
    def assignment(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> Tensor:
        pooled = student_features[0].pooled
        students, teachers = len(student_features), len(teacher_features)
        precise = {"dtype": torch.promote_types(pooled.dtype, torch.float32), "device": pooled.device}
        different = torch.ones(students, teachers, **precise) - torch.eye(students, teachers, **precise)
        different /= len(pooled) * count_pairs(students, teachers)
        return different.expand(len(pooled), -1, -1)
