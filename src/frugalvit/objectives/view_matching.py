"""View matching: the student predicts the teacher's distribution for another crop of the image.

EsViT (Li et al., 2022) section 2.2, after DINO (Caron et al., 2021). With the set P of pairs (student crop s, teacher
crop t), s ≠ t,

    L_V = 1/|P| Σ_{(s,t) in P} M_V(s, t),   M_V = -p_t · log p_s       (1; the print has p_s and p_t exchanged)

    p_t = softmax((logits_t - center) / τt),   p_s = softmax(logits_s / τs),   averaged over the batch.

Since -p_t · log p_s = lse(s) - p_t · s, a student crop needs one logsumexp for all its teachers, and the mean over
teachers needs only the mean of their distributions.
"""

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
    """Return L_V over lists of logits (B, K), one per crop. The teacher's crops are the student's first, in order.

    center: (K) or (1, K)
    mixing: (B, B) per student crop, for crops mixed from several images. Row b weighs the student images that the
            teacher's image b should match; the identity gives the plain loss
    """
    pairs = count_pairs(len(student_logits), len(teacher_logits))
    axes, batch, width = max(2, student_logits[0].ndim), len(student_logits[0]), student_logits[0].shape[-1]
    for name, crops in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        check_crops(name, crops, axes, batch, width, axis=-1)
    with torch.autocast(student_logits[0].device.type, enabled=False), torch.no_grad():
        targets = [teacher_probs(logits, center, teacher_temp) for logits in teacher_logits]
    loss = student_logits[0].new_zeros((), dtype=torch.float32)
    for crop, logits in enumerate(student_logits):
        others = [targets[t] for t in teachers_of(crop, len(targets))]
        if not others:
            continue
        target = sum(others[1:], start=others[0])  # Σ_t p_t
        if mixing is not None:
            target = mixing[crop].to(target).mT @ target
        loss = loss + cross_entropy(logits, target, student_temp).mean()
    return loss / pairs


class ViewMatching(Matching):
    """L_V on ``Features.pooled``; ``dim`` is ``backbone.pooled_dim``. See :class:`Matching` for the options."""

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
