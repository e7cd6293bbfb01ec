"""KnnHead: a classifier that compares features with those of labelled images."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_NO_VOTE = 1e-30  # the logarithm of zero votes would not be finite


class KnnHead(nn.Module):
    """Weighted k-nearest neighbours: the logarithm of each class's votes, so that softmax gives shares of votes.

    Each of the k nearest images votes for its class with weight exp(cosine / temperature).

    gallery: unit features of the labelled images (N, D);   labels: their classes (N,)
    """

    def __init__(self, images: int, dim: int, classes: int, k: int, temperature: float) -> None:
        super().__init__()
        self.k, self.temperature, self.classes = min(k, images), temperature, classes
        self.gallery = nn.Buffer(torch.zeros(images, dim))
        self.labels = nn.Buffer(torch.zeros(images, dtype=torch.long))

    def set_images(self, features: Tensor, labels: Tensor) -> None:
        """Store the features (N, D) and the classes (N,) of the labelled images."""
        self.gallery.copy_(F.normalize(features.float(), dim=1))
        self.labels.copy_(labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, classes)."""
        similarity, index = (F.normalize(pooled.float(), dim=1) @ self.gallery.T).topk(self.k, dim=1)
        weight = ((similarity - similarity[:, :1]) / self.temperature).exp()
        member = F.one_hot(self.labels[index], self.classes).to(weight)
        return (weight[:, :, None] * member).sum(1).clamp_min(_NO_VOTE).log()
