"""The suite's results as a table (EsViT, Table 10), CSV, LaTeX and bars (Fig. 5)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugalvit.probing.metrics import METRIC_NAMES, Metric
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import Bold, CommandResult, Table, as_csv, as_latex

if TYPE_CHECKING:
    pass

Scores = dict[str, dict[str, Any]]  # by dataset


def average(results: Iterable[dict[str, Any]]) -> float:
    """The mean score of the datasets with a score; NaN if there are none."""
    values = [result["score"] for result in results if "score" in result]
    return statistics.fmean(values) if values else float("nan")


def suite_result(entries: Sequence[Entry], labels: list[str], scores: list[Scores], out: Path) -> CommandResult:
    """Combine the results, and write suite.csv, suite.tex and suite.png into ``out``."""
    complete = [entry for entry in entries if all("score" in model.get(entry.name, {}) for model in scores)]
    averages = [average(model[entry.name] for entry in complete) for model in scores]
    wins = None
    if len(scores) == 2:
        wins = sum(scores[0][entry.name]["score"] > scores[1][entry.name]["score"] for entry in complete)
    table = _table(entries, labels, scores, averages if complete else None)
    labels = _distinct(labels)
    write_text(out / "suite.csv", _csv(complete, labels, scores))
    write_text(out / "suite.tex", _latex(complete, labels, scores, averages))
    if complete:
        _draw(complete, labels, scores, wins, out / "suite.png")
    datasets = {entry.name: _dataset(entry, scores) for entry in entries}
    data: dict[str, Any] = {"average": averages[0] if complete else None, "scored": len(complete), "datasets": datasets}
    if wins is not None:
        data |= {"average_against": averages[1] if complete else None, "wins": wins}
    notes = [f"{out}/suite.csv, suite.tex, suite.png and one JSON file per dataset and model"]
    if wins is not None:
        notes.insert(0, f"{labels[0]} wins on {wins} of {len(complete)} datasets against {labels[1]}")
    missing: list[list[object]] = []
    for entry in entries:
        errors = [model[entry.name]["error"] for model in scores if "error" in model.get(entry.name, {})]
        if errors:
            missing.append([entry.name, "failed", errors[0]])
        elif entry.name not in scores[0]:
            missing.append([entry.name, entry.status, entry.instruction])
    tables = [table]
    if missing:
        tables.append(Table(["dataset", "status", "what to do"], missing, "not scored"))
    return CommandResult(data, tables, notes)


def _csv(entries: Sequence[Entry], labels: list[str], scores: list[Scores]) -> str:
    """Write one line per dataset, unrounded."""
    facts = ["metric", "classes", "train_images", "test_images"]
    rows = [
        [
            entry.name,
            *(scores[0][entry.name][fact] for fact in facts),
            *(model[entry.name]["score"] for model in scores),
        ]
        for entry in entries
    ]
    return as_csv(["dataset", *facts, *labels], rows)


def _latex(entries: Sequence[Entry], labels: list[str], scores: list[Scores], averages: list[float]) -> str:
    """Write one line per dataset, the better of two models in bold."""
    rows = [
        [
            entry.title,
            METRIC_NAMES[scores[0][entry.name]["metric"]],
            *_bold_best([model[entry.name]["score"] for model in scores], 1),
        ]
        for entry in entries
    ]
    last = [["Average", "", *_bold_best(averages, 2)]] if entries else []
    return as_latex(["Dataset", "Metric", *labels], rows, last, left_columns=2)


def _table(entries: Sequence[Entry], labels: list[str], scores: list[Scores], averages: list[float] | None) -> Table:
    columns = ["dataset", "metric", *_distinct(labels), *(["difference"] if len(scores) == 2 else [])]
    rows: list[list[object]] = []
    for entry in entries:
        if entry.name not in scores[0]:
            continue
        values = [model[entry.name].get("score") for model in scores]
        measured = scores[0][entry.name].get("metric", entry.metric)  # own data may turn out to have several labels
        rows.append([entry.title, METRIC_NAMES[measured], *_with_difference(values)])
    if averages is not None:
        rows.append(["Average", "", *_with_difference(averages)])
    return Table(columns, rows, "Logistic regression on frozen features (%)")


def _with_difference(values: Sequence[float | None]) -> list[object]:
    cells: list[object] = list(values)
    if len(values) == 2:
        first, second = values
        cells.append(None if first is None or second is None else f"{first - second:+.2f}")
    return cells


def _dataset(entry: Entry, scores: list[Scores]) -> dict[str, Any]:
    """Describe one dataset for --json."""
    data: dict[str, Any] = {"title": entry.title, "metric": entry.metric, "status": entry.status}
    if entry.name not in scores[0]:
        return data | {"what_to_do": entry.instruction}
    first = {key: value for key, value in scores[0][entry.name].items() if key != "identity"}
    if "error" in first:
        data["status"] = "failed"
    data |= first
    if len(scores) == 2:
        data["against"] = scores[1][entry.name].get("score")
    return data


def _draw(entries: Sequence[Entry], labels: list[str], scores: list[Scores], wins: int | None, path: Path) -> None:
    from frugalvit.probing.figures import suite_figure
    from frugalvit.utils.plotting import save

    values = [[model[entry.name]["score"] for entry in entries] for model in scores]
    title = labels[0] if wins is None else f"{labels[0]} wins on {wins} of {len(entries)} against {labels[1]}"
    figure = suite_figure([entry.title for entry in entries], values[0], values[1] if len(values) == 2 else None, title)
    save(figure, path)


def _distinct(labels: list[str]) -> list[str]:
    """Number the column names if two runs have the same name."""
    return [f"{label} ({number})" if labels.count(label) > 1 else label for number, label in enumerate(labels, 1)]


def _bold_best(values: Sequence[float], digits: int) -> list[str]:
    best = max(values) if len(values) > 1 else None
    texts = [f"{value:.{digits}f}" for value in values]
    return [Bold(text) if value == best else text for value, text in zip(values, texts, strict=True)]


@dataclass(frozen=True)
class Entry:
    """One dataset of the suite: how it is opened and measured, and whether it is there."""

    name: str
    title: str
    data: str
    metric: Metric
    status: str  # present, downloadable, by hand
    instruction: str = ""
