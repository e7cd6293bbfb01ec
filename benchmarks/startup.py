"""Measure the time to the first output: importing, ``--help``, and torch for comparison.

    python benchmarks/startup.py               # a minute
    python benchmarks/startup.py --repeats 1

Every measurement is a new process. The smallest of the repeats counts; the rest is noise. CPU seconds (user and system)
depend less on other processes. Prints one JSON object.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time

CASES = {
    "python, nothing imported": ["-c", "pass"],
    "import frugalvit": ["-c", "import frugalvit"],
    "frugalvit --help": ["-m", "frugalvit.cli", "--help"],
    "frugalvit train --help": ["-m", "frugalvit.cli", "train", "--help"],
    "a mistake: frugalvit trian": ["-m", "frugalvit.cli", "trian"],
    "import torch": ["-c", "import torch"],
    "import torch, timm": ["-c", "import torch, timm"],
}


def measure(arguments: list[str], repeats: int) -> dict[str, float]:
    """Measure wall and CPU seconds of ``python ARGUMENTS``, the smallest of ``repeats``."""
    walls, cpus = [], []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"seconds": round(min(walls), 3), "cpu_seconds": round(min(cpus), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cases = {name: measure(arguments, options.repeats) for name, arguments in CASES.items()}
    print(json.dumps({"python": platform.python_version(), "machine": platform.machine(), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
