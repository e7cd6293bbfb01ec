"""Does a run of two processes equal a run of one? Both on the same GPU, or on the CPU.

    python benchmarks/shared_gpu.py DATA --command "train --backbone swin_nano --img-size 64 --steps 40" --batch 64

NCCL refuses two ranks on one GPU, so the ranks talk through gloo. Each rank poses as a node with one device. The global
batch is the same in all runs. Prints the largest difference of the last weights and the rates, as one line of JSON.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

WORKER = """
import sys
from lightning_fabric.strategies import ddp
if {backend!r} != "nccl":
    ddp._get_default_process_group_backend_for_device = lambda device: {backend!r}
from frugalvit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(options: argparse.Namespace, folder: Path, world: int, backend: str) -> str:
    """Run the command with ``world`` processes; return the errors of a failed one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = shlex.split(options.command)
    command += [options.data, "--batch", str(options.batch), "--out", str(folder), "--device", options.device]
    processes = []
    for rank in range(world):
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "RANK": str(rank)}
        more |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "NODE_RANK": str(rank)}
        more |= {"TORCHELASTIC_RUN_ID": "shared-gpu", "OMP_NUM_THREADS": "1"}
        nodes = ["--nodes", str(world)] if world > 1 else []
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER.format(backend=backend), *command, *nodes],
                env=os.environ | (more if world > 1 else {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate()[1] for process in processes]
    return "" if not any(process.returncode for process in processes) else "\n".join(errors)


def rate(folder: Path) -> float:
    """Return the images per second of the last line that has them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["images_per_second"] for line in lines if "images_per_second" in line]
    return rates[-1] if rates else float("nan")


def largest_difference(first: Path, second: Path) -> float:
    """Return the largest difference of a weight, relative to the largest weight of its tensor."""
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    return max(
        float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp_min(1e-12))
        for name in one
        if one[name].is_floating_point()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--command", default="train --backbone swin_nano --img-size 64 --steps 40")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="gloo", help="gloo, or nccl to see it refuse")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        one, two = Path(temporary, "one"), Path(temporary, "two")
        for folder, world in ((one, 1), (two, 2)):
            if errors := run(options, folder, world, options.backend):
                sys.exit(f"{world} processes failed:\n{errors[-2000:]}")
        result = {
            "command": options.command,
            "largest_relative_difference": largest_difference(one, two),
            "images_per_second": {"one process": rate(one), "two processes": rate(two)},
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
