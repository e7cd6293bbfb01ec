"""Records what the command line does, so that a refactoring can be checked against the code before it.

    python benchmarks/gate.py record before.json --source ../before/src    # three minutes on two idle cores
    python benchmarks/gate.py record after.json
    python benchmarks/gate.py compare before.json after.json               # one line a difference; status 1 if any

The script starts ``python -m frugalvit.cli`` and asks ``import frugalvit`` for its names. It knows no module inside.
It draws its own small images. It hashes weights, metrics and values. It lists keys, files, flags and names. It leaves
out times, speeds, the temporary folder's path and English sentences. On one machine two records agree to the bit.
"""

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
from typing import Any

import numpy as np
import yaml
from PIL import Image

_RUN = "--img-size 32 --device cpu --workers 1 --log-every 1 --save-every 25 --seed 7 --quiet"
_SWIN = "--backbone swin_nano --backbone-args '{embed_dim: 8, depths: [2, 2], num_heads: [1, 2], window_size: 4}'"
_DEEP = "--backbone swin_nano --backbone-args '{embed_dim: 16, depths: [1, 1, 1], num_heads: [1, 2, 4]}'"
_LOSSES = """'ce: localization.variant=ce mixing.prob=1 augment.operations=2'
    'dense: localization.variant=dense augment.crop=resized balance=true' 'without: localization.weight=0 ema=0'"""
_FAMILIES = """'t2t: backbone=t2t_vit_14 backbone_args={embed_dim: 24, depth: 2, num_heads: 2, token_dim: 8}'
    'cvt: backbone=cvt_13 backbone_args={embed_dim: 8, depths: [1, 1, 2], num_heads: [1, 1, 2], head_dim: 8}'
    'windowed: backbone=cvt_tiny_w7 backbone_args={embed_dim: 4, depths: [1, 1, 1, 2]}'
    'vil: backbone=vil_tiny_w7 backbone_args={embed_dim: 8, depths: [2, 1, 1, 1], num_heads: [1, 2, 2, 4]}'
    'vit: backbone=deit_small backbone_args={embed_dim: 24, depth: 2, num_heads: 2}'"""
_TRAIN = f"train images --steps 60 --batch 8 {_SWIN} {_RUN}"
_PRETRAIN = f"pretrain images --steps 40 --batch 8 --localization.weight 0.1 {_SWIN} {_RUN}"
ROUNDS: list[dict[str, str]] = [  # the commands of a round use what the rounds before wrote
    {
        "train": f"{_TRAIN} --out train",
        "train resumed": f"{_TRAIN} --out train_resumed",
        "train two processes": f"train images --steps 6 --batch 8 --devices 2 {_SWIN} {_RUN} --out two",
        "pretrain": f"{_PRETRAIN} --out pretrain",
        "pretrain resumed": f"{_PRETRAIN} --out pretrain_resumed",
        "compare": f"compare images --seeds 2 --steps 3 --batch 8 {_SWIN} {_RUN} --settings {_LOSSES} --out losses",
        "compare families": f"compare images --seeds 2 --steps 2 --batch 8 {_RUN} --settings {_FAMILIES} --out nets",
        "detect train": f"detect train coco --steps 4 --batch 2 {_DEEP} {_RUN} --out detect",
        "segment train": f"segment train scenes --steps 4 --batch 2 {_DEEP} {_RUN} --out segment",
        "data": "data images",
        "list models": "list models",
        "list datasets": "list datasets",
        "list recipes": "list recipes",
        "mistaken command": "trian images",
        "mistaken option": "train images --bakbone swin_nano",
        "mistaken data": "train nowhere",
    },
    {
        "train init": f"train images --init pretrain --steps 4 --batch 8 {_RUN} --out init",
        "detect init": f"detect train coco --head cascade --init pretrain --steps 2 --batch 2 {_RUN} --out cascade",
        "probe knn": "probe knn train images --ks 3 5",  # each probe writes into the run that it looks at
        "probe linear": "probe linear pretrain images --epochs 5",
        "probe logistic": "probe logistic train_resumed images",
        "eval": "eval train images",
        "predict": "predict train images/val/dark",
        "embed": "embed train images --out embed.npz",
        "export": "export train --to timm --out exported",
        "detect eval": "detect eval detect coco",
        "detect predict": "detect predict detect coco/images --threshold 0 --out found",
        "segment eval": "segment eval segment scenes",
        "segment predict": "segment predict segment scenes/images/val --out masks",
        "look correspond": "look correspond train images/val/dark/0.png --out correspond.png",
        "look attend": "look attend train images/val/dark/0.png --out attend.png",
    },
    {"doctor": "doctor", "advise": "advise images --device cpu --trial 1", "report": "report train --out page.html"},
]
OF_THE_MACHINE = ("doctor", "advise")  # only the keys of their answers are compared
VARYING = ("seconds", "seconds_per_step", "images_per_second", "bytes")  # keys that differ between two equal runs
NAMES = """
import inspect, json, frugalvit
found = {name: getattr(frugalvit, name) for name in frugalvit.__all__}
ours = {name: one for name, one in found.items() if callable(one) and name != "UserError"}
takes = {name: list(inspect.signature(one).parameters) for name, one in ours.items()}
print(json.dumps({"file": frugalvit.__file__, "names": sorted(found), "takes": takes}))
"""


def write_images() -> None:
    """Write class folders, a COCO folder, and a folder of images and masks; they are the same every time."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for number in range(3 * count):
            kind = number % 3  # nobody can tell the third class from the first: there will be mistakes
            pixels = random.integers(0, 128, (32, 32, 3)) + 100 * (kind % 2)
            save_image(f"images/{split}/{('dark', 'light', 'other')[kind]}/{number // 3}.png", pixels)
        images: list[dict[str, Any]] = []
        objects: list[dict[str, Any]] = []
        for number in range(count):
            pixels, labels = random.integers(0, 120, (48, 48, 3)), np.zeros((48, 48))
            for kind, colour in ((1, (250, 40, 40)), (2, (40, 90, 250))):
                top, size = int(random.integers(2, 20)), int(random.integers(9, 16))
                left = int(random.integers(22 * kind - 20, 22 * kind - 14))
                right, bottom = left + size, top + size
                pixels[top:bottom, left:right], labels[top:bottom, left:right] = colour, kind
                outline = [[left, top, right, top, right, bottom, left, bottom]]
                place = {"bbox": [left, top, size, size], "area": size * size, "segmentation": outline, "iscrowd": 0}
                objects.append({"id": len(objects) + 1, "image_id": number, "category_id": 3 * kind, **place})
            images.append({"id": number, "file_name": f"{split}_{number}.png", "height": 48, "width": 48})
            save_image(f"coco/images/{split}_{number}.png", pixels)
            save_image(f"scenes/images/{split}/{number}.png", pixels)
            save_image(f"scenes/masks/{split}/{number}.png", labels)
        content = {"images": images, "annotations": objects}
        content["categories"] = [{"id": 3, "name": "red"}, {"id": 6, "name": "blue"}]
        Path(f"coco/instances_{split}.json").write_text(json.dumps(content), encoding="utf-8")


def save_image(name: str, pixels: np.ndarray) -> None:
    """Write one PNG file, and the folders above it."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(name)


def run_python(*words: str) -> tuple[int, str, str]:
    """Run ``python WORDS``; return its status and both its outputs."""
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=900)
    return ended.returncode, ended.stdout, ended.stderr


def interrupt_run(words: list[str], out: str) -> tuple[int, str]:
    """Send SIGTERM to a run after its first step; return its status and its answer."""
    process = subprocess.Popen([sys.executable, "-m", "frugalvit.cli", *words], stdout=subprocess.PIPE, text=True)
    while not Path(out, "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=900)[0]
    return process.returncode, printed


def drop_varying(value: Any) -> Any:
    """Return a JSON value without times, the folder's path and sentences."""
    if isinstance(value, dict):
        return {drop_varying(key): drop_varying(one) for key, one in value.items() if key not in VARYING}
    if isinstance(value, list):
        return [drop_varying(one) for one in value]
    if isinstance(value, str):
        return "SENTENCE" if " " in value else value.replace(str(Path.cwd()), "FOLDER")
    return value


def list_keys(value: Any, path: str = "") -> set[str]:
    """List the paths of all keys in a JSON value; ``[]`` stands for every place in a list."""
    if isinstance(value, dict):
        return {found for key, one in value.items() for found in {f"{path}.{key}", *list_keys(one, f"{path}.{key}")}}
    if isinstance(value, list):
        return {found for one in value for found in list_keys(one, f"{path}[]")}
    return set()


def describe_json(value: Any) -> dict[str, Any]:
    """Describe a JSON value by its keys and the hash of what does not vary; the order of keys does not count."""
    text = json.dumps(drop_varying(value), sort_keys=True)
    keys = sorted(key.replace(str(Path.cwd()), "FOLDER") for key in list_keys(value))
    return {"keys": keys, "values": hashlib.sha256(text.encode()).hexdigest()}


def describe_tensors(path: Path) -> dict[str, Any]:
    """Describe a safetensors file by the names in it and the hash of all tensors in the names' order."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = {name: one for name, one in json.loads(content[8:begin]).items() if name != "__metadata__"}
    hashed = hashlib.sha256()
    for name, one in sorted(tensors.items()):
        first, last = one["data_offsets"]
        hashed.update(f"{name} {one['dtype']} {one['shape']}".encode() + content[begin + first : begin + last])
    return {"names": sorted(tensors), "values": hashed.hexdigest()}


def describe_file(path: Path) -> Any:
    """Describe what a file holds; None where only its name counts."""
    if path.suffix == ".safetensors":
        return describe_tensors(path)
    if path.suffix == ".npz":
        return {name: describe_json(array.tolist()) for name, array in np.load(path).items()}
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return None
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return drop_varying(yaml.safe_load(text))
    if path.suffix == ".jsonl":
        return describe_json([json.loads(line) for line in text.splitlines()])
    if path.name == "decisions.json":
        return {one["name"]: one["value"] for one in json.loads(text)}
    return describe_json(json.loads(text))


def describe_output(out: Path) -> dict[str, Any]:
    """Describe every file that a command wrote: ``out`` itself, or all in the folder ``out``."""
    paths = [path for path in sorted([out, *out.rglob("*")]) if path.is_file()]
    return {re.sub(r"(tfevents).*", r"\1", path.as_posix()): describe_file(path) for path in paths}


def record_command(label: str, line: str) -> dict[str, Any]:
    """Run one command; describe its answer and what it wrote."""
    told: dict[str, Any] = {}
    began, words, stopped = time.monotonic(), [*shlex.split(line), "--json"], 3
    out = words[words.index("--out") + 1] if "--out" in words else ""
    if label.endswith(" resumed"):
        stopped, printed = interrupt_run(words, out)
        told["interrupted"] = {"status": stopped, **describe_json(json.loads(printed or "{}"))}
        words = [words[0], "--resume", out, "--quiet", "--json"]
    status, printed, complained = run_python("-m", "frugalvit.cli", *words)
    told["status"] = status
    if stopped != 3 or status != 2 * label.startswith("mistaken"):
        told["wrong"] = True
        print(f"WRONG: {label}: status {status}, {stopped} after SIGTERM. {complained[-2000:]}", file=sys.stderr)
    answer = json.loads(printed or "{}")
    told["answer"] = describe_json(answer)
    if label in OF_THE_MACHINE:
        del told["answer"]["values"]
    if label.startswith("list ") and status == 0:
        told["names"] = sorted(one["name"] for one in answer.get(words[1], []))
    if out:
        told["wrote"] = describe_output(Path(out))
    print(f"{time.monotonic() - began:6.1f} s  {label}", flush=True)
    return told


def record_help() -> dict[str, list[str]]:
    """List the commands, and the usage, arguments and flags of each, with choices."""
    found: dict[str, list[str]] = {}
    for command in re.findall(r"^  (\S+(?: \S+)?)  +\S", run_python("-m", "frugalvit.cli", "--help")[1], re.MULTILINE):
        text = run_python("-m", "frugalvit.cli", *command.split(), "--help")[1]
        found[command] = sorted(re.findall(r"^(?:  |(?=usage: ))(\S.*?)(?:  .*)?$", text, re.MULTILINE))
    return found


def print_startup() -> None:
    """Print what ``frugalvit --help`` costs, and whether it imports torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_python("-m", "frugalvit.cli", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    imported = run_python("-X", "importtime", "-m", "frugalvit.cli", "--help")[2]
    torch = "imports torch" if re.search(r"\| +torch$", imported, re.MULTILINE) else "does not import torch"
    print(f"frugalvit --help takes {took:.2f} s of processor time and {torch}")


def record_all(source: Path) -> dict[str, Any]:
    """Record all about the code in ``source``, in the current folder."""
    os.environ |= {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "COLUMNS": "1000"}
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    os.environ |= {name: str(Path(name).resolve()) for name in ("FRUGALVIT_CACHE", "FRUGALVIT_DATASETS")}
    write_images()
    status, printed, complained = run_python("-c", NAMES)
    public = json.loads(printed) if status == 0 else {"file": ""}
    if not Path(public["file"]).is_relative_to(source):
        raise SystemExit(f"'import frugalvit' fails, or finds another than that in {source}. {complained}")
    print_startup()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "timm", "numpy", "pillow")}
    told = {"machine": {"processor": platform.machine(), **versions}, "help": record_help(), "commands": {}}
    told |= {"names": public["names"], "takes": public["takes"]}
    with ThreadPoolExecutor(2) as pool:
        for commands in ROUNDS:
            answers = pool.map(record_command, commands.keys(), commands.values())
            told["commands"] |= dict(zip(commands, answers, strict=True))
    return told


def list_differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """List what two records do not have in common, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            where = f"{place} > {key}" if place else key
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
    recording, comparing = verbs.add_parser("record"), verbs.add_parser("compare")
    recording.add_argument("out", type=Path)
    recording.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    comparing.add_argument("records", type=Path, nargs=2, metavar="RECORD")
    given = parser.parse_args()
    if given.verb == "compare":
        found = list(list_differences(*(json.loads(path.read_text(encoding="utf-8")) for path in given.records)))
        print("\n".join(found) or "no difference")
        return int(bool(found))
    out, source = given.out.resolve(), given.source.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        told = record_all(source)
        os.chdir(out.parent)
    out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return int(any("wrong" in one for one in told["commands"].values()))


if __name__ == "__main__":
    sys.exit(main())
