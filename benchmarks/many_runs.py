"""Run the commands of a plan, several at a time on one GPU, and record their results.

    python benchmarks/many_runs.py benchmarks/plans/centering.yaml --data DIR --out OUT --together 4

A plan lists jobs: ``name``, ``command`` (of frugalvit), and perhaps ``after`` (names of jobs that must be finished) and
``seeds``. ``{data}`` is DIR, ``{seed}`` the seed, and ``{NAME}`` the run folder of the job with this name. Each
finished job is one line of OUT/results.jsonl with its command, commit, seconds, hardware and scores. It is not
repeated; a job that was stopped resumes. The jobs start in the order of the plan.
"""

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

KEPT = (int, float, str)  # the types of results that a line keeps


@dataclass(frozen=True)
class Job:
    name: str
    command: str
    after: tuple[str, ...] = ()
    seed: int = 0


def read_plan(path: Path) -> list[Job]:
    """Return one job for each seed; a job waits for the same seed of another one, or for the only one."""
    jobs: list[Job] = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        names = {job.name for job in jobs}
        for seed in entry.get("seeds", [None]):
            suffix = "" if seed is None else f"_{seed}"
            after = tuple(next(n for n in (f"{name}{suffix}", name) if n in names) for name in entry.get("after", []))
            jobs.append(Job(f"{entry['name']}{suffix}", entry["command"], after, seed or 0))
    return jobs


def fill_in(job: Job, data: str, out: Path) -> list[str]:
    """Return the words of the command."""
    folders = {name.rsplit("_", 1)[0] if name.endswith(f"_{job.seed}") else name: out / name for name in job.after}
    return job.command.format(data=data, seed=job.seed, **folders).split()


def run(job: Job, data: str, out: Path) -> dict[str, Any]:
    """Run one job; return its line of results."""
    words = fill_in(job, data, out)
    makes_run = words[0] in ("train", "pretrain", "distil", "compare")
    more = ["--out", str(out / job.name), "--no-report"] if makes_run else []
    more += ["--resume", "auto"] if makes_run and "compare" not in words else []  # a repeated comparison continues
    began = time.monotonic()
    done = subprocess.run(["frugalvit", *words, *more, "--json"], capture_output=True, text=True, check=False)
    (out / f"{job.name}.log").write_text(done.stderr, encoding="utf-8")
    try:
        result = json.loads(done.stdout)
    except json.JSONDecodeError:
        result = {"error": done.stderr.strip().splitlines()[-1:] or "no output", "status": done.returncode}
    kept = {key: value for key, value in result.items() if isinstance(value, KEPT)}
    return kept | {"name": job.name, "command": " ".join(["frugalvit", *words]), "wall": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--together", type=int, default=1, help="jobs at a time")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results, lock = options.out / "results.jsonl", threading.Lock()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    finished = {line["name"] for line in lines if "error" not in line}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    shared = {"commit": commit.strip(), "hardware": f"{gpu}, {options.together} runs at a time"}
    jobs = read_plan(options.plan)
    events = {job.name: threading.Event() for job in jobs}

    def work(job: Job) -> None:
        for name in job.after:
            events[name].wait()
        if job.name not in finished and finished.issuperset(job.after):
            line = run(job, options.data, options.out) | shared
            with lock, results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), file=sys.stderr, flush=True)
            if "error" not in line:
                finished.add(job.name)
        events[job.name].set()

    with ThreadPoolExecutor(options.together) as pool:  # a job never waits for a later one, so no deadlock
        list(pool.map(work, jobs))
    missing = [job.name for job in jobs if job.name not in finished]
    sys.exit(f"not finished: {', '.join(missing)}" if missing else 0)


if __name__ == "__main__":
    main()
