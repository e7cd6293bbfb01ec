"""Scores while training equal those of the probes, which are tested against scikit-learn."""

import pytest
import torch

from frugalvit.probing.metrics import classification_scores, rank_classes
from frugalvit.tasks.classification.metrics import ClassificationScores


@pytest.mark.parametrize("classes", [2, 4, 12])
def test_scores_by_batch_equal_those_of_all_images(classes: int) -> None:
    """Also if a class has no image."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes - 1, (60,), generator=generator)
    logits = torch.randn(60, classes, generator=generator) + 2 * torch.nn.functional.one_hot(labels, classes)
    scores = ClassificationScores(classes, torch.device("cpu"))
    for part in torch.arange(60).split(7):
        scores.add(logits[part], labels[part], part)
    assert scores.summary() == pytest.approx(classification_scores(rank_classes(logits), labels))
    answers = logits.argmax(1)
    for truth in range(classes):
        counts = torch.bincount(answers[labels == truth], minlength=classes)
        assert scores.confusion[truth].tolist() == counts.tolist()


def test_scores_without_images() -> None:
    assert ClassificationScores(3, torch.device("cpu")).summary() == {"top1": 0, "top5": 0, "mean_per_class": 0}
