"""Clusters of similar rows on disk, for exact duplicates and for representatives of any number of rows.

FAISS learns the centroids from a sample, as for an IVF index. Each row belongs to the centroid with the largest inner
product, and the unit vectors lie on disk, cluster by cluster. Memory holds a few clusters and about 50 bytes a row.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from frugalvit.data.duplicates import connect_groups
from frugalvit.embedding.feature_table import FeatureParts
from frugalvit.embedding.select import MAX_COSINES, ROUNDING, representatives
from frugalvit.probing.knn import CELLS
from frugalvit.utils import console

_ROWS, _MAX_CLUSTERS = 4096, 16384  # mean rows of a cluster
_SAMPLES = 64  # rows a cluster that FAISS learns from
_SLACK = 1e-4  # of distances, for rounding in float32
EXACT = math.isqrt(MAX_COSINES)  # rows that ``representatives`` compares with each other


class ClusterIndex:
    """The clusters of all rows of some parts; a folder that exists holds a complete index."""

    def __init__(
        self, parts: FeatureParts, folder: Path, seed: int = 0, device: torch.device | str = "cpu", clusters: int = 0
    ) -> None:
        if not folder.exists():
            for old in folder.parent.glob("index-*"):  # of other parts
                shutil.rmtree(old)
            partial = folder.with_name(".index.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _build(parts, partial, clusters or min(_MAX_CLUSTERS, -(-len(parts) // _ROWS)), seed, device)
            partial.rename(folder)
        self.folder, self.device = folder, torch.device(device)
        self.centroids = torch.from_numpy(np.load(folder / "centroids.npy")).to(device)  # (K, D)
        self.starts = np.load(folder / "starts.npy")  # (K + 1,)
        self.order = np.load(folder / "order.npy", mmap_mode="r")  # (N,), rows by cluster
        self.block = math.isqrt(CELLS.get(self.device.type, CELLS["cpu"]))  # rows compared at a time

    def blocks(self, cluster: int, allowed: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the row numbers and unit vectors of a cluster, a block at a time; only rows of the mask (N,)."""
        for start in range(int(self.starts[cluster]), int(self.starts[cluster + 1]), self.block):
            positions = np.arange(start, min(start + self.block, int(self.starts[cluster + 1])))
            positions = positions[allowed[self.order[positions]]]
            yield torch.from_numpy(self.order[positions]), self._vectors(positions).to(self.device)

    def cosines(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the cosines of pairs of rows: (n,), (n,) -> (n,)."""
        position = np.load(self.folder / "position.npy", mmap_mode="r")  # (N,), the inverse of order
        return (self._vectors(position[left]) * self._vectors(position[right])).sum(1).clamp(max=1).numpy()

    def _vectors(self, positions: np.ndarray) -> Tensor:
        # A map that stays open would count as memory of this process.
        return torch.from_numpy(np.load(self.folder / "vectors.npy", mmap_mode="r")[positions])

    def group_duplicates(self, threshold: float, allowed: np.ndarray) -> np.ndarray:
        """Return the first row of every row's group, as ``selection.group_duplicates`` does: (N,).

        allowed: a mask (N,); the other rows are groups of their own

        For a row x of cluster a and a row y of cluster b, both margins x (μ_a - μ_b) and y (μ_b - μ_a) are at least 0,
        and their sum is (x - y)(μ_a - μ_b) <= |x - y| |μ_a - μ_b|. So rows at most r apart have margins of at most
        r |μ_a - μ_b|, and only such rows of two clusters are compared. No pair is missed.
        """
        limit = threshold - ROUNDING
        reach = math.sqrt(max(0.0, 2 - 2 * limit)) + _SLACK
        edges: list[Tensor] = []
        for cluster in console.progress(range(len(self.centroids)), label="comparing"):
            gaps = (self.centroids - self.centroids[cluster]).norm(dim=1)
            for rows, vectors in self.blocks(cluster, allowed):
                scores = vectors @ self.centroids.T
                margins = scores[:, cluster, None] - scores
                close = margins <= reach * gaps + _SLACK
                for other in (close[:, cluster:].any(0).nonzero().squeeze(1) + cluster).tolist():
                    mine = close[:, other]
                    budget = reach * gaps[other] + _SLACK - margins[mine, other].min()
                    for other_rows, others in self.blocks(other, allowed):
                        near = others @ (self.centroids[other] - self.centroids[cluster]) <= budget
                        pairs = (vectors[mine] @ others[near].T >= limit).nonzero().cpu()
                        both = torch.cat([rows[mine.cpu()], other_rows[near.cpu()]])
                        edges.append(_reduce(both, pairs[:, 0], pairs[:, 1] + int(mine.sum())))
        left, right = torch.cat([torch.zeros(2, 0, dtype=torch.int64), *edges], 1).numpy()
        count = len(self.order)
        matrix = coo_array((np.ones(len(left), bool), (left, right)), shape=(count, count))
        _, first, group = np.unique(connected_components(matrix)[1], return_index=True, return_inverse=True)
        return first[group]

    def representatives(
        self, count: int, allowed: np.ndarray, known: Tensor | None = None, *, seed: int = 0
    ) -> list[int]:
        """Choose rows that represent all ``allowed`` ones, a mask (N,), as ``selection.representatives`` does.

        Up to ``EXACT`` allowed rows the choice is the same. Of more rows, each cluster first chooses its own
        representatives, in proportion to its size; the final choice is among these.
        """
        total = int(allowed.sum())
        share = 1.0 if total <= EXACT else min(1.0, max(EXACT, 4 * count) / total)
        chosen = []
        for cluster in console.progress(range(len(self.centroids)), label="reducing"):
            for rows, vectors in self.blocks(cluster, allowed):
                if share < 1 and len(rows):
                    with console.quiet():
                        best = representatives(vectors, math.ceil(share * len(rows)), seed=seed)
                    rows, vectors = rows[best], vectors[best]
                chosen.append((rows, vectors.cpu()))
        rows, order = torch.cat([rows for rows, _ in chosen]).sort()
        vectors = torch.cat([vectors for _, vectors in chosen])[order]
        return rows[representatives(vectors, count, known, device=self.device, seed=seed)].tolist()


def _reduce(rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return at most one pair a row, (2, P), that connects the same of these rows; left, right: positions in them."""
    rows, local = torch.unique(rows, return_inverse=True)  # equal images make a pair of every two
    leaders = connect_groups(torch.arange(len(rows)), local[left], local[right])
    moved = (leaders != torch.arange(len(rows))).nonzero().squeeze(1)
    return torch.stack([rows[moved], rows[leaders[moved]]])


def _build(parts: FeatureParts, folder: Path, clusters: int, seed: int, device: torch.device | str) -> None:
    """Learn the centroids, assign every row, and write the rows cluster by cluster."""
    import faiss

    # A sample that is spread evenly over all rows.
    step = max(1, len(parts) // (clusters * _SAMPLES))
    sample = torch.cat([F.normalize(vectors[-start % step :: step], dim=1) for start, vectors in parts.vectors()])
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 2 * _SAMPLES}
    kmeans = faiss.Kmeans(sample.shape[1], clusters, niter=10, seed=seed, spherical=True, **limits)
    kmeans.train(sample.numpy())
    centroids = torch.tensor(kmeans.centroids, device=device)
    home = np.empty(len(parts), np.int32)
    bar = console.ProgressBar(2 * len(parts), "indexing", unit="rows")
    for start, vectors in parts.vectors():
        home[start : start + len(vectors)] = (F.normalize(vectors.to(device), dim=1) @ centroids.T).argmax(1).cpu()
        bar.show(start + len(vectors))
    order = np.argsort(home, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (len(parts), sample.shape[1]))
    for start, vectors in parts.vectors():
        positions = position[start : start + len(vectors)]
        np.load(folder / "vectors.npy", mmap_mode="r+")[positions] = F.normalize(vectors, dim=1)
        bar.show(len(parts) + start + len(vectors))
    bar.close()
    starts = np.concatenate([[0], np.bincount(home, minlength=clusters).cumsum()])
    arrays = {"centroids": centroids.cpu().numpy(), "starts": starts, "order": order, "position": position}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
