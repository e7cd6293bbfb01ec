"""Records what the command line does, so that a refactoring can be checked against the code before it.

    python benchmarks/gate.py record before.json --source ../before/src    # three minutes on two cores
    python benchmarks/gate.py record after.json
    python benchmarks/gate.py compare before.json after.json               # one line a difference; status 1 if any

The script starts ``python -m frugalvit.cli`` and asks ``import frugalvit`` for its names. It knows no module inside.
It writes its own small images. It hashes weights, metrics and values. It lists keys, files, flags and names. It leaves
out times, speeds, paths of the temporary folder and English sentences. Two records agree to the bit on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from PIL import Image

_RUN = "--img-size 32 --device cpu --workers 1 --log-every 1 --save-every 25 --seed 7 --quiet --json"
_SWIN = "--backbone swin_nano --backbone-args '{embed_dim: 8, depths: [2, 2], num_heads: [1, 2], window_size: 4}'"
_DEEP = "--backbone swin_nano --backbone-args '{embed_dim: 16, depths: [1, 1, 1], num_heads: [1, 2, 4]}'"
_CVT = "{embed_dim: [8, 12, 16], depths: [1, 1, 2], num_heads: [1, 1, 2], head_dim: 8}"
_VIL = "{embed_dim: 8, depths: [2, 1, 1, 1], num_heads: [1, 2, 2, 4]}"
_T2T = "{embed_dim: 24, depth: 2, num_heads: 2, token_dim: 8}"
_FAMILIES = (
    f"'cvt: backbone=cvt_13 backbone_args={_CVT}' 'vil: backbone=vil_tiny_w7 backbone_args={_VIL}' "
    f"'t2t: backbone=t2t_vit_14 backbone_args={_T2T}' "
    "'windowed: backbone=cvt_tiny_w7 backbone_args={embed_dim: 4, depths: [1, 1, 1, 2]}' "
    "'vit: backbone=deit_small backbone_args={embed_dim: 24, depth: 2, num_heads: 2}'"
)
_LOSSES = (
    "'ce: localization.variant=ce mixing.prob=1 augment.operations=2' "
    "'dense: localization.variant=dense augment.crop=resized balance=true' 'without: localization.weight=0 ema=0'"
)
_TRAIN = f"train images --steps 60 --batch 8 {_SWIN} {_RUN}"
_PRETRAIN = f"pretrain images --steps 40 --batch 8 --localization.weight 0.1 {_SWIN} {_RUN}"
INTERRUPTED = {
    "train resumed": f"{_TRAIN} --out train_resumed",
    "pretrain resumed": f"{_PRETRAIN} --out pretrain_resumed",
}
ROUNDS: list[dict[str, str]] = [  # the commands of a round need the round before
    {
        "train": f"{_TRAIN} --out train",
        "pretrain": f"{_PRETRAIN} --out pretrain",
        "train two processes": f"train images --steps 6 --batch 8 --devices 2 {_SWIN} {_RUN} --out two",
        **INTERRUPTED,
        "compare": f"compare images --seeds 2 --steps 3 --batch 8 {_SWIN} {_RUN} --settings {_LOSSES} --out losses",
        "compare families": f"compare images --seeds 2 --steps 2 --batch 8 {_RUN} --settings {_FAMILIES} --out all",
        "detect train": f"detect train coco --steps 4 --batch 2 {_DEEP} {_RUN} --out detect",
        "segment train": f"segment train scenes --steps 4 --batch 2 {_DEEP} {_RUN} --out segment",
        "data": "data images --json",
        "data pack": "data pack images shards --json",
        "list models": "list models --json",
        "list datasets": "list datasets --json",
        "list recipes": "list recipes --json",
        "mistaken command": "trian images --json",
        "mistaken option": "train images --bakbone swin_nano --json",
        "mistaken data": "train nowhere --json",
    },
    {
        "train init": f"train images --init pretrain --steps 4 --batch 8 {_RUN} --out init",
        "detect init": f"detect train coco --head cascade --init pretrain --steps 2 --batch 2 {_RUN} --out cascade",
        "probe knn": "probe knn train images --ks 3 5 --json",
        "probe linear": "probe linear pretrain images --epochs 5 --json",
        "probe logistic": "probe logistic train_resumed images --json",
        "eval": "eval train images --json",
        "predict": "predict train images/val/dark --json",
        "embed": "embed train images --out embed.npz --json",
        "export": "export train --to timm --out exported --json",
        "detect eval": "detect eval detect coco --json",
        "detect predict": "detect predict detect coco/images --threshold 0 --out found --json",
        "segment eval": "segment eval segment scenes --json",
        "segment predict": "segment predict segment scenes/images/val --out masks --json",
        "look correspond": "look correspond train images/val/dark/0.png --out correspond.png --json",
        "look attend": "look attend train images/val/dark/0.png --out attend.png --json",
    },
    {
        "doctor": "doctor --json",
        "advise": "advise images --device cpu --trial 1 --json",
        "report": "report train pretrain --out page.html --json",
    },
]
MACHINES = ("doctor", "advise")
"""Their values are the machine's: only keys count."""
VARYING = ("seconds", "seconds_per_step", "images_per_second")
"""Keys that differ between two runs of the same command."""
NAMES = """
import inspect, json, frugalvit
found = {name: getattr(frugalvit, name) for name in frugalvit.__all__}
plain = [name for name, one in found.items() if inspect.isclass(one) and issubclass(one, Exception) or not callable(one)]
takes = {name: [] if name in plain else list(inspect.signature(one).parameters) for name, one in found.items()}
print(json.dumps({"file": frugalvit.__file__, "names": takes}))
"""


class Bench(NamedTuple):
    """The folder where commands run, and their environment."""

    folder: Path
    environment: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``python WORDS``."""
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *words], cwd=self.folder, env=self.environment, text=True, **pipes)

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run ``python WORDS`` and return its status, what it printed and what it complained."""
        process = self.start(*words)
        printed, complained = process.communicate()
        return process.returncode, printed, complained

    def interrupt(self, words: list[str], out: Path) -> str:
        """Send SIGTERM to a run after its first step, and return what is wrong with its end."""
        process = self.start("-m", "frugalvit.cli", *words)
        while not (out / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        complained = process.communicate()[1]
        return "" if process.returncode == 3 else f"status {process.returncode} after SIGTERM: {complained}"

    def plain(self, value: Any) -> Any:
        """Return a value without what varies: times, the folder's path, sentences."""
        if isinstance(value, dict):
            return {self.plain(key): self.plain(one) for key, one in value.items() if key not in VARYING}
        if isinstance(value, list):
            return [self.plain(one) for one in value]
        text = value.replace(str(self.folder), "FOLDER") if isinstance(value, str) else value
        return "TEXT" if isinstance(text, str) and " " in text else text


def write_images(folder: Path) -> None:
    """Write class folders, a COCO folder, and a folder of images and masks; all of them are the same every time."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for number, name in enumerate(("dark", "grey", "light")):
            for index in range(count):
                pixels = random.integers(0, 100, (32, 32, 3)) + 60 * number
                save_image(folder / "images" / split / name / f"{index}.png", pixels)
        images, annotations = [], []
        for index in range(count):
            pixels, labels = random.integers(0, 120, (48, 48, 3)), np.zeros((48, 48))
            for kind in (1, 2):
                top, left, size = (
                    random.integers(2, 20),
                    random.integers(2, 8) + 22 * (kind - 1),
                    random.integers(9, 16),
                )
                square = slice(top, top + size), slice(left, left + size)
                pixels[square], labels[square] = (250, 40, 40) if kind == 1 else (40, 90, 250), kind
                box = [float(left), float(top), float(size), float(size)]
                corners = [left, top, left + size, top, left + size, top + size, left, top + size]
                more = {"bbox": box, "area": box[2] * box[3], "segmentation": [[float(at) for at in corners]]}
                annotations.append({"id": len(annotations) + 1, "image_id": index, "category_id": 3 * kind, **more})
            images.append({"id": index, "file_name": f"{split}_{index}.png", "height": 48, "width": 48})
            save_image(folder / "coco" / "images" / f"{split}_{index}.png", pixels)
            save_image(folder / "scenes" / "images" / split / f"{index}.png", pixels)
            save_image(folder / "scenes" / "masks" / split / f"{index}.png", labels)
        kinds = [{"id": 3, "name": "red"}, {"id": 6, "name": "blue"}]
        content = {"images": images, "annotations": [one | {"iscrowd": 0} for one in annotations], "categories": kinds}
        (folder / "coco" / f"instances_{split}.json").write_text(json.dumps(content), encoding="utf-8")


def save_image(path: Path, pixels: np.ndarray) -> None:
    """Write one PNG file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def hash_value(value: Any) -> str:
    """Hash a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_tensors(path: Path) -> dict[str, Any]:
    """Hash the tensors of a safetensors file in the order of their names, and list the names."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:begin])
    tensors.pop("__metadata__", None)
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        first, last = tensor["data_offsets"]
        hashed.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode() + content[begin + first : begin + last])
    return {"names": sorted(tensors), "values": hashed.hexdigest()}


def list_keys(value: Any, path: str = "") -> set[str]:
    """List the paths of all keys in a JSON value; ``[]`` stands for every place in a list."""
    if isinstance(value, dict):
        return {found for key, one in value.items() for found in {f"{path}.{key}", *list_keys(one, f"{path}.{key}")}}
    if isinstance(value, list):
        return {found for one in value for found in list_keys(one, f"{path}[]")}
    return set()


def describe_json(bench: Bench, value: Any) -> dict[str, Any]:
    """Describe a JSON value by its keys and the hash of what does not vary."""
    keys = {key.replace(str(bench.folder), "FOLDER") for key in list_keys(value)}
    return {"keys": sorted(keys), "values": hash_value(bench.plain(value))}


def describe_metrics(bench: Bench, path: Path) -> dict[str, Any]:
    """Describe a file of metrics: its keys, the number of its lines, their hash without times."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {**describe_json(bench, lines), "lines": len(lines)}


def describe_folder(bench: Bench, folder: Path) -> dict[str, Any]:
    """Describe what a command wrote: files, weights, metrics, options, decisions, and the keys of every JSON file."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    told: dict[str, Any] = {"files": sorted({re.sub(r"(tfevents).*", r"\1", name) for name in paths})}
    for name, path in paths.items():
        if name.endswith(".safetensors"):
            told[name] = hash_tensors(path)
        elif name.endswith("metrics.jsonl"):
            told[name] = describe_metrics(bench, path)
        elif name.endswith("config.yaml"):
            told[name] = bench.plain(yaml.safe_load(path.read_text(encoding="utf-8")))
        elif name.endswith("decisions.json"):
            told[name] = {one["name"]: one["value"] for one in json.loads(path.read_text(encoding="utf-8"))}
        elif name.endswith(".json"):
            told[name] = describe_json(bench, json.loads(path.read_text(encoding="utf-8")))
    return told


def record_command(bench: Bench, label: str, line: str) -> dict[str, Any]:
    """Run one command and describe its answer and what it wrote."""
    began, words = time.monotonic(), shlex.split(line)
    out = bench.folder / words[words.index("--out") + 1] if "--out" in words else bench.folder / "shards"
    wrong = bench.interrupt(words, out) if label in INTERRUPTED else ""
    if label in INTERRUPTED:
        words = [words[0], "--resume", out.name, "--quiet", "--json"]
    status, printed, complained = bench.run("-m", "frugalvit.cli", *words)
    told: dict[str, Any] = {"status": status}
    try:
        answer = json.loads(printed)
    except ValueError:
        wrong = wrong or f"no JSON: {printed[-300:]}"
    else:
        told["answer"] = describe_json(bench, answer)
        if label.startswith("list "):
            told["names"] = sorted(one["name"] for one in answer[label.removeprefix("list ")])
    if out.is_dir() and ("--out" in words or label in (*INTERRUPTED, "data pack")):
        told["folder"] = describe_folder(bench, out)
    if out.suffix == ".npz" and out.exists():
        with np.load(out) as arrays:
            told["arrays"] = {name: hash_value(bench.plain(arrays[name].tolist())) for name in arrays.files}
    if label in MACHINES and "answer" in told:
        del told["answer"]["values"]
    if wrong or (status != 0 and not label.startswith("mistaken")):
        told["wrong"] = True
        print(f"WRONG: {label}: status {status}. {wrong} {complained[-2000:]}", file=sys.stderr)
    print(f"{time.monotonic() - began:6.1f} s  {label}", flush=True)
    return told


def record_help(bench: Bench) -> dict[str, list[str]]:
    """List the commands, and the arguments and flags of each with their choices."""
    overview = bench.run("-m", "frugalvit.cli", "--help")[1]
    found: dict[str, list[str]] = {}
    for command in re.findall(r"^  (\S+(?: \S+)?)  +\S", overview, re.MULTILINE):
        text = bench.run("-m", "frugalvit.cli", *command.split(), "--help")[1]
        usage = re.findall(r"^usage: .*", text)
        found[command] = usage + re.findall(r"^  (\S.*?)(?:  .*)?$", text, re.MULTILINE)
    return found


def print_startup(bench: Bench) -> None:
    """Print what ``frugalvit --help`` costs, and whether it imports torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    bench.run("-m", "frugalvit.cli", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = bench.run("-X", "importtime", "-m", "frugalvit.cli", "--help")[2]
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    torch = "imports torch" if re.search(r"\| +torch$", imported, re.MULTILINE) else "does not import torch"
    print(f"frugalvit --help takes {took:.2f} s of processor time and {torch}")


def record(source: Path, folder: Path) -> dict[str, Any]:
    """Record everything about the code in ``source``, working in ``folder``."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    caches = {"FRUGALVIT_CACHE": str(folder / "cache"), "FRUGALVIT_DATASETS": str(folder / "datasets")}
    python = {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "COLUMNS": "1000"}
    bench = Bench(folder, os.environ | single | caches | python)
    write_images(folder)
    names = json.loads(bench.run("-c", NAMES)[1])
    if not Path(names.pop("file")).resolve().is_relative_to(source):
        raise SystemExit(f"'import frugalvit' does not take it from {source}")
    print_startup(bench)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "timm", "numpy", "pillow")}
    told: dict[str, Any] = {"machine": {"processor": platform.machine(), **versions}, "python": names}
    told |= {"help": record_help(bench), "commands": {}}
    with ThreadPoolExecutor(2) as pool:
        for commands in ROUNDS:
            answers = pool.map(lambda item: record_command(bench, *item), commands.items())
            told["commands"] |= dict(zip(commands, answers, strict=True))
    return told


def list_differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """List what two records do not have in common, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            where = f"{place} / {key}" if place else key
            if key in before and key in after:
                yield from list_differences(before[key], after[key], where)
            else:
                yield f"{where}: only {'before' if key in before else 'after'}"
    elif isinstance(before, list) and isinstance(after, list) and set(map(str, before)) != set(map(str, after)):
        yield from (f"{place}: {one} only before" for one in before if one not in after)
        yield from (f"{place}: {one} only after" for one in after if one not in before)
    elif before != after:
        yield f"{place}: {before} before, {after} after"


def main() -> int:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    recording.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("records", type=Path, nargs=2)
    given = parser.parse_args()
    if given.verb == "compare":
        found = list(list_differences(*(json.loads(path.read_text(encoding="utf-8")) for path in given.records)))
        print("\n".join(found) or "no difference")
        return int(bool(found))
    if given.keep:
        given.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        told = record(given.source.resolve(), (given.keep or Path(temporary)).resolve())
    given.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return int(any(one.get("wrong") for one in told["commands"].values()))


if __name__ == "__main__":
    sys.exit(main())
