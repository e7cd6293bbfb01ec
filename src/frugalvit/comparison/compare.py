"""``frugalvit compare``: the same data and seeds, two or more settings; tables with deviations and a paired test."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from frugalvit.config.base import merge, set_dotted
from frugalvit.config.compare import CompareConfig, Compared
from frugalvit.config.pretrain import MatchingConfig
from frugalvit.config.run import FREE_ON_RESUME, same_value
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.engine.distributed import is_rank_zero
from frugalvit.errors import Interrupted, UserError, did_you_mean
from frugalvit.experiment.builders import check_out_outside_data, stores
from frugalvit.experiment.summary import finite
from frugalvit.runs.layout import REQUEST_FILE, check_free_for_comparison, missing_parents, remove_empty_run
from frugalvit.runs.run_folder import RunFolder, contains_run, read_summary
from frugalvit.runs.trackers import TensorBoard, make_trackers
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, write_text
from frugalvit.utils.statistics import Difference, Spread, paired_difference, spread
from frugalvit.utils.tables import CommandResult, Table, as_csv, as_latex, as_markdown

Scores = dict[str, list[dict[str, Any]]]
Train = Callable[[Any], CommandResult]
Plans = dict[str, list[RunConfig]]

_NOT_ASKED = ("out", "resume", *FREE_ON_RESUME)
"""What may differ between what a run was asked and what is wanted of it now."""

_PRECISIONS = [f"{kind}_{ap}" for kind in ("box", "mask") for ap in
               ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")]  # fmt: skip
_SCORES = {
    "train": ["top1", "top5", "mean_per_class", "val_top1", "localization_error", "constant_answer_error"],
    "detect": [*_PRECISIONS, "val_box_ap"],
    "segment": ["miou", "mean_accuracy", "pixel_accuracy", "single_scale_miou", "val_miou"],
}
_OF_IMAGES = ("top1", "top5", "mean_per_class")
_FACTS = ["seconds", "seconds_per_step", "steps", "skipped_steps", "best_step", "parameters", "scored_images"]


def known_metrics(task: str) -> list[str]:
    """The numbers that a run of this kind may have; a single run need not have them all."""
    return _SCORES[task] + _FACTS


def compare(config: CompareConfig) -> CommandResult:
    from frugalvit.tasks.classification.train import train

    return compare_runs(config, TrainConfig, train, "compare")


def compare_runs(config: Compared, kind: type[RunConfig], train: Train, command: str) -> CommandResult:
    """Every setting with every seed: run what is not finished yet, then write Markdown, CSV, LaTeX and a chart.

    ``kind`` is the configuration of one run, ``train`` what runs it and ``command`` the words that were typed.
    """
    if config.data is None:
        raise UserError(f"What should be compared on? Give a folder of images: 'frugalvit {command} DATA --with …'.")
    known = known_metrics(kind.recipe_task())
    if config.metric not in known:
        raise UserError(
            f"--metric {config.metric}: runs have no such number.{did_you_mean(config.metric, known)} They have "
            f"{', '.join(known)}."
        )
    settings = config.named_settings()
    check_out_outside_data(config)
    plan = partial(_plans_in, config=config, kind=kind, settings=settings)
    usual = Path("runs") / "_".join([*command.split(), Path(config.data).resolve().name])
    # All are read before the first is run: a mistake in the last setting should not be found at night.
    folder, plans = (Path(config.out), plan(Path(config.out))) if config.out else _free_place(usual, plan)
    if not config.redraw and (others := _others(folder, settings)):
        raise UserError(f"{folder} holds a comparison with {', '.join(others)}: name these too, or another --out.")
    check_free_for_comparison(folder)
    scores: Scores = {name: [] for name in settings}
    with stores.shared():  # every run learns from the same images
        for k in range(config.seeds):
            for name in settings:
                scores[name].append(run_once(plans[name][k], train))
                _check_metric(scores[name][-1], config.metric)  # after the first run, not after the last
    if not is_rank_zero(config.devices, config.nodes):  # one of several processes writes, and its answer is shown
        return CommandResult({"run": str(folder)})
    return write_comparison(folder, scores, config.metric, config.track, config.report)


def _plans_in(folder: Path, config: Compared, kind: type[RunConfig], settings: dict[str, dict[str, Any]]) -> Plans:
    """The configuration of every run of a comparison in this folder: one a seed for each setting."""
    seeds = range(config.seed, config.seed + config.seeds)
    return {
        name: [kind.parse(config.run_values(values, seed, str(folder / name / f"seed_{seed}"))) for seed in seeds]
        for name, values in settings.items()
    }


def _free_place(usual: Path, plan: Callable[[Path], Plans]) -> tuple[Path, Plans]:
    """The usual folder, or the next with a number: one that holds this very comparison, or none."""
    for number in range(1, 10_000):
        folder = usual if number == 1 else usual.with_name(f"{usual.name}_{number}")
        plans = plan(folder)
        asked = (asked_otherwise(Path(str(run.out)), run) for runs in plans.values() for run in runs)
        if not _others(folder, plans) and not any(asked):
            return folder, plans
    raise UserError(f"There are too many comparisons {usual}_…: choose a folder with --out.")


def _others(folder: Path, settings: Iterable[str]) -> list[str]:
    """The settings of a comparison in a folder, finished or begun, that are not among these."""
    told = (read_json(folder / "comparison.json", dict) or {}).get("settings", {})
    begun = (path.parent.parent.name for path in sorted(folder.glob(f"*/seed_*/{REQUEST_FILE}")))
    return [name for name in dict.fromkeys([*told, *begun]) if name not in settings]


def run_once(config: RunConfig, train: Train) -> dict[str, Any]:
    """The summary of one run: read if it is finished, resumed if it was begun, else trained."""
    folder = Path(str(config.out))
    made = missing_parents(folder)
    _same_question(folder, config)
    summary = read_summary(folder)
    if summary is not None:
        return summary | {"run": str(folder)}  # where it lies now: a comparison may have been moved since
    begun = contains_run(folder)
    console.info(f"{'continuing' if begun else 'starting'} {folder}")
    try:
        result = train(_resumed(config) if begun else config)
    except UserError as error:
        if is_rank_zero(config.devices, config.nodes):
            remove_empty_run(made, error)
        raise
    if "stopped" in result.data or result.asked_to_stop:
        if not is_rank_zero(config.devices, config.nodes):
            raise SystemExit(0)  # any other status makes the launcher kill the first process, which has more to do
        raise Interrupted
    return result.data


def _resumed(config: RunConfig) -> RunConfig:
    """The run in its folder goes on as it was begun, but for what is wanted now and no score follows from."""
    values: dict[str, Any] = {"resume": str(config.out)}
    for name in FREE_ON_RESUME:
        set_dotted(values, name, attrgetter(name)(config))
    return type(config).parse(values)


def _same_question(folder: Path, wanted: RunConfig) -> None:
    """A folder's run stands for the wanted one only if it was asked the same; what it was asked lies beside it."""
    begun = contains_run(folder) or (folder / "summary.json").exists()
    if begun and (other := asked_otherwise(folder, wanted)):
        raise UserError(f"{other}: choose another --out.")
    asked = make_folder(folder) / REQUEST_FILE
    if is_rank_zero(wanted.devices, wanted.nodes) and (not begun or not asked.exists()):
        write_text(asked, json.dumps(_question(wanted.model_dump(mode="json")), indent=1))


def asked_otherwise(folder: Path, wanted: RunConfig) -> str:
    """What a folder's run was asked that is not what is wanted, in words; nothing where it was asked the same."""
    stored = read_json(folder / REQUEST_FILE, dict)
    if not stored:
        return ""
    # An option that came after the question was written had its default then, or what was done before there was one.
    defaults = type(wanted).model_construct().model_dump(mode="json")
    if "detector" in defaults:
        defaults["detector"]["octaves"] = 1
    asked = _that_matters(_question(merge(defaults, stored)))
    question = _that_matters(_question(wanted.model_dump(mode="json")))
    for name, value in asked.items():
        if not same_value(name, question.get(name), value):
            return f"{folder} was run with {name} = {value}, now {question.get(name)} is wanted"
    return ""


def _question(values: dict[str, Any], group: str = "") -> dict[str, Any]:
    """The values of a run that a score may follow from; earlier versions wrote down others too."""
    return {
        name: _question(value, f"{group}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if f"{group}{name}" not in _NOT_ASKED
    }


def _that_matters(question: dict[str, Any]) -> dict[str, Any]:
    """A question without what makes no difference: how a loss of no weight is computed, and what is left to itself."""
    matching = question.get("matching")
    if isinstance(matching, dict) and matching.get("view_weight") == "auto":
        weight = MatchingConfig(region_weight=matching["region_weight"]).weights()[0]
        question = question | {"matching": matching | {"view_weight": weight}}
    detector = question.get("detector")
    if isinstance(detector, dict) and detector["anchors"] != "auto" and detector["octaves"] == "auto":
        question = question | {"detector": detector | {"octaves": 1}}
    localization = question.get("localization")
    if not isinstance(localization, dict):
        return question
    if localization.get("weight") == 0:
        localization = {"weight": 0}
    elif localization.get("grid_size") == "auto":
        localization = localization | {"grid_size": None if localization["variant"] == "dense" else 7}
    return question | {"localization": localization}


# -- the tables


def write_comparison(
    folder: Path, scores: Scores, metric: str, track: Iterable[str] = (), report: bool = True
) -> CommandResult:
    """Tables of the means, of every run, and of each setting against the last, in four formats; and to trackers."""
    names = list(scores)
    values = {name: [float(summary[metric]) for summary in scores[name]] for name in names}
    spreads = {name: spread(values[name]) for name in names}
    baseline = names[-1]
    step = _resolution(metric, [summary for summaries in scores.values() for summary in summaries])
    differences = {name: paired_difference(values[name], values[baseline], step) for name in names[:-1]}
    paces = {name: [summary["seconds_per_step"] or math.nan for summary in scores[name]] for name in names}
    pace = {name: spread(paces[name]).mean for name in names}
    rows = _rows(names, values, spreads, differences, pace)
    columns = ["setting", metric, "seeds", f"against {baseline}", "seconds a step", "overhead"]
    write_text(folder / "comparison.md", as_markdown(columns, rows))
    write_text(folder / "comparison.csv", _every_run(metric, scores))
    write_text(folder / "comparison.tex", as_latex(columns, rows))
    lines = {name: [_lines(Path(summary["run"]), metric) for summary in scores[name]] for name in names}
    curves = {name: [[(line["epoch"], line[metric]) for line in run] for run in runs] for name, runs in lines.items()}
    splits = {str(line["split"]) for runs in lines.values() for run in runs for line in run}
    from frugalvit.comparison.chart import comparison_chart

    labels = _labels(metric, splits, [summary for summaries in scores.values() for summary in summaries])
    comparison_chart(values, curves, metric, folder / "comparison.png", labels)
    data = {
        "run": str(folder),
        "metric": metric,
        "settings": {
            n: {"mean": spreads[n].mean, "deviation": spreads[n].deviation, "values": values[n]} for n in names
        },
        "differences": {n: {k: finite(v) for k, v in vars(found).items()} for n, found in differences.items()},
        "seconds_per_step": {n: finite(seconds) for n, seconds in pace.items()},
    }
    write_text(folder / "comparison.json", json.dumps(data, indent=1))
    table = Table(columns, rows, f"{metric} of {folder.name}")
    _show(folder, table, scores, metric, track)
    files = [f"comparison.{kind}" for kind in ("md", "csv", "tex", "png")]
    if report:
        from frugalvit.report.page import write_report

        write_report([folder], folder / "report.html")
        files.append("report.html")
    return CommandResult(data, [Table(columns, rows)], [f"{folder}: {', '.join(files)}"])


def _resolution(metric: str, summaries: list[dict[str, Any]]) -> float | None:
    """What one image more is worth, in per cent, where the metric counts images; runs need not say how many."""
    counts = [summary.get("scored_images") for summary in summaries]
    if metric not in _OF_IMAGES or not all(isinstance(count, int) and count > 0 for count in counts):
        return None
    return 100 / min(count for count in counts if count)


def _check_metric(summary: dict[str, Any], metric: str) -> None:
    """Every run must have the number that is compared."""
    numbers = [name for name, value in summary.items() if isinstance(value, int | float)]
    if metric not in numbers:
        raise UserError(
            f"{summary['run']} has no number '{metric}' to compare.{did_you_mean(metric, numbers)} It has "
            f"{', '.join(numbers)}: say --metric again, what is finished is not repeated."
        )


def _show(folder: Path, table: Table, scores: Scores, metric: str, track: Iterable[str]) -> None:
    """The comparison where its runs are watched: TensorBoard beside them, and the services they were sent to."""
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # a comparison that went on replaces what it showed
    each: list[list[object]] = [[name, s["seed"], s[metric], s["run"]] for name in scores for s in scores[name]]
    services = make_trackers(track, folder, {"metric": metric, "settings": list(scores)})
    for tracker in (TensorBoard(folder / "tensorboard"), services):
        tracker.table(0, "comparison", table)
        tracker.table(0, "runs", Table(["setting", "seed", metric, "run"], each, "Every run"))
        tracker.image(0, "comparison_chart", folder / "comparison.png")
        tracker.close()


def _rows(
    names: list[str],
    values: dict[str, list[float]],
    spreads: dict[str, Spread],
    differences: dict[str, Difference],
    pace: dict[str, float],
) -> list[list[object]]:
    base = pace[names[-1]]
    return [
        [
            name,
            str(spreads[name]),
            len(values[name]),
            str(differences[name]) if name in differences else "-",
            f"{pace[name]:.4f}" if math.isfinite(pace[name]) else "-",
            f"{100 * (pace[name] / base - 1):+.1f} %" if name in differences and base * pace[name] > 0 else "-",
        ]
        for name in names
    ]


def _lines(run: Path, metric: str) -> list[dict[str, Any]]:
    """What a run logged of a metric on the images it watched, from its own folder."""
    lines = RunFolder(run, writer=False).metrics()
    return [line for line in lines if line.get("split") in ("val", "test") and metric in line]


def _labels(metric: str, splits: set[str], summaries: list[dict[str, Any]]) -> tuple[str, str]:
    """What the curves and the final values are: on which images, with which weights."""
    scored = {str(summary["scored_on"]) for summary in summaries if summary.get("scored_on")}
    if not splits or not scored:  # a fact of the run, no score on images
        return metric, f"final {metric}"
    kinds = {_weights_of(summary) for summary in summaries}
    weights = f", {kinds.pop()} weights" if len(kinds) == 1 and None not in kinds else ""
    watched, final = ("/".join(sorted(places)) for places in (splits, scored))
    return f"{metric} on {watched} while training", f"{metric} on {final}{weights}"


def _weights_of(summary: dict[str, Any]) -> str | None:
    """Which weights a run handed out; runs of earlier versions do not say."""
    if "best_step" not in summary:
        return None
    return "last" if summary["best_step"] is None else "best"


def _every_run(metric: str, scores: Scores) -> str:
    """One line per run, for whoever wants to compute something else."""
    facts = ["seed", metric, "seconds", "seconds_per_step", "run"]
    rows = [[name, *(summary[fact] for fact in facts)] for name, summaries in scores.items() for summary in summaries]
    return as_csv(["setting", *facts], rows)
