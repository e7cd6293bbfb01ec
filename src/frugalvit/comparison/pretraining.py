"""``frugalvit pretrain compare``: objectives and backbones without labels, scored by frozen probes.

Each run is scored by k-NN, linear and logistic probes, by region matches between two views (EsViT, Fig. 8), and by the
entropy of the last block's attention (Fig. 7).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.comparison.compare import compare_runs
from frugalvit.comparison.statistics import paired_difference, spread
from frugalvit.config.base import merge
from frugalvit.config.compare import PretrainCompareConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import KnnConfig, LinearConfig, LogisticConfig
from frugalvit.data import open_data
from frugalvit.engine.compile import REPLAYS_FROM
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.probing.knn import knn
from frugalvit.probing.linear import linear
from frugalvit.probing.logistic import logistic
from frugalvit.runs import layout
from frugalvit.tasks.pretraining.train import pretrain
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, write_text
from frugalvit.utils.launch_env import devices_and_nodes
from frugalvit.utils.tables import CommandResult, Table, as_markdown
from frugalvit.visualization.attention import entropy
from frugalvit.visualization.correspondence import evaluate_correspondence
from frugalvit.visualization.model_views import input_batches, model_input, spread_evenly

_WITH_LABELS = ("knn", "linear", "logistic")
SCORES = (*_WITH_LABELS, "match_accuracy", "match_error_px", "attention_bits")
_PACE_STEPS = 20
_VIEWED_IMAGES = 512


def compare_pretraining(config: PretrainCompareConfig) -> CommandResult:
    """Compare settings of ``frugalvit pretrain``; with --minutes each trains for the same time."""
    settings = config.named_settings()
    if config.data and config.metric in _WITH_LABELS and open_data(config.data, root=config.root).classes is None:
        raise UserError(
            f"--metric {config.metric} needs labels, and {config.data} has none. Use --metric match_accuracy, or pass "
            "images in class folders."
        )
    if config.minutes:
        if not config.data:
            raise UserError("There is no data to compare on. Pass a folder: 'frugalvit pretrain compare DATA'.")
        out = config.out or f"runs/pretrain_compare_{Path(config.data).resolve().name}"
        config = config.model_copy(update={"out": out})
        settings = fill_minutes(config, settings)

    def score(summary: dict[str, Any]) -> dict[str, Any]:
        found = probe_scores(Path(summary["run"]), str(config.data), config.device, config.root)
        own = ("pseudo_values", "knn", "knn_interval", "chance")  # of the evaluations while training
        return {name: value for name, value in summary.items() if name not in own} | found

    result = compare_runs(config, PretrainConfig, pretrain, "pretrain compare", settings, score)
    if result.tables:  # on rank 0
        _add_scores(result, Path(result.data["run"]))
    return result


def fill_minutes(config: PretrainCompareConfig, settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give each setting the steps that fit into --minutes. A short run measures its pace, once per folder.

    On a GPU it is just long enough to replay CUDA graphs. A long run is compiled too, and ends a little early.
    """
    assert config.minutes is not None
    if devices_and_nodes(config.devices, config.nodes) != (1, 1):
        raise UserError("--minutes measures the pace of one process. With several, set --steps for each setting.")
    folder = make_folder(Path(str(config.out)))
    paces: dict[str, float] = read_json(folder / "pace.json", dict) or {}
    for name, values in settings.items():
        if name in paces:
            continue
        console.info(f"measuring the pace of {name}")
        out = folder / "pace" / name
        shutil.rmtree(out, ignore_errors=True)  # an interrupted measurement
        steps = REPLAYS_FROM if pick_device(config.device) == "cuda" and config.compile == "auto" else _PACE_STEPS
        short = {"steps": steps, "report": False, "track": []}
        run = PretrainConfig.parse(config.run_values(merge(values, short), config.seed, str(out)))
        paces[name] = pretrain(run).data["seconds_per_step"]
        shutil.rmtree(folder / "pace")
        write_text(folder / "pace.json", json.dumps(paces, indent=1))
    return {
        name: merge(values, {"steps": max(1, round(60 * config.minutes / paces[name]))})
        for name, values in settings.items()
    }


def probe_scores(run: Path, data: str, device: str, root: str | None = None) -> dict[str, Any]:
    """Score a run by all probes, on the test images (else val); its folder caches the scores with the data's hash.

    Data without labels gets the last three scores only. The linear probe sees centre crops, which is faster.
    """
    source, scores = open_data(data, root=root), {}
    fingerprints = {name: images.fingerprint() for name, images in source.splits.items()}
    cached = read_json(run / layout.PROBE_SCORES, dict) or {}
    if cached.pop("fingerprints", None) == fingerprints:
        return cached
    options = {"model": str(run), "data": data, "device": device, "root": root, "batch": 256}
    if source.classes is not None:
        scores = {
            "knn": knn(KnnConfig.parse(options)).data["top1"],
            "linear": linear(LinearConfig.parse(options | {"views": 0})).data["top1"],
            "logistic": logistic(LogisticConfig.parse(options)).data["top1"],
        }
    backbone = load_model(str(run), device=pick_device(device)).backbone
    split = next(name for name in ("test", "val", "train") if name in source.splits)
    images = source.splits[split]
    batches = list(input_batches(spread_evenly(images, _VIEWED_IMAGES), backbone, 64, "correspondences"))
    matches = evaluate_correspondence(backbone, batches)
    with eval_no_grad(backbone):
        weights = (backbone.attention(model_input(backbone, batch)).float() for batch in batches)
        bits = torch.cat([entropy(part).mean(dim=(1, 2)).cpu() for part in weights])  # mean over heads and queries
    scores |= {
        "match_accuracy": round(100 * matches.accuracy, 2),
        "match_error_px": round(matches.error, 2),
        "attention_bits": round(bits.mean().item(), 3),
        "scored_on": split,
        "scored_images": len(images),
    }
    write_text(run / layout.PROBE_SCORES, json.dumps(scores | {"fingerprints": fingerprints}, indent=1))
    return scores


def _add_scores(result: CommandResult, folder: Path) -> None:
    """Add a table of all scores, with paired intervals against the last setting, to the result and the folder."""
    runs = {
        name: [read_json(path, dict) or {} for path in sorted((folder / name).glob(f"seed_*/{layout.PROBE_SCORES}"))]
        for name in result.data["settings"]
    }
    *_, baseline = runs
    shown = [score for score in SCORES if score in runs[baseline][0]]
    rows: list[list[object]] = []
    for score in shown:
        values = {name: [run[score] for run in group] for name, group in runs.items()}
        for name, numbers in values.items():
            difference = "-" if name == baseline else str(paired_difference(numbers, values[baseline]))
            rows.append([score, name, str(spread(numbers)), difference])
    table = Table(["score", "setting", "mean ± deviation", f"against {baseline}"], rows, "all scores")
    result.tables.append(table)
    result.data["scores"] = {name: [{key: run[key] for key in shown} for run in group] for name, group in runs.items()}
    markdown = folder / layout.COMPARISON_TABLES[0]
    write_text(markdown, f"{markdown.read_text(encoding='utf-8')}\n{as_markdown(table.columns, rows)}")
