"""An index on disk: clusters of similar rows, in which duplicates, neighbours and representatives are exact.

FAISS learns the centroids from a sample, as for an IVF index. Each row belongs to the centroid with the largest inner
product, and the unit vectors lie on disk, cluster by cluster. Memory holds a few clusters and about 50 bytes a row.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.data.copies import connect_groups
from frugalvit.embedding.parts import FeatureParts
from frugalvit.embedding.selection import MAX_COSINES, ROUNDING, representatives
from frugalvit.probing.knn import CELLS, nearest
from frugalvit.probing.validation import require_finite
from frugalvit.utils import console
from frugalvit.utils.files import read_json, write_text

_ROWS, _MAX_CLUSTERS = 4096, 16384  # mean rows of a cluster
_SAMPLES = 64  # rows a cluster that FAISS learns from
_SLACK = 1e-4  # of distances, for rounding in float32
_EDGES = 1 << 20  # pairs that are connected at a time
EXACT = math.isqrt(MAX_COSINES)  # rows that ``representatives`` compares with each other


class ClusterIndex:
    """The clusters of all rows of some parts."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = folder, torch.device(device)
        self.centroids = torch.from_numpy(np.load(folder / "centroids.npy")).to(self.device)  # (K, D)
        self.radii = torch.from_numpy(np.load(folder / "radii.npy")).to(self.device)  # (K,), distance of the last row
        self.starts = np.load(folder / "starts.npy")  # (K + 1,)
        self.order = np.load(folder / "order.npy", mmap_mode="r")  # (N,), rows by cluster
        self.position = np.load(folder / "position.npy", mmap_mode="r")  # (N,), its inverse
        self.block = math.isqrt(CELLS.get(self.device.type, CELLS["cpu"]))  # rows compared at a time

    @classmethod
    def open(
        cls,
        parts: FeatureParts,
        folder: Path,
        *,
        clusters: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> "ClusterIndex":
        """Open the index of these parts; build it if the folder holds none, or that of other parts."""
        clusters = clusters or min(_MAX_CLUSTERS, -(-len(parts) // _ROWS))
        facts = {"parts": parts.fingerprint, "rows": len(parts), "clusters": clusters, "seed": seed}
        if read_json(folder / "index.json", dict) != facts:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _build(parts, folder, clusters, seed, torch.device(device))
            write_text(folder / "index.json", json.dumps(facts))  # last: it marks the index as complete
        return cls(folder, device)

    def __len__(self) -> int:
        return len(self.order)

    def blocks(self, cluster: int, allowed: np.ndarray | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the row numbers and unit vectors of a cluster, a block at a time; only rows of the mask (N,)."""
        width = self.centroids.shape[1]
        with (self.folder / "vectors.f32").open("rb") as file:
            for start in range(int(self.starts[cluster]), int(self.starts[cluster + 1]), self.block):
                stop = min(start + self.block, int(self.starts[cluster + 1]))
                file.seek(4 * width * start)
                values = np.fromfile(file, np.float32, (stop - start) * width)
                rows, vectors = self.order[start:stop], values.reshape(-1, width)
                if allowed is not None:
                    rows, vectors = rows[allowed[rows]], vectors[allowed[rows]]
                yield torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(vectors).to(self.device)

    def group_duplicates(self, threshold: float, allowed: np.ndarray | None = None) -> Tensor:
        """Return the first row of every row's group, as ``selection.group_duplicates`` does: int64 (N,).

        allowed: a mask (N,); the other rows are groups of their own

        For a row x of cluster a and a row y of cluster b, both margins x (μ_a - μ_b) and y (μ_b - μ_a) are at least 0,
        and their sum is (x - y)(μ_a - μ_b) <= |x - y| |μ_a - μ_b|. So rows at most r apart have margins of at most
        r |μ_a - μ_b|, and only such rows of two clusters are compared. No pair is missed.
        """
        limit = threshold - ROUNDING
        reach = math.sqrt(max(0.0, 2 - 2 * limit)) + _SLACK
        edges = _Edges(len(self))
        for cluster in console.progress(range(len(self.centroids)), label="comparing"):
            gaps = (self.centroids - self.centroids[cluster]).norm(dim=1)
            for number, (rows, vectors) in enumerate(self.blocks(cluster, allowed)):
                scores = vectors @ self.centroids.T
                margins = scores[:, cluster, None] - scores
                close = margins <= reach * gaps + _SLACK
                close[:, cluster] = True
                for other in close.any(0).nonzero().squeeze(1).tolist():
                    if other < cluster:
                        continue
                    mine = close[:, other]
                    least = margins[mine, other].min()
                    for index, (other_rows, others) in enumerate(self.blocks(other, allowed)):
                        if other == cluster and index < number:
                            continue
                        if other != cluster:
                            theirs = others @ (self.centroids[other] - self.centroids[cluster])
                            near = theirs <= reach * gaps[other] + _SLACK - least
                            other_rows, others = other_rows[near.cpu()], others[near]
                        pairs = (vectors[mine] @ others.T >= limit).nonzero().cpu()
                        edges.add(rows[mine.cpu()], other_rows, pairs)
        return edges.connect()

    def nearest(self, query: Tensor, k: int) -> list[tuple[int, float]]:
        """Return the rows with the largest cosines to a vector (D,), and these cosines, as ``knn.nearest`` does.

        A row of a cluster is at least |q - μ| - radius away from q, so the search ends when the k best are nearer than
        that to all other clusters.
        """
        unit = F.normalize(query.to(self.device).float(), dim=0)
        distances = ((self.centroids - unit).norm(dim=1) - self.radii - _SLACK).clamp_min(0)
        best: list[tuple[int, float]] = []
        for cluster in distances.argsort(stable=True).tolist():
            if len(best) == k and best[-1][1] >= 1 - float(distances[cluster]) ** 2 / 2:
                break
            for rows, vectors in self.blocks(cluster):
                _, cosines, index = next(nearest(vectors, unit[None], k, device=self.device))
                best += zip(rows[index[0].cpu()].tolist(), cosines[0].tolist(), strict=True)
            best = sorted(best, key=lambda found: (-found[1], found[0]))[:k]
        return best

    def representatives(
        self, count: int, allowed: np.ndarray, known: Tensor | None = None, *, seed: int = 0, exact: int = EXACT
    ) -> list[int]:
        """Choose rows that represent all ``allowed`` ones, a mask (N,), as ``selection.representatives`` does.

        Up to ``exact`` allowed rows the choice is the same. Of more rows, each cluster first chooses its own
        representatives, in proportion to its size; the final choice is among these, and each counts as often as it is
        the nearest of its cluster.
        """
        total = int(allowed.sum())
        share = 1.0 if total <= exact else min(1.0, max(exact, 4 * count) / total)
        rows, vectors, weights = [], [], []
        for cluster in console.progress(range(len(self.centroids)), label="reducing"):
            for numbers, units in self.blocks(cluster, allowed):
                counts = torch.ones(len(units))
                if share < 1 and len(units):
                    with console.quiet():
                        chosen = representatives(units, math.ceil(share * len(units)), seed=seed)
                    closest = (units @ units[chosen].T).argmax(1).cpu()
                    counts = torch.bincount(closest, minlength=len(chosen)).float()
                    numbers, units = numbers[chosen], units[chosen]
                rows.append(numbers)
                vectors.append(units.cpu())
                weights.append(counts)
        numbers, order = torch.cat(rows).sort()
        found = representatives(
            torch.cat(vectors)[order],
            count,
            known,
            device=self.device,
            seed=seed,
            weights=torch.cat(weights)[order] if share < 1 else None,
        )
        return numbers[found].tolist()

    def vectors(self, rows: np.ndarray) -> Tensor:
        """Return the unit vectors of some rows."""
        width = self.centroids.shape[1]
        found = np.empty((len(rows), width), np.float32)
        with (self.folder / "vectors.f32").open("rb") as file:
            for number, row in enumerate(rows):
                file.seek(4 * width * int(self.position[row]))
                found[number] = np.fromfile(file, np.float32, width)
        return torch.from_numpy(found)


class _Edges:
    """Pairs of similar rows, connected to groups a million at a time."""

    def __init__(self, rows: int) -> None:
        self.first = torch.arange(rows)
        self.waiting: list[Tensor] = []
        self.count = 0

    def add(self, left: Tensor, right: Tensor, pairs: Tensor) -> None:
        """Add pairs of positions in ``left`` and ``right``, which hold row numbers."""
        if not len(pairs):
            return
        # Equal images make a pair of every two; their groups are small.
        rows, local = torch.unique(torch.cat([left, right]), return_inverse=True)
        leader = connect_groups(torch.arange(len(rows)), local[pairs[:, 0]], local[pairs[:, 1] + len(left)])
        moved = (leader != torch.arange(len(rows))).nonzero().squeeze(1)
        self.waiting.append(torch.stack([rows[moved], rows[leader[moved]]]))
        self.count += len(moved)
        if self.count >= _EDGES:
            self.connect()

    def connect(self) -> Tensor:
        if self.waiting:
            self.first = connect_groups(self.first, *torch.cat(self.waiting, dim=1))
        self.waiting, self.count = [], 0
        return self.first


def _build(parts: FeatureParts, folder: Path, clusters: int, seed: int, device: torch.device) -> None:
    """Learn the centroids, assign every row, and write the rows cluster by cluster."""
    centroids = _learn_centroids(parts, clusters, seed).to(device)
    home, radii = np.empty(len(parts), np.int32), torch.zeros(clusters, device=device)
    bar = console.ProgressBar(2 * len(parts), "indexing", unit="rows")
    for start, vectors in parts.vectors():
        require_finite(vectors, "features")
        unit = F.normalize(vectors.to(device), dim=1)
        nearest_one = (unit @ centroids.T).argmax(1)
        home[start : start + len(unit)] = nearest_one.cpu().numpy()
        radii.scatter_reduce_(0, nearest_one, (unit - centroids[nearest_one]).norm(dim=1), "amax")
        bar.show(start + len(unit))
    order = np.argsort(home, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    width = centroids.shape[1]
    with (folder / "vectors.f32").open("wb") as file:
        for start, vectors in parts.vectors():
            unit = F.normalize(vectors, dim=1).numpy()
            targets = position[start : start + len(unit)]
            sequence = np.argsort(targets)
            cuts = np.flatnonzero(np.diff(targets[sequence]) != 1) + 1
            for run in np.split(sequence, cuts):  # neighbours in the file
                os.pwrite(file.fileno(), unit[run].tobytes(), 4 * width * int(targets[run[0]]))
            bar.show(len(parts) + start + len(unit))
    bar.close()
    starts = np.concatenate([[0], np.bincount(home, minlength=clusters).cumsum()])
    arrays = {"centroids": centroids.cpu().numpy(), "radii": radii.cpu().numpy(), "starts": starts}
    arrays |= {"order": order, "position": position}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def _learn_centroids(parts: FeatureParts, clusters: int, seed: int) -> Tensor:
    """Return the centroids (K, D) of a sample that is spread evenly over all rows, by FAISS's spherical k-means."""
    step = max(1, len(parts) // (clusters * _SAMPLES))
    sample = torch.cat([F.normalize(vectors[-start % step :: step], dim=1) for start, vectors in parts.vectors()])
    if clusters == 1:
        return F.normalize(sample.mean(0, keepdim=True), dim=1)
    import faiss

    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 2 * _SAMPLES}
    kmeans = faiss.Kmeans(sample.shape[1], clusters, niter=10, seed=seed, spherical=True, **limits)
    kmeans.train(sample.numpy())
    return torch.tensor(kmeans.centroids)
