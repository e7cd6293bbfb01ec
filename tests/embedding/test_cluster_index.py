"""Clusters on disk against the code in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from frugalvit.embedding import cluster_index
from frugalvit.embedding.cluster_index import ClusterIndex
from frugalvit.embedding.duplicates import group_duplicates
from frugalvit.embedding.feature_table import FeatureParts, make_table
from frugalvit.embedding.select import representatives

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'frugalvit[scale]'")
pytest.importorskip("faiss", reason="needs faiss: pip install 'frugalvit[scale]'")


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    """Rows around centres that overlap, with near copies of other rows at every distance."""
    rows, width, random = 900, 8, np.random.default_rng(0)
    vectors = random.normal(0, 1, (12, width))[random.integers(0, 12, rows)] + random.normal(0, 0.7, (rows, width))
    copies = random.integers(0, rows, (2, rows // 3))
    noise = random.uniform(0, 0.4, (rows // 3, 1)) * random.normal(0, 1, (rows // 3, width))
    vectors[copies[0]] = vectors[copies[1]] + noise
    return torch.from_numpy(vectors).float()


@pytest.fixture(scope="module")
def parts(features: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> FeatureParts:
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"{number}.parquet" for number in range(4)]
    for path, block in zip(paths, features.split(250), strict=True):
        parquet.write_table(make_table(["a.png"] * len(block), ["train"] * len(block), None, block.numpy()), path)
    return FeatureParts(paths)


@pytest.mark.parametrize("clusters", [1, 13])
def test_equals_memory(clusters: int, features: torch.Tensor, parts: FeatureParts, tmp_path: Path) -> None:
    index = ClusterIndex(parts, tmp_path / "index", clusters=clusters)
    index.block = 40  # several blocks a cluster
    assert (np.diff(index.starts) > 0).all() and len(index.starts) == clusters + 1
    everything, allowed = np.ones(900, bool), np.arange(900) % 3 > 0
    rows, others = np.flatnonzero(allowed), np.flatnonzero(~allowed)
    for threshold in (0.8, 0.95, 1.0):
        first = index.group_duplicates(threshold, everything)
        assert (first == group_duplicates(features, threshold).numpy()).all()
        cosines = F.cosine_similarity(features, features[first])
        assert index.cosines(np.arange(900), first) == pytest.approx(cosines.numpy(), abs=1e-6)
    first = index.group_duplicates(0.95, allowed)
    assert (first[rows] == rows[group_duplicates(features[rows], 0.95).numpy()]).all() and (
        first[others] == others
    ).all()
    expected = rows[representatives(features[rows], 6, features[:5])]
    assert index.representatives(6, allowed, features[:5]) == expected.tolist()


def test_clusters_choose_nearly_as_well(
    features: torch.Tensor, parts: FeatureParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_index, "EXACT", 200)
    chosen = ClusterIndex(parts, tmp_path / "index", clusters=13).representatives(20, np.ones(900, bool))
    unit = F.normalize(features, dim=1)
    best, found = (float((unit @ unit[rows].T).amax(1).sum()) for rows in (representatives(features, 20), chosen))
    assert len(set(chosen)) == 20 and found > 0.98 * best
