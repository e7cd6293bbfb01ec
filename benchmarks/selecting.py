"""Compare N labels on the images of ``embed --select N`` with N labels on random images.

    python benchmarks/selecting.py runs/RUN flowers102/ --labels 102 204 408

Images are chosen from train and val. The score is 1-NN accuracy on test (mean per class) in the run's features. Random
images are drawn --draws times. Prints one JSON object.
"""

import argparse
import json
import statistics

import torch

from frugalvit.data import open_data
from frugalvit.embedding.selection import representatives
from frugalvit.experiment.load_model import load_model
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from frugalvit.probing.knn import knn_accuracy


def score(pool: FeatureSet, test: FeatureSet, rows: list[int], classes: int) -> float:
    assert pool.labels is not None and test.labels is not None
    scores = knn_accuracy(pool.features[rows], pool.labels[rows], test.features, test.labels, [1], classes=classes)
    return scores[1]["mean_per_class"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run, or an exported folder")
    parser.add_argument("data", help="a labelled dataset with a test split")
    parser.add_argument("--labels", type=int, nargs="+", default=[102, 204, 408])
    parser.add_argument("--draws", type=int, default=30, help="random choices to compare with")
    options = parser.parse_args()
    source = open_data(options.data, split="train+val")
    assert source.classes is not None
    extract = FeatureExtractor(load_model(options.run))
    pool, test = extract(source.splits["train"]), extract(source.splits["test"])
    rows = []
    for count in options.labels:
        orders = (
            torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)) for seed in range(options.draws)
        )
        random = [score(pool, test, order[:count].tolist(), len(source.classes)) for order in orders]
        chosen = score(pool, test, representatives(pool.features, count), len(source.classes))
        rows.append(
            {
                "labels": count,
                "chosen": round(chosen, 2),
                "random": round(statistics.fmean(random), 2),
                "deviation": round(statistics.stdev(random), 2),
                "beaten": sum(chosen > value for value in random),
            }
        )
    print(json.dumps({"run": options.run, "images": len(pool), "draws": options.draws, "rows": rows}))


if __name__ == "__main__":
    main()
