"""Instance classification: every image is a class of its own, so that no labels are needed.

Exemplar-CNN (Dosovitskiy et al. 2014, arXiv:1406.6909) and IDMM, which pre-trains transformers on 2,040 flowers
(Cao et al. 2022, arXiv:2201.10728). A classifier over N images suits small data: it has N weights per feature.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.features import Features


class InstanceClassification(nn.Module):
    """L = -Σ_n q_n · log softmax(W z + b)_n, for the pooled features z of one view of an image.

    dim:    width of z
    images: N, the number of training images
    """

    def __init__(self, dim: int, images: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(dim, images)

    def forward(self, features: Features, targets: Tensor) -> Tensor:
        """Return the mean loss. targets: the image numbers (B,), or q (B, N) of mixed views with smoothed targets."""
        return F.cross_entropy(self.classifier(features.pooled).float(), targets)
