"""``frugalvit doctor``: what is installed, what it runs on, what is missing and the line that installs it."""

from __future__ import annotations

import platform
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from frugalvit import __version__
from frugalvit.config.tools import DoctorConfig
from frugalvit.data.paths import cache_root, datasets_root
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

# Extras that people who use frugalvit want; "dev" and "docs" are for those who build it.
USEFUL = {
    "streams": "Hugging Face datasets, Parquet, s3:// and the like",
    "tracking": "W&B, MLflow, Trackio",
    "export": "ONNX",
    "video": "UCF101's middle frames",
}


def doctor(config: DoctorConfig) -> CommandResult:
    """Look at the installation and the machine; status 1 when something that is needed is missing or too old."""
    packages, extras = _packages()
    devices = _devices()
    caches = _caches() if config.cache else []
    problems = [f"{p['name']} {p['found'] or 'is missing'}: {p['wanted']} is needed" for p in packages if not p["ok"]]
    wanting = [extra["name"] for extra in extras if extra["missing"]]
    data: dict[str, Any] = {
        "frugalvit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "extras": extras,
        "caches": caches,
        "problems": problems,
        "exit": 1 if problems else 0,
    }
    notes = list(problems)
    if wanting:
        notes.append(f'to add what is missing:  pip install "frugalvit[{",".join(wanting)}]"')
    notes.append(
        "Something needs mending first." if problems else "Ready: frugalvit demo, or frugalvit advise YOUR_IMAGES/"
    )
    return CommandResult(data, _tables(data), notes)


def _packages() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the installed package says it needs, against what is there."""
    needed: list[dict[str, Any]] = []
    optional: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for text in metadata.requires("frugalvit") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed.append(_state(requirement))
            continue
        for name in USEFUL:
            if requirement.marker.evaluate({"extra": name}):
                optional[name].append(_state(requirement))
    extras = [
        {
            "name": name,
            "for": what,
            "missing": [package["name"] for package in optional[name] if not package["ok"]],
            "install": f'pip install "frugalvit[{name}]"',
        }
        for name, what in USEFUL.items()
    ]
    return needed, extras


def _state(requirement: Requirement) -> dict[str, Any]:
    name = canonicalize_name(requirement.name)
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = None
    ok = found is not None and requirement.specifier.contains(found, prereleases=True)
    return {"name": name, "wanted": str(requirement.specifier), "found": found, "ok": ok}


def _devices() -> list[dict[str, Any]]:
    import torch

    from frugalvit.utils.system import available_memory, cores

    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "units": f"{pluralize(cores(), 'core')}, {pluralize(torch.get_num_threads(), 'thread')}",
            "memory_gib": round(available_memory() / 2**30, 1),
            "memory": "free now",
            "bf16": False,
        }
    ]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": facts.name,
                "units": f"{facts.multi_processor_count} multiprocessors",
                "memory_gib": round(facts.total_memory / 2**30, 1),
                "memory": "in all",
                "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            }
        )
    if torch.backends.mps.is_available():
        found.append(
            {"device": "mps", "name": "Apple GPU", "units": "", "memory_gib": None, "memory": "", "bf16": False}
        )
    return found


def _caches() -> list[dict[str, Any]]:
    """Each folder of the cache with its files and bytes; all of them can be deleted."""
    root = cache_root()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if datasets_root() not in folders and datasets_root().is_dir():
        folders.append(datasets_root())
    found = []
    for folder in console.progress(folders, label="adding up the cache"):
        sizes = [size for size in map(_size, folder.rglob("*")) if size is not None]
        found.append({"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)})
    return found


def _size(path: Path) -> int | None:
    """Bytes of a file; None for folders, links and what vanished meanwhile."""
    try:
        return path.stat().st_size if path.is_file() and not path.is_symlink() else None
    except OSError:
        return None


def _tables(data: dict[str, Any]) -> list[Table]:
    head = f"frugalvit {data['frugalvit']}, Python {data['python']}, {data['platform']}"
    packages = [[p["name"], p["found"], p["wanted"] or "any", "ok" if p["ok"] else "mend"] for p in data["packages"]]
    devices = [
        [d["device"], d["name"], d["units"], f"{d['memory_gib']} {d['memory']}" if d["memory"] else None, d["bf16"]]
        for d in data["devices"]
    ]
    extras = [[e["name"], e["for"], ", ".join(e["missing"]) or "nothing"] for e in data["extras"]]
    caches = [[c["folder"], c["files"], f"{c['bytes'] / 2**20:,.1f} MiB"] for c in data["caches"]]
    tables = [
        Table(["package", "installed", "needed", ""], packages, head),
        Table(["device", "name", "what", "GiB of memory", "bf16"], devices),
        Table(["extra", "for", "missing"], extras),
    ]
    return [*tables, Table(["cache folder", "files", "size"], caches)] if caches else tables
