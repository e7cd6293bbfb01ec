"""Compare ways to learn from a few labelled digits in equal time, on one CPU core.

    OMP_NUM_THREADS=1 python benchmarks/equal_time.py --out OUT --labels 4 --seeds 3 --seconds 60

The data are those of ``frugalvit demo``: ``--labels`` digits of each class with a label, all 1,797 without labels, and
the other digits to test on. A short run measures the processor seconds of a step; each way then gets as many steps as
fit. Ways with two parts give half of the time to each. The seed draws the labels. Finished runs are not repeated.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frugalvit.cli.demo import ONLY_AT_THE_END, pretraining_config, training_config, write_digits
from frugalvit.comparison.statistics import paired_difference, spread
from frugalvit.config.compare import DemoConfig
from frugalvit.config.probe import LogisticConfig
from frugalvit.probing.logistic import logistic
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from frugalvit.utils.tables import as_markdown

PACE = 60  # steps of a run that measures the pace
FROM = 1 / 3  # of those steps: the first ones are slower


class Budget:
    """Makes the runs of one seed, each with the steps that fit into its seconds."""

    def __init__(self, out: Path, labels: int, seed: int, paces: dict[str, float]) -> None:
        self.demo = DemoConfig.parse({"labels": labels, "seed": seed})
        self.out, self.seed, self.paces = out / f"seed_{seed}", seed, paces
        self.unlabelled, self.digits = write_digits(out / "data", labels, seed)

    def features(self, seconds: float) -> str:
        """Pre-train without labels; return the run."""
        config = pretraining_config(self.demo, self.unlabelled, self.out / f"features_{seconds:g}")
        views_alone = config.matching.model_copy(update={"region_weight": 0.0})
        return self._run("features", pretrain, config.model_copy(update={"matching": views_alone}), seconds)["run"]

    def classifier(self, name: str, seconds: float, init: str | None = None, *, unlabelled: bool = False) -> float:
        """Train a classifier; return its accuracy on the test digits."""
        config = training_config(self.demo, self.digits, self.unlabelled, self.out / name, init or "")
        values: dict[str, Any] = {"init": init, "weights": "last", "evaluate_every": ONLY_AT_THE_END}
        if init is None:
            values |= {"backbone": "hybrid_nano", "img_size": 16, "backbone_args": {"patch_size": 2}}
            values |= {"semi": config.semi.model_copy(update={"start": 0.4})}  # wrong pseudo-labels at first
        values |= {} if unlabelled else {"unlabelled": None, "semi": type(config.semi)()}
        kind = f"{'both' if unlabelled else 'labels'}, {'started' if init else 'random'}"
        return self._run(kind, train, config.model_copy(update=values), seconds)["top1"]

    def probe(self, run: str, *, unlabelled: bool) -> float:
        values = {"model": run, "data": str(self.digits), "seed": self.seed}
        return logistic(
            LogisticConfig.parse(values | {"unlabelled": str(self.unlabelled) if unlabelled else None})
        ).data["top1"]

    def _run(self, kind: str, command: Callable[..., Any], config: Any, seconds: float) -> dict[str, Any]:
        done = Path(config.out) / "summary.json"
        if done.is_file():
            return json.loads(done.read_text(encoding="utf-8"))
        common = {"epochs": "auto", "report": False, "device": "cpu"}
        if kind not in self.paces:
            used = []
            for steps in (round(FROM * PACE), PACE):
                short = {"out": f"{config.out}_pace_{steps}", "steps": steps}
                began = time.process_time()
                command(config.model_copy(update=common | short))
                used.append(time.process_time() - began)
            self.paces[kind] = (used[1] - used[0]) / (PACE - round(FROM * PACE))
        steps = max(1, round(seconds / self.paces[kind]))
        return command(config.model_copy(update=common | {"steps": steps})).data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--labels", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    whole, half = options.seconds, options.seconds / 2
    scores: dict[str, list[float]] = {}
    paces: dict[str, float] = {}
    for seed in range(options.seeds):
        runs = Budget(options.out, options.labels, seed, paces)
        long, short = runs.features(whole), runs.features(half)
        found = {
            "labels alone, random weights": runs.classifier("labels", whole),
            "labels and pseudo-labels, random weights": runs.classifier("both", whole, unlabelled=True),
            "pre-training, frozen, logistic": runs.probe(long, unlabelled=False),
            "… the labels spread": runs.probe(long, unlabelled=True),
            "pre-training, then labels alone": runs.classifier("labels_started", half, short),
            "pre-training, then labels and pseudo-labels": runs.classifier(
                "both_started", half, short, unlabelled=True
            ),
        }
        for name, value in found.items():
            scores.setdefault(name, []).append(value)
    best = max(scores, key=lambda name: statistics.mean(scores[name]))
    rows: list[list[object]] = [
        [name, str(spread(values)), "" if name == best else str(paired_difference(values, scores[best]))]
        for name, values in scores.items()
    ]
    print(as_markdown([f"{options.labels} labels a digit", "right", f"against {best}"], rows))
    print(json.dumps({"scores": scores, "seconds_per_step": paces}))


if __name__ == "__main__":
    main()
