"""``frugalvit doctor``: check packages, devices and extras."""

import platform
from collections import defaultdict
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from frugalvit import __version__
from frugalvit.config.tools import DoctorConfig
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

# Extras for users; "dev" and "docs" are for contributors.
EXTRAS = {
    "streams": "Hugging Face datasets, Parquet, s3:// and the like",
    "scale": "embedding any number of images with Ray",
    "tracking": "W&B, MLflow, Trackio",
    "export": "ONNX",
    "serve": "the page of 'frugalvit serve'",
    "video": "UCF101's middle frames",
    "science": "multi-channel TIFF and DICOM",
}


def doctor(config: DoctorConfig) -> CommandResult:
    """Check the installation and the machine; status 1 if a required package is missing or too old."""
    packages, extras = _packages()
    devices = _devices()
    problems = [f"{p['name']} {p['found'] or 'is missing'}: needs {p['wanted']}" for p in packages if not p["ok"]]
    incomplete = [extra["name"] for extra in extras if extra["missing"]]
    data: dict[str, Any] = {
        "frugalvit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "extras": extras,
        "problems": problems,
        "exit": 1 if problems else 0,
    }
    notes = list(problems)
    if incomplete:
        notes.append(f'to install missing extras:  pip install "frugalvit[{",".join(incomplete)}]"')
    notes.append("Fix these problems first." if problems else "Ready: frugalvit demo, or frugalvit advise YOUR_IMAGES/")
    return CommandResult(data, _tables(data), notes)


def _packages() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare the required packages and the extras with the installed versions; return both lists."""
    required: list[dict[str, Any]] = []
    optional: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for text in metadata.requires("frugalvit") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required.append(_check(requirement))
            continue
        for name in EXTRAS:
            if requirement.marker.evaluate({"extra": name}):
                optional[name].append(_check(requirement))
    extras: list[dict[str, Any]] = []
    for name, purpose in EXTRAS.items():
        missing = [package["name"] for package in optional[name] if not package["ok"]]
        extras.append({"name": name, "for": purpose, "missing": missing})
    return required, extras


def _check(requirement: Requirement) -> dict[str, Any]:
    name = canonicalize_name(requirement.name)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    ok = version is not None and requirement.specifier.contains(version, prereleases=True)
    return {"name": name, "wanted": str(requirement.specifier), "found": version, "ok": ok}


def _devices() -> list[dict[str, Any]]:
    import torch

    from frugalvit.engine.hardware import is_onednn_slow
    from frugalvit.utils.system import available_memory, cores

    units = f"{pluralize(cores(), 'core')}, {pluralize(torch.get_num_threads(), 'thread')}"
    units += "; oneDNN is off: slow without SVE" if is_onednn_slow() else ""
    memory = round(available_memory() / 2**30, 1)
    rows: list[tuple[object, ...]] = [("cpu", platform.processor() or platform.machine(), units, memory, "free", False)]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        units, memory = f"{gpu.multi_processor_count} multiprocessors", round(gpu.total_memory / 2**30, 1)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        rows.append((f"cuda:{index}", gpu.name, units, memory, "total", has_bf16))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Apple GPU", "", None, "", False))
    return [dict(zip(("device", "name", "units", "memory_gib", "memory", "bf16"), row, strict=True)) for row in rows]


def _tables(data: dict[str, Any]) -> list[Table]:
    head = f"frugalvit {data['frugalvit']}, Python {data['python']}, {data['platform']}"
    packages = [[p["name"], p["found"], p["wanted"] or "any", "ok" if p["ok"] else "fix"] for p in data["packages"]]
    devices = [
        [d["device"], d["name"], d["units"], f"{d['memory_gib']} {d['memory']}" if d["memory"] else None, d["bf16"]]
        for d in data["devices"]
    ]
    extras = [[e["name"], e["for"], ", ".join(e["missing"]) or "nothing"] for e in data["extras"]]
    return [
        Table(["package", "installed", "required", ""], packages, head),
        Table(["device", "name", "units", "GiB of memory", "bf16"], devices),
        Table(["extra", "for", "missing"], extras),
    ]
