"""Compare ways to choose images to label: random, ``embed --select``, TypiClust, ProbCover and margin.

    python benchmarks/selecting.py runs/RUN flowers102/ --labels 1 2 5

Images are chosen from train and val without a fifth that each seed holds out. The score is the accuracy on this fifth
of a logistic classifier on frozen unit features, trained on the chosen images; the test split is not read. "then" rows
choose the first half by ``embed --select`` and the second by a classifier trained on the first. "spread" rows let the
labels spread to the images that were not chosen (``probe logistic --unlabelled``). Prints one JSON object.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.comparison.statistics import paired_difference, spread
from frugalvit.data import open_data
from frugalvit.data.splits import hold_out
from frugalvit.embedding.select import representatives
from frugalvit.experiment.load_model import load_model
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.probing.logistic import LogisticFit, LogisticRegression
from frugalvit.probing.propagation import UNKNOWN
from frugalvit.utils.tables import as_markdown

STRENGTH = 0.01  # of the penalty; few labels leave none to choose it on
DRAWS = 5  # random choices of a seed
NEIGHBOURS, PURITY = 20, 0.95  # the values of TypiClust and ProbCover
HELD_OUT = 0.2


def cluster(unit: Tensor, count: int, seed: int, rounds: int = 50) -> Tensor:
    """Cluster (N, D) by k-means with k-means++ starts; return the cluster of every row (N,)."""
    generator = torch.Generator().manual_seed(seed)
    starts = [int(torch.randint(len(unit), (1,), generator=generator))]
    nearest = torch.full((len(unit),), torch.inf)
    while len(starts) < count:
        nearest = torch.minimum(nearest, (2 - 2 * unit @ unit[starts[-1]]).clamp_min(1e-12))
        starts.append(int(torch.multinomial(nearest, 1, generator=generator)))
    centres, assigned = unit[starts].clone(), torch.full((len(unit),), -1)
    for _ in range(rounds):
        closest = (centres.square().sum(1) - 2 * unit @ centres.T).argmin(1)
        if torch.equal(closest, assigned):
            break
        assigned, sizes = closest, torch.bincount(closest, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, assigned, unit)
        centres = torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)
    return assigned


def choose_typical(unit: Tensor, count: int, seed: int) -> list[int]:
    """TypiClust (Hacohen et al., ICML 2022): the most typical row of each of ``count`` clusters, largest first."""
    assigned = cluster(unit, count, seed)
    distance = torch.full((len(unit),), torch.inf)  # the mean one to the nearest rows of the same cluster
    for number in range(count):
        members = (assigned == number).nonzero().squeeze(1)
        if len(members) > 1:
            pairs = torch.cdist(unit[members], unit[members]).sort(1).values[:, 1 : NEIGHBOURS + 1]
            distance[members] = pairs.mean(1)
    sizes, chosen = torch.bincount(assigned, minlength=count), torch.zeros(count, dtype=torch.long)
    left = torch.ones(len(unit), dtype=torch.bool)
    rows: list[int] = []
    while len(rows) < count:
        order = (chosen * len(unit) - sizes).masked_fill(sizes <= chosen, len(unit) ** 2)
        number = int(order.argmin())
        members = ((assigned == number) & left).nonzero().squeeze(1)
        rows.append(int(members[distance[members].argmin()]))
        left[rows[-1]] = False
        chosen[number] += 1
    return rows


def choose_covering(unit: Tensor, count: int, seed: int, classes: int) -> list[int]:
    """ProbCover (Yehuda et al., NeurIPS 2022): greedily cover most rows with balls of one radius.

    The radius is the largest with which 95 % of the balls hold rows of one cluster of k-means.
    """
    assigned, distance = cluster(unit, classes, seed), torch.cdist(unit, unit)
    impure = distance.masked_fill(assigned[:, None] == assigned, torch.inf).min(1).values
    near = distance < impure.sort().values[int((1 - PURITY) * len(unit))]
    gain, covered, rows = near.sum(1), torch.zeros(len(unit), dtype=torch.bool), []
    for _ in range(count):
        rows.append(int(gain.argmax()))
        new = near[rows[-1]] & ~covered
        gain -= near[:, new].sum(1)
        gain[rows] = -1
        covered |= new
    return rows


def fit(unit: Tensor, labels: Tensor, rows: list[int], classes: int) -> LogisticFit:
    return LogisticRegression(unit[rows], labels[rows], classes).fit(STRENGTH)


def choose_uncertain(unit: Tensor, labels: Tensor, count: int, classes: int, *, covering: bool) -> list[int]:
    """Choose half as ``embed --select`` does, then the rows with the smallest margin between two classes.

    covering: choose the second half as the first, among the half of the rows with the smallest margins
    """
    known = representatives(unit, count // 2)
    best = fit(unit, labels, known, classes).scores(unit).softmax(1).topk(2).values
    margin = (best[:, 0] - best[:, 1]).index_fill(0, torch.tensor(known), torch.inf)
    order = margin.argsort()
    if not covering:
        return known + order[: count - len(known)].tolist()
    uncertain = order[: max(count, len(unit) // 2)]
    more = representatives(unit[uncertain], count - len(known), unit[known])
    return known + uncertain[more].tolist()


def compare(unit: Tensor, labels: Tensor, keys: list[str], classes: int, each: int, seed: int) -> dict[str, float]:
    """Return the accuracy of each way to choose ``each`` images per class, in percent."""
    held_out = torch.from_numpy(hold_out(keys, labels.numpy(), HELD_OUT, seed))
    generator, count = torch.Generator().manual_seed(seed), each * classes
    rows = (~held_out).nonzero().squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=generator)]  # the first of equal rows must not mean the first class
    pool, pool_labels = unit[rows], labels[rows]

    def score(rows: list[int], *, spread: bool = False) -> float:
        assert len(set(rows)) == count
        known, every = torch.full_like(pool_labels, UNKNOWN), list(range(len(pool)))
        known[rows] = pool_labels[rows]
        classifier = fit(pool, known, every if spread else rows, classes)
        right = classifier.scores(unit[held_out]).argmax(1) == labels[held_out]
        return 100 * float(right.double().mean())

    draws = [torch.randperm(len(pool), generator=generator)[:count].tolist() for _ in range(DRAWS)]
    ways: dict[str, Callable[[], list[int]]] = {
        "embed --select": lambda: representatives(pool, count),
        "centred": lambda: representatives(pool - pool.mean(0), count),
        "TypiClust": lambda: choose_typical(pool, count, seed),
        "ProbCover": lambda: choose_covering(pool, count, seed, classes),
        "then margin": lambda: choose_uncertain(pool, pool_labels, count, classes, covering=False),
        "then margin and --select": lambda: choose_uncertain(pool, pool_labels, count, classes, covering=True),
    }
    scores = {"random": statistics.fmean(map(score, draws))} | {name: score(choose()) for name, choose in ways.items()}
    scores["random, spread"] = statistics.fmean(score(rows, spread=True) for rows in draws)
    return scores | {"embed --select, spread": score(ways["embed --select"](), spread=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run, an exported folder, or weights")
    parser.add_argument("data", help="a labelled dataset")
    parser.add_argument("--labels", type=int, nargs="+", default=[1, 2, 5], help="labels per class")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--img-size", type=int)
    options = parser.parse_args()
    source = open_data(options.data, split="train+val")
    assert source.classes is not None
    features = FeatureExtractor(load_model(options.model, img_size=options.img_size))(source.splits["train"])
    assert features.labels is not None
    unit, classes = F.normalize(features.features, dim=1), len(source.classes)
    scores = {
        each: [compare(unit, features.labels, features.keys, classes, each, seed) for seed in range(options.seeds)]
        for each in options.labels
    }
    columns = {each: {name: [run[name] for run in runs] for name in runs[0]} for each, runs in scores.items()}
    rows = []
    for name in columns[options.labels[0]]:
        cells = [(columns[each][name], columns[each]["random"]) for each in options.labels]
        gains = [str(paired_difference(*cell)) if name != "random" else "" for cell in cells]
        rows.append([name, *(f"{spread(cell[0])} {gain}".strip() for cell, gain in zip(cells, gains, strict=True))])
    print(as_markdown(["choice", *map(str, options.labels)], rows), file=sys.stderr)
    print(json.dumps({"model": options.model, "data": source.name, "images": len(unit), "scores": columns}))


if __name__ == "__main__":
    main()
