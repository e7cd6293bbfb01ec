"""Label propagation: the labels of a few images spread to the images that look like them.

    Z = SPREAD · S Z + Y

with S the normalized graph of nearest neighbours and Y the known labels (Zhou et al., "Learning
with Local and Global Consistency", 2004). Then each class gets the share that it has of the labels, so that a frequent
neighbour does not take all (Zhu et al. 2003).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

UNKNOWN = -1  # the label of an image whose class nobody knows
NEIGHBOURS = 10
POWER = 3.0  # an edge weighs cosine ** POWER
SPREAD = 0.9  # how much of its neighbours' labels an image takes over
ITERATIONS = 60  # SPREAD ** 60 < 0.2 %
_ROWS = 1024  # images compared with all others at a time


def guess_labels(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest label (N,) of every image, and the weights (N,) that they deserve in a loss.

    The weight of a guess is its share squared; that of a known label is 1. Certainty as a weight is from Iscen et al.,
    "Label Propagation for Deep Semi-supervised Learning", 2019, where entropy measures it.
    """
    certainty, guess = propagate_labels(features, labels, classes).max(1)
    known = labels != UNKNOWN
    return torch.where(known, labels, guess), torch.where(known, 1.0, certainty.square())


@torch.no_grad()
@torch.sparse.check_sparse_tensor_invariants(False)  # without a word: the graph is valid by construction
def propagate_labels(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Spread the labels (N,), UNKNOWN where nobody knows, over the features (N, D).

    Returns the shares of the classes (N, classes); each row sums to one. Known labels stay. An image that no label
    reaches gets the shares of the known labels.
    """
    known = labels != UNKNOWN
    given = features.new_zeros(len(features), classes)
    given[known, labels[known]] = 1
    graph, spread = _neighbour_graph(features), given
    for _ in range(ITERATIONS):
        spread = torch.addmm(given, graph, spread, alpha=SPREAD)
    prior = given.sum(0) / given.sum()
    shares = spread * (prior / spread.sum(0).clamp_min(torch.finfo(spread.dtype).tiny))
    total = shares.sum(1, keepdim=True)
    shares = torch.where(total > 0, shares / total.clamp_min(torch.finfo(shares.dtype).tiny), prior)
    shares[known] = given[known]
    return shares


def _neighbour_graph(features: Tensor) -> Tensor:
    """Return the symmetric normalized graph D^-1/2 (W + Wᵀ) D^-1/2 of nearest neighbours, sparse (N, N)."""
    unit, count = F.normalize(features - features.mean(0), dim=1), len(features)
    near = min(NEIGHBOURS, count - 1)
    cosines, columns = [], []
    for start in range(0, count, _ROWS):
        similarity = unit[start : start + _ROWS] @ unit.T
        similarity.diagonal(start).fill_(-1)  # an image is not its own neighbour
        best = similarity.topk(near, dim=1)
        cosines.append(best.values)
        columns.append(best.indices)
    weight = torch.cat(cosines).clamp_min(0).pow(POWER).flatten()
    one = torch.arange(count, device=features.device).repeat_interleave(near)
    other = torch.cat(columns).flatten()
    ends = torch.stack([torch.cat([one, other]), torch.cat([other, one])])
    weight = weight.repeat(2)
    degree = weight.new_zeros(count).index_add_(0, ends[0], weight).clamp_min(torch.finfo(weight.dtype).tiny)
    weight = weight * (degree[ends[0]] * degree[ends[1]]).rsqrt()
    return torch.sparse_coo_tensor(ends, weight, (count, count)).coalesce()
