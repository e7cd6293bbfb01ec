"""What a pre-trained run is worth by every probe; kept beside it, so that a table that goes on asks only once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frugalvit.utils.files import read_json, write_text

_KEPT = "reproduced.json"
_LOOKED_AT = 512  # images


def probe_scores(run: Path, data: str, device: str) -> dict[str, Any]:
    """k-NN, linear and logistic top-1 of a run; its correspondences (Fig. 8) and its attention's entropy (Fig. 7)."""
    if kept := _kept(run):
        return kept
    from frugalvit.config.probe import KnnConfig, LinearConfig, LogisticConfig
    from frugalvit.probing import commands

    asked = {"model": str(run), "data": data, "device": device, "batch": 256}
    found: dict[str, Any] = {
        "knn": commands.knn(KnnConfig.parse(asked)).data["top1"],
        "linear": commands.linear(LinearConfig.parse(asked)).data["top1"],
        "logistic": commands.logistic(LogisticConfig.parse(asked)).data["top1"],
    }
    found |= _looked_at(str(run), data, device)
    write_text(run / _KEPT, json.dumps(found, indent=1))
    return found


def _kept(run: Path) -> dict[str, Any]:
    """What was found before.

    Once it was written into probes.json, where every probe keeps its whole result: numbers there are the old scores.
    """
    kept = read_json(run / _KEPT, dict)
    if kept is None:
        probes = read_json(run / "probes.json", dict) or {}
        kept = {name: value for name, value in probes.items() if isinstance(value, int | float)}
    return kept


def _looked_at(run: str, data: str, device: str) -> dict[str, float]:
    """Correspondences between two views (per cent right, pixels off) and how widely the last block looks (bits)."""
    from frugalvit.data import open_data
    from frugalvit.engine.hardware import pick_device
    from frugalvit.experiment.load_model import load_model
    from frugalvit.visualization.attention import mean_entropy
    from frugalvit.visualization.correspondence import evaluate_correspondence
    from frugalvit.visualization.model_views import shown_batches, spread_evenly

    backbone = load_model(run, device=pick_device(device)).backbone
    images = list(shown_batches(spread_evenly(open_data(data).splits["test"], _LOOKED_AT), backbone, 64, "looking"))
    matches = evaluate_correspondence(backbone, images)
    return {
        "match_accuracy": round(100 * matches.accuracy, 2),
        "match_error_px": round(matches.error, 2),
        "attention_bits": round(mean_entropy(backbone, images), 3),
    }
