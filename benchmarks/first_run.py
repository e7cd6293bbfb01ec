"""Which network and training should ``frugalvit train`` choose? Candidates at equal time, on several datasets.

    python benchmarks/first_run.py choose benchmarks/first_run/protocol.yaml --data DIR --out OUT --seconds 40
    python benchmarks/first_run.py confirm benchmarks/first_run/protocol.yaml --data DIR --out OUT --seeds 3
    python benchmarks/first_run.py table OUT

``choose`` sees the training images alone and holds out a fifth of them. It halves the candidates three times: the
better half by mean rank goes on with three times the time. ``confirm`` trains the candidates named in ``confirm`` as
``train`` does and opens the test images once. Each run is one line of OUT/results.jsonl, with its command, commit,
seconds and hardware; finished runs are not repeated.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HELD_OUT = 5  # every fifth training image of a class
ROUNDS, FACTOR = 3, 3
TIMED_STEPS = 40
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


@dataclass(frozen=True)
class Candidate:
    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class ImageSet:
    """A dataset of the protocol: folders with one folder per class."""

    name: str
    train: tuple[str, ...]
    test: str
    images: int = 0  # of train; 0 for all
    options: tuple[str, ...] = ()
    share: float = 1.0  # of --seconds: small images need less


@dataclass
class Protocol:
    sets: list[ImageSet]
    candidates: list[Candidate]
    confirm: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> "Protocol":
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        sets = [
            ImageSet(name, tuple(v["train"]), v["test"], v.get("images", 0), words(v.get("options")), v.get("share", 1))
            for name, v in values["sets"].items()
        ]
        candidates = [Candidate(name, words(options)) for name, options in values["candidates"].items()]
        return cls(sets, candidates, values["confirm"])


def words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").split())


class Bench:
    """The runs of a protocol in one folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.protocol, self.data, self.out = Protocol.load(arguments.protocol), arguments.data, arguments.out
        self.workers, self.more = arguments.workers, words(arguments.options)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = self.out / "results.jsonl"

    # -- data

    def link_images(self, image_set: ImageSet, *, test: bool) -> Path:
        """Link the images of a set: train and a held-out fifth (val), or all of train and test."""
        folder = self.out / "data" / f"{image_set.name}_{'test' if test else 'val'}"
        if folder.exists():
            return folder
        rng = random.Random(0)
        by_class: dict[str, list[Path]] = {}
        for part in image_set.train:
            for path in sorted((self.data / part).glob("*/*")):
                if path.suffix.lower() in SUFFIXES:
                    by_class.setdefault(path.parent.name, []).append(path)
        total = sum(map(len, by_class.values()))
        for label, paths in by_class.items():
            rng.shuffle(paths)
            keep = paths if not image_set.images else paths[: max(2, round(len(paths) * image_set.images / total))]
            for number, path in enumerate(keep):
                held_out = not test and number % HELD_OUT == 0
                link(path, folder / ("val" if held_out else "train") / label)
        if test:
            for path in sorted((self.data / image_set.test).glob("*/*")):
                link(path, folder / "test" / path.parent.name)
        return folder

    # -- runs

    def train(self, candidate: Candidate, image_set: ImageSet, stage: str, seed: int, *steps: str) -> dict[str, Any]:
        """Run ``frugalvit train`` once; return its line of results.jsonl."""
        key = f"{stage}/{image_set.name}/{candidate.name}/seed_{seed}"
        if row := self.finished().get(key):
            return row
        data = self.link_images(image_set, test=stage == "test")
        options = [*image_set.options, *candidate.options, *self.more, "--seed", str(seed), *steps]
        command = ["train", str(data), *options, "--out", str(self.out / "runs" / key), "--no-report", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "frugalvit.cli", *command], capture_output=True, text=True, check=False
        )
        row = {"key": key, "set": image_set.name, "candidate": candidate.name, "stage": stage, "seed": seed}
        row |= {"command": " ".join(["frugalvit", *command]), "commit": commit()}
        if done.returncode:
            row["error"] = (done.stderr.strip().splitlines() or ["?"])[-1]
        else:
            summary = json.loads(done.stdout)
            names = ("top1", "val_top1", "scored_on", "scored_images", "steps", "seconds", "seconds_per_step", "device")
            row |= {name: summary.get(name) for name in names}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def finished(self) -> dict[str, dict[str, Any]]:
        if not self.results.exists():
            return {}
        return {row["key"]: row for row in map(json.loads, self.results.read_text(encoding="utf-8").splitlines())}

    def steps_in(self, candidate: Candidate, image_set: ImageSet, seconds: float) -> int:
        """Return the steps that fit into ``seconds``: times a short run with nothing beside it."""
        row = self.train(candidate, image_set, "timing", 0, "--steps", str(TIMED_STEPS))
        return max(1, round(seconds / row["seconds_per_step"])) if row.get("seconds_per_step") else 0

    # -- the protocol

    def choose(self, seconds: float) -> None:
        """Halve the candidates, ROUNDS times."""
        left = self.protocol.candidates
        for number in range(ROUNDS):
            budget = seconds * FACTOR**number
            jobs = [
                (candidate, image_set, steps)
                for image_set in self.protocol.sets
                for candidate in left
                if (steps := self.steps_in(candidate, image_set, budget * image_set.share))
            ]
            stage = f"round_{number}"
            with ThreadPoolExecutor(self.workers) as pool:
                futures = [pool.submit(self.train, *job[:2], stage, 0, "--steps", str(job[2])) for job in jobs]
            rows = [future.result() for future in futures]
            ranks = mean_ranks([row for row in rows if "top1" in row])
            print(f"round {number}, {budget:g} s:", *(f"{name} {rank:.1f}" for name, rank in ranks.items()))
            best = list(ranks)[: max(2, -(-len(left) // 2))]
            left = [candidate for candidate in left if candidate.name in best]

    def confirm(self, seeds: int) -> None:
        """Train the candidates of ``confirm`` with their own defaults; score on test."""
        chosen = [candidate for candidate in self.protocol.candidates if candidate.name in self.protocol.confirm]
        jobs = [(c, s, seed) for seed in range(seeds) for s in self.protocol.sets for c in chosen]
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(lambda job: self.train(job[0], job[1], "test", job[2]), jobs))


def mean_ranks(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean rank of every candidate over the sets, best first; a missing run counts as the last."""
    names = {row["candidate"] for row in rows}
    ranks: dict[str, list[int]] = {name: [] for name in names}
    for image_set in {row["set"] for row in rows}:
        scores = {row["candidate"]: row["top1"] for row in rows if row["set"] == image_set}
        for name in names:
            ranks[name].append(1 + sum(score > scores.get(name, -1.0) for score in scores.values()))
    means = {name: statistics.mean(values) for name, values in ranks.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def table(out: Path) -> str:
    """Return the finished runs as Markdown: one row per stage and candidate, one column per set."""
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["stage"] != "timing"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    lines = [f"| stage | candidate | {' | '.join(sets)} |", "| --- " * (2 + len(sets)) + "|"]
    for stage, name in dict.fromkeys((row["stage"], row["candidate"]) for row in rows):
        cells = []
        for image_set in sets:
            same = [r for r in rows if (r["stage"], r["candidate"], r["set"]) == (stage, name, image_set)]
            scores = [row["top1"] for row in same if "top1" in row]
            spread = f" ± {statistics.stdev(scores):.1f} (n = {len(scores)})" if len(scores) > 1 else ""
            cells.append(f"{statistics.mean(scores):.1f}{spread}" if scores else ("failed" if same else ""))
        lines.append(f"| {stage} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def link(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.name
    number = 0
    while target.is_symlink():  # files of two parts may have the same name
        number += 1
        target = folder / f"{path.stem}_{number}{path.suffix}"
    target.symlink_to(path.resolve())


def commit() -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("choose", "confirm"):
        command = commands.add_parser(name)
        command.add_argument("protocol", type=Path)
        command.add_argument("--data", type=Path, required=True, help="the folder that contains the datasets")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--workers", type=int, default=1, help="runs side by side")
        command.add_argument("--options", default="", help="options for every run, in one string")
    commands.choices["choose"].add_argument("--seconds", type=float, default=40.0, help="of the first round, per run")
    commands.choices["confirm"].add_argument("--seeds", type=int, default=3)
    commands.add_parser("table").add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "choose":
        Bench(arguments).choose(arguments.seconds)
    elif arguments.command == "confirm":
        Bench(arguments).confirm(arguments.seeds)
    print(table(arguments.out))


if __name__ == "__main__":
    main()
