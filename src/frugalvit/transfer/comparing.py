"""``frugalvit detect compare`` and ``segment compare``: the same tables and tests as ``frugalvit compare``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frugalvit import console
from frugalvit.config.transfer import (
    DetectCompareConfig,
    DetectConfig,
    SegmentCompareConfig,
    SegmentConfig,
    TransferConfig,
)
from frugalvit.errors import UserError
from frugalvit.files import make_folder
from frugalvit.results import Result
from frugalvit.training.compare import write_comparison
from frugalvit.transfer import detect_commands, segment_commands

Train = Callable[[Any], Result]


def detect(config: DetectCompareConfig) -> Result:
    return _compare(config, DetectConfig, detect_commands.train)


def segment(config: SegmentCompareConfig) -> Result:
    return _compare(config, SegmentConfig, segment_commands.train)


def _compare(config: DetectCompareConfig | SegmentCompareConfig, kind: type[TransferConfig], train: Train) -> Result:
    """Run what is not finished yet, then write Markdown, CSV, LaTeX and a chart."""
    if config.data is None:
        raise UserError(f"What should be compared on? Give a folder: 'frugalvit {kind.recipe_task()} compare DATA …'.")
    settings = config.named_settings()
    folder = make_folder(Path(config.out or f"runs/compare_{kind.recipe_task()}_{Path(config.data).name}"))
    plans = {
        name: [
            kind.parse(config.run_values(values, config.seed + k, str(folder / name / f"seed_{config.seed + k}")))
            for k in range(config.seeds)
        ]
        for name, values in settings.items()
    }
    scores: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for k in range(config.seeds):
        for name in settings:
            scores[name].append(_run_once(plans[name][k], kind, train))
    return write_comparison(folder, scores, config.metric, config.track)


def _run_once(config: TransferConfig, kind: type[TransferConfig], train: Train) -> dict[str, Any]:
    """The summary of one run: read if it is finished, resumed if it was begun, else trained."""
    folder = Path(str(config.out))
    finished = folder / "summary.json"
    if finished.exists():
        had = kind.from_yaml(folder / "config.yaml")
        for name in ("data", "init", "seed", "recipe", "head"):
            if getattr(had, name, None) != getattr(config, name, None):
                raise UserError(f"{folder} was run with another {name} ({getattr(had, name)}): choose another --out.")
        return json.loads(finished.read_text(encoding="utf-8"))
    begun = (folder / "config.yaml").exists()
    console.say(f"{'continuing' if begun else 'starting'} {folder}")
    result = train(kind.parse({"resume": str(folder), "device": config.device}) if begun else config)
    if "stopped" in result.data:
        raise KeyboardInterrupt
    return result.data
