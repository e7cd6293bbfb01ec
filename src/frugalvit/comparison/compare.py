"""``frugalvit compare``: run several settings on the same data and seeds, with a paired test."""

import json
import math
import pkgutil
import time
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from frugalvit.comparison import statistics
from frugalvit.config.base import flatten, set_dotted
from frugalvit.config.compare import CompareConfig, Compared
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.config.train import FREE_ON_RESUME, RunConfig, TrainConfig, same_value
from frugalvit.engine.distributed import is_rank_zero
from frugalvit.errors import Interrupted, UserError, did_you_mean
from frugalvit.experiment.builders import check_out_outside_data, stores
from frugalvit.experiment.summary import finite
from frugalvit.runs import layout
from frugalvit.runs.layout import check_free_for_comparison, contains_run, missing_parents, remove_empty_run
from frugalvit.runs.run_folder import RunFolder, read_summary
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, write_text
from frugalvit.utils.scores import SCORE_NAMES, as_percent, is_percent, main_score, read_scores, share_interval
from frugalvit.utils.tables import CommandResult, Table, as_csv, as_latex, as_markdown, as_text, markdown_text
from frugalvit.utils.text import pluralize, truncate_list

Scores = dict[str, list[dict[str, Any]]]
Plans = dict[str, list[RunConfig]]
Train = Callable[[Any], CommandResult]

_NOT_PART_OF_REQUEST = ("out", "resume", *FREE_ON_RESUME)
"""Options that may differ between a stored run and the requested one."""

_SCORES = {
    "train": [
        *(f"{split}{name}" for split in ("", "val_") for name in ("top1", "mean_per_class", "map", "r2")),
        *("top5", "f1", "mae", "rounded", "localization_error", "constant_answer_error"),
    ],
    "detect": [
        *(f"{kind}_{ap}" for kind in ("box", "mask") for ap in ("ap", "ap50", "ap75")),
        *(f"{kind}_ap_{size}" for kind in ("box", "mask") for size in ("small", "medium", "large")),
        "val_box_ap",
    ],
    "pretrain": ["knn", "linear", "logistic", "match_accuracy", "match_error_px", "attention_bits", "effective_rank"],
    "segment": ["miou", "mean_accuracy", "pixel_accuracy", "single_scale_miou", "val_miou"],
}
_PER_IMAGE_SCORES = ("top1", "top5", "mean_per_class", "knn", "linear", "logistic")
_FACTS = ["seconds", "seconds_per_step", "steps", "skipped_steps", "best_step", "parameters", "scored_images"]


def known_metrics(task: str) -> list[str]:
    """Return the names of the numbers that a run of this task can have; a run may lack some."""
    return _SCORES[task] + _FACTS


_COMPARED: dict[type[Compared], tuple[type[RunConfig], str, str]] = {
    CompareConfig: (TrainConfig, "frugalvit.tasks.classification.train:train", "compare"),
    DetectCompareConfig: (DetectConfig, "frugalvit.tasks.detection.commands:train", "detect compare"),
    SegmentCompareConfig: (SegmentConfig, "frugalvit.tasks.segmentation.commands:train", "segment compare"),
}


def compare(config: CompareConfig | DetectCompareConfig | SegmentCompareConfig) -> CommandResult:
    """Compare settings of classifiers, detectors or segmenters."""
    kind, train, command = _COMPARED[type(config)]
    return compare_runs(config, kind, pkgutil.resolve_name(train), command)


def compare_runs(
    config: Compared,
    kind: type[RunConfig],
    train: Train,
    command: str,
    settings: dict[str, dict[str, Any]] | None = None,
    score: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> CommandResult:
    """Run every setting with every seed, except finished runs. Write Markdown, CSV, LaTeX and a chart.

    kind:     the configuration class of one run
    train:    the function that runs it
    command:  what the user typed
    settings: by default those of the configuration
    score:    turns the summary of a run into the one to compare
    """
    if config.data is None:
        raise UserError(f"There is no data to compare on. Pass a folder: 'frugalvit {command} DATA --with …'.")
    known = known_metrics(kind.recipe_task)
    metric = config.metric
    if metric not in ("auto", *known):
        raise UserError(
            f"--metric {config.metric} is not a number of these runs.{did_you_mean(config.metric, known)} They have "
            f"{', '.join(known)}."
        )
    settings = settings or config.named_settings()
    check_out_outside_data(config)

    def plan(folder: Path) -> Plans:
        """Return the configurations of all runs of a comparison in this folder: one per seed and setting."""
        return {
            name: [
                kind.parse(config.run_values(values, seed, str(folder / name / f"seed_{seed}")))
                for seed in range(config.seed, config.seed + config.seeds)
            ]
            for name, values in settings.items()
        }

    default = Path("runs") / "_".join([*command.split(), Path(config.data).resolve().name])
    # All options are parsed before the first run: a mistake in the last setting shows at once.
    folder, plans = (Path(config.out), plan(Path(config.out))) if config.out else _find_folder(default, plan)
    if not config.redraw and (others := _other_settings(folder, settings)):
        raise UserError(f"{folder} holds a comparison with {', '.join(others)}. Name these, or choose another --out.")
    check_free_for_comparison(folder)
    scores: Scores = {name: [] for name in settings}
    pending = sum(read_summary(Path(str(run.out))) is None for runs in plans.values() for run in runs)
    with stores.shared():  # all runs train on the same decoded images
        done, started = 0, time.monotonic()
        for k in range(config.seeds):
            for name in settings:
                done += read_summary(Path(str(plans[name][k].out))) is None
                summary = run_once(plans[name][k], train)
                scores[name].append(score(summary) if score else summary)
                metric = main_score(scores[name][-1]) if metric == "auto" else metric
                _check_metric(scores[name][-1], metric)  # after the first run, not after the last
                if 0 < done < pending:
                    left = console.clock((time.monotonic() - started) * (pending - done) / done)
                    console.info(f"run {done} of {pending} is done: about {left} left")
    if not is_rank_zero(config.devices, config.nodes):
        return CommandResult({"run": str(folder)})
    question = _ask_which(settings, Path(config.data).resolve().name)
    return write_comparison(folder, scores, metric, config.report, question, _describe_settings(settings))


def _ask_which(settings: dict[str, dict[str, Any]], data: str) -> str:
    names = list(settings)
    is_drloc = all(key.startswith("localization.") for values in settings.values() for key in flatten(values))
    if is_drloc and names == ["with", "without"]:
        return f"Does Drloc help on {data}?"
    return f"Which is better on {data}: {', '.join(names[:-1])} or {names[-1]}?"


def _describe_settings(settings: dict[str, dict[str, Any]]) -> str:
    """Return the options of each setting: "with: localization.weight=paper; without: localization.weight=0"."""
    texts = ("".join(f" {key}={as_text(value)}" for key, value in flatten(s).items()) for s in settings.values())
    return "; ".join(f"{name}:{text or ' the defaults'}" for name, text in zip(settings, texts, strict=True))


def _find_folder(default: Path, plan: Callable[[Path], Plans]) -> tuple[Path, Plans]:
    """Return the default folder, or the next with a number: one with this comparison, or a free one."""
    folder, number = default, 1
    while True:
        plans = plan(folder)
        differences = (find_difference(Path(str(run.out)), run) for runs in plans.values() for run in runs)
        if not _other_settings(folder, plans) and not any(differences):
            return folder, plans
        number += 1
        folder = default.with_name(f"{default.name}_{number}")


def _other_settings(folder: Path, settings: Iterable[str]) -> list[str]:
    """Return the settings of a comparison in the folder that are not among these."""
    finished = (read_json(folder / layout.COMPARISON, dict) or {}).get("settings", {})
    started = (path.parent.parent.name for path in sorted(folder.glob(f"*/seed_*/{layout.REQUEST}")))
    return [name for name in dict.fromkeys([*finished, *started]) if name not in settings]


def run_once(config: RunConfig, train: Train) -> dict[str, Any]:
    """Return the summary of one run: read it, resume the run, or start it."""
    folder, rank_zero = Path(str(config.out)), is_rank_zero(config.devices, config.nodes)
    created = missing_parents(folder)
    _check_request(folder, config)
    summary = read_summary(folder)
    if summary is not None:
        return summary | {"run": str(folder)}  # the comparison may have been moved since
    started = contains_run(folder)
    console.info(f"{'resuming' if started else 'starting'} {folder}")
    try:
        result = train(_resumed(config) if started else config)
    except UserError:
        if rank_zero:
            remove_empty_run(created)
        raise
    if "stopped" in result.data or result.stop_requested:
        if not rank_zero:
            raise SystemExit(0)  # with another status the launcher kills rank 0, which still writes
        raise Interrupted
    return read_summary(folder) or result.data  # the file also has what --json leaves out


def _resumed(config: RunConfig) -> RunConfig:
    """Return the configuration that resumes a run, with the options that may change."""
    values: dict[str, Any] = {"resume": str(config.out)}
    for name in FREE_ON_RESUME:
        set_dotted(values, name, attrgetter(name)(config))
    return type(config).parse(values)


def _check_request(folder: Path, config: RunConfig) -> None:
    """Raise an error if the folder's run has other options; store the options of a new run."""
    started = contains_run(folder) or (folder / layout.SUMMARY).exists()
    if started and (difference := find_difference(folder, config)):
        raise UserError(f"{difference}. Choose another --out.")
    path = make_folder(folder) / layout.REQUEST
    if is_rank_zero(config.devices, config.nodes) and (not started or not path.exists()):
        write_text(path, json.dumps(_request(config), indent=1))


def find_difference(folder: Path, config: RunConfig) -> str:
    """Describe the first option in which a folder's run differs from the requested run; empty if none."""
    stored = read_json(folder / layout.REQUEST, dict)
    if not stored:
        return ""
    before, now = flatten(stored), flatten(_request(config))
    for name in dict.fromkeys([*before, *now]):
        if not same_value(name, now.get(name), before.get(name)):
            return f"{folder} was run with {name} = {before.get(name)}, not {now.get(name)}"
    return ""


def _request(config: RunConfig) -> dict[str, Any]:
    request: dict[str, Any] = {}
    for name, value in flatten(config.model_dump(mode="json")).items():
        if name not in _NOT_PART_OF_REQUEST:
            set_dotted(request, name, value)
    return request


# -- the tables


def write_comparison(
    folder: Path, scores: Scores, metric: str, report: bool = True, question: str = "", meaning: str = ""
) -> CommandResult:
    """Write the verdict, tables of means, runs and differences to the last setting in four formats, and a chart."""
    summaries = [summary for group in scores.values() for summary in group]
    values = {name: [as_percent(metric, summary[metric]) for summary in group] for name, group in scores.items()}
    spreads = {name: statistics.spread(numbers) for name, numbers in values.items()}
    *others, baseline = scores
    differences = _differences(scores, values, metric)
    is_score = is_percent(metric)
    words: dict[str, Any] = {} if is_score else {"verbs": ("raises", "lowers"), "unit": f"in {metric}"}
    words["images"] = min(int(summary.get("scored_images") or 0) for summary in summaries)
    verdicts = {name: differences[name].describe(name, baseline, **words) for name in others}
    luck = "images" if len(scores[baseline]) == 1 else "seeds and images" if _pseudo_values(scores, metric) else "seeds"
    columns = ["setting", SCORE_NAMES.get(metric, metric), f"95 %, {luck}", "seeds", f"against {baseline}"]
    intervals = _intervals(scores, spreads, metric)
    sign = " %" if is_score else ""
    ranges = {
        name: " to ".join(f"{end:{'.1f' if sign else '.3g'}}" for end in ends) + sign if ends else "-"
        for name, ends in intervals.items()
    }
    rows: list[list[object]] = [
        [name, f"{spread}{sign}", ranges[name], spread.count, str(differences.get(name, "-"))]
        for name, spread in spreads.items()
    ]
    floors = _floors(scores) if metric == "top1" else {}
    if floors:
        columns.append("floor")
        texts = (f"{floor:.1f} % ({low:.1f} to {high:.1f})" for floor, low, high in floors.values())
        rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    facts = ["seed", metric, "seconds", "seconds_per_step", "run"]
    every_run = [[name, *(summary[fact] for fact in facts)] for name, group in scores.items() for summary in group]
    where = _describe_images(summaries, metric)
    markdown = "".join(f"{markdown_text(text)}.\n\n" for text in [*verdicts.values(), where] if text)
    texts = (markdown + as_markdown(columns, rows), as_csv(["setting", *facts], every_run), as_latex(columns, rows))
    for name, text in zip(layout.COMPARISON_TABLES, texts, strict=True):
        write_text(folder / name, text)
    _draw_chart(folder, scores, values, metric)
    data = {
        "run": str(folder),
        "question": question,
        "meaning": meaning,
        "metric": metric,
        "verdict": "; ".join(verdicts.values()),
        "verdicts": verdicts,
        "scored": where,
        "luck": luck,
        "table": {"columns": columns, "rows": rows},
        "settings": {
            name: {"mean": spreads[name].mean, "deviation": spreads[name].deviation, "values": values[name]}
            | ({"floor": floors[name][0]} if floors else {})
            for name in scores
        },
        "differences": {
            name: {key: finite(value) for key, value in vars(difference).items()}
            for name, difference in differences.items()
        },
        "seconds_per_step": {
            name: finite(statistics.spread([s["seconds_per_step"] or math.nan for s in group]).mean)
            for name, group in scores.items()
        },
    }
    write_text(folder / layout.COMPARISON, json.dumps(data, indent=1))
    files = [*layout.COMPARISON_TABLES, layout.COMPARISON_CHART]
    if report:
        from frugalvit.report.html import write_report

        write_report([folder], folder / layout.REPORT)
        files.append(layout.REPORT)
    notes = [*verdicts.values(), f"{folder}: {', '.join(files)}"]
    if below := [n for n, (_, low, _) in floors.items() if all(s["top1"] < low for s in scores[n])]:
        notes.append(f"clearly below the floor: {', '.join(below)}; simple methods without a network score higher")
    if failed := [str(s["run"]) for s in summaries if s.get("at_chance")]:
        notes.append(f"{len(failed)} of {pluralize(len(summaries), 'run')} ended at chance: {truncate_list(failed, 3)}")
    title = ". ".join(text for text in (where, meaning) if text)
    return CommandResult(data, [Table(columns, rows, title)], notes)


def _differences(scores: Scores, values: dict[str, list[float]], metric: str) -> dict[str, statistics.Difference]:
    """Return each setting's difference from the last, at Holm's levels; by seeds alone if the images differ."""
    *others, baseline = scores
    summaries = [summary for group in scores.values() for summary in group]
    step, parts = _resolution(metric, summaries), _pseudo_values(scores, metric)
    differences: dict[str, statistics.Difference] = {}
    for name in others:
        difference = statistics.paired_difference(values[name], values[baseline], step)
        if parts and difference.count > 1:
            difference = statistics.crossed_difference(parts[name], parts[baseline], difference.mean, step)
        differences[name] = difference
    levels = statistics.holm_levels([difference.p_value for difference in differences.values()])
    return {
        name: difference if math.isnan(difference.p_value) else difference.at_level(level)
        for (name, difference), level in zip(differences.items(), levels, strict=True)
    }


def _pseudo_values(scores: Scores, metric: str) -> dict[str, list[list[float]]]:
    """Return the metric's pseudo-values by setting and seed; {} if the runs were not scored on the same images."""
    summaries = [summary for group in scores.values() for summary in group]
    stored = [summary.get("pseudo_values", {}).get(metric, ()) for summary in summaries]
    images = {
        (summary.get("scored_on"), summary.get("scored_images"), len(part))
        for summary, part in zip(summaries, stored, strict=True)
    }
    if len(images) > 1 or not stored[0]:
        return {}
    return {
        name: [[as_percent(metric, value) for value in summary["pseudo_values"][metric]] for summary in group]
        for name, group in scores.items()
    }


def _describe_images(summaries: list[dict[str, Any]], metric: str) -> str:
    """Return what the runs were scored on, e.g. "200 images of val; chance 50.0 %"; "" if they differ."""
    scores = [score for summary in summaries for score in read_scores(summary)]
    own = [score for score in scores if score.name == SCORE_NAMES.get(metric)] or scores[:1]
    texts = {str(score).rpartition(" on ")[2] for score in own}
    return texts.pop() if len(texts) == 1 else ""


def _floors(scores: Scores) -> dict[str, tuple[float, float, float]]:
    """Return what simple methods reach on the images of each setting, with the 95 % interval; {} if a run has none."""
    floors = {name: [summary.get("floor", {}).get("best") for summary in group] for name, group in scores.items()}
    if any(best is None for group in floors.values() for best in group):
        return {}
    means = {name: statistics.spread(group).mean for name, group in floors.items()}
    images = {name: max(int(summary.get("scored_images") or 1) for summary in group) for name, group in scores.items()}
    return {name: (mean, *share_interval(mean, images[name])) for name, mean in means.items()}


def _draw_chart(folder: Path, scores: Scores, values: dict[str, list[float]], metric: str) -> None:
    """Draw the evaluations while training and the final values."""
    from frugalvit.comparison.chart import comparison_figure
    from frugalvit.utils.plotting import save

    splits: set[str] = set()
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for name, summaries in scores.items():
        runs = [RunFolder(Path(summary["run"]), writer=False).metrics() for summary in summaries]
        lines = [[line for line in run if line.get("split") in ("val", "test") and metric in line] for run in runs]
        curves[name] = [[(line["epoch"], as_percent(metric, line[metric])) for line in run] for run in lines]
        splits |= {line["split"] for run in lines for line in run}
    scored = {str(summary["scored_on"]) for group in scores.values() for summary in group if summary.get("scored_on")}
    labels = None
    if splits and scored:  # without curves the metric is a fact of the run, not a score
        labels = (
            f"{metric} on {'/'.join(sorted(splits))} while training",
            f"final {metric} on {'/'.join(sorted(scored))}",
        )
    save(comparison_figure(values, curves, metric, labels), folder / layout.COMPARISON_CHART)


def _resolution(metric: str, summaries: list[dict[str, Any]]) -> float | None:
    """Return what one image is worth in per cent, if the metric counts images."""
    counts = [summary.get("scored_images") for summary in summaries]
    if metric not in _PER_IMAGE_SCORES or not all(isinstance(count, int) and count > 0 for count in counts):
        return None
    return 100 / min(count for count in counts if count)


def _check_metric(summary: dict[str, Any], metric: str) -> None:
    """Raise an error if a run lacks the number to compare."""
    numbers = [name for name, value in summary.items() if isinstance(value, int | float)]
    if metric not in numbers:
        raise UserError(
            f"{summary['run']} has no number '{metric}' to compare.{did_you_mean(metric, numbers)} It has "
            f"{', '.join(numbers)}. Set another --metric; finished runs are not repeated."
        )


def _intervals(
    scores: Scores, spreads: dict[str, statistics.Spread], metric: str
) -> dict[str, tuple[float, float] | tuple[()]]:
    """Return each setting's 95 % interval over seeds and images, never narrower than that of one run; () if unknown."""
    parts = _pseudo_values(scores, metric)
    intervals: dict[str, tuple[float, float] | tuple[()]] = {}
    for name, group in scores.items():
        scored = (score for run in group for score in read_scores(run) if score.name == SCORE_NAMES.get(metric))
        ends = [score.interval for score in scored if score.interval]
        found = [(fmean(low for low, _ in ends), fmean(high for _, high in ends))] if ends else []  # of one run
        if len(group) > 1:
            found = [*found, statistics.mean_interval(spreads[name].mean, parts[name])] if parts else []
        most = 100.0 if is_percent(metric) else math.inf
        least = -math.inf if metric.endswith("r2") else 0.0  # R² may be negative, shares and errors not
        low, high = min((low for low, _ in found), default=0.0), max((high for _, high in found), default=0.0)
        intervals[name] = (max(least, low), min(most, high)) if found else ()
    return intervals
