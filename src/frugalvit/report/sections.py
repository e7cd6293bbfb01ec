"""The sections of a report: functions from records to HTML, empty if there is nothing to show.

All texts from files (classes, names, options) pass through ``escape``.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from frugalvit.report import svg_charts
from frugalvit.report.run_record import RunRecord, as_finite
from frugalvit.utils import console
from frugalvit.utils.scores import SCORE_NAMES, as_percent, read_scores, score_table
from frugalvit.utils.tables import as_text
from frugalvit.utils.text import pluralize, truncate_list

_LARGEST_TABLE = 30  # classes; of a larger confusion matrix only the most frequent mistakes are shown
_BARS = 15  # classes; the others are folded
_CALIBRATED = 3.0  # points
_CALIBRATION_IMAGES = 100  # fewer say nothing about the confidence
_OPEN = 10  # skipped files; a longer list is folded

_NOT_RESULTS = {"run", "auto", "classes", "confusion", "calibration", "per_class", "notes", "config"}
_FIRST = ("task", "backbone", "data", "top1", "top5", "mean_per_class", "knn", "box_ap", "mask_ap", "miou", "loss")
_MAIN = {*_FIRST[3:-1], "training_images top1", "scored_images", "seconds", "parameters", "health", "effective_rank"}


def section(identity: str, title: str, body: str, lead: str = "", *, folded: bool = False) -> str:
    """Make a section, or a ``folded`` part of the details that opens on a click; empty without a body."""
    if not body:
        return ""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    outer, head = ("details", "summary") if folded else ("section", "h2")
    return f'<{outer} id="{identity}"><{head}>{title}</{head}>{lead}{body}</{outer}>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", marks: Iterable[str] = ()) -> str:
    """Make a table with escaped cells. A row's first cell is its heading, after its mark (HTML)."""
    rows, lines = list(rows), []
    for (first, *rest), mark in itertools.zip_longest(rows, marks, fillvalue=""):
        cells = "".join(f"<td{_align(cell)}>{escape(as_text(cell))}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{mark}{escape(as_text(first))}</th>{cells}</tr>')
    below = [_align(cell) for cell in rows[0]] if rows else [""] * len(columns)  # a heading stands over its numbers
    head = "".join(f'<th scope="col"{side}>{escape(name)}</th>' for name, side in zip(columns, below, strict=True))
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(lines)
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _align(cell: Any) -> str:
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
    return ' class="number"' if is_number or " ± " in str(cell) or str(cell).endswith(" %") else ""


def legend(records: list[RunRecord]) -> str:
    """Make the legend of the lines if there are several kinds of runs."""
    kinds = list(dict.fromkeys(record.kind() for record in records))
    if len(kinds) < 2:
        return ""
    names = {kind: [record.name for record in records if record.kind() == kind] for kind in kinds}
    return legend_of((style, truncate_list(names[kind], 1)) for style, kind in enumerate(kinds))


def legend_of(lines: Iterable[tuple[int, str]]) -> str:
    items = (
        f'<li><svg viewBox="0 0 34 8" aria-hidden="true">{svg_charts.swatch(style, 34)}</svg>{escape(name)}</li>'
        for style, name in lines
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def results(records: list[RunRecord], *, main: bool = False) -> str:
    """Make a table of every run's scalars, or the ``main`` ones: means over seeds first, shared texts below it."""
    scalars = [_scalars(record.summary) for record in records]
    if main:
        scalars = [{key: value for key, value in values.items() if key in _MAIN} for values in scalars]
    keys = dict.fromkeys(key for values in scalars for key in values)
    ordered = sorted(keys, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), list(keys).index(key)))
    if not ordered:
        return ""
    if len(records) == 1:
        scores = score_table(read_scores(records[0].summary))
        others = [key for key in ordered if not _is_score(key)]
        drawn = table(scores.columns, scores.rows, scores.title) if scores.rows else ""
        return drawn + table(["", ""], [[key.replace("_", " "), as_text(scalars[0][key])] for key in others])
    columns = {key: [values.get(key) for values in scalars] for key in ordered}
    common = {key: cells[0] for key, cells in columns.items() if isinstance(cells[0], str) and len(set(cells)) == 1}
    ordered = [key for key in ordered if key not in common]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record, values in zip(records, scalars, strict=True):
        by_kind.setdefault(record.kind(), []).append({"run": record.name} | values)
    rows: list[list[Any]] = []
    for members in by_kind.values():
        if len(members) > 1:
            name = f"mean of {len(members)}: {members[0]['run']} …"
            rows.append([name, *(_mean(key, [values.get(key) for values in members]) for key in ordered)])
    rows += [[values.get(key) for key in ("run", *ordered)] for members in by_kind.values() for values in members]
    below = " · ".join(f"{key.replace('_', ' ')}: {value}" for key, value in common.items())
    drawn = table(["run", *(key.replace("_", " ") for key in ordered)], rows)
    return drawn + (f'<p class="quiet">All runs: {escape(below)}</p>' if below else "")


def comparisons(results: Mapping[str, dict[str, Any]]) -> str:
    """Make the table of each comparison, with headings if there are several."""
    tables = {name: body for name, result in results.items() if (body := _comparison(result))}
    if len(tables) < 2:
        return "".join(tables.values())
    return "".join(f"<h3>{escape(name)}</h3>{body}" for name, body in tables.items())


def _comparison(result: dict[str, Any]) -> str:
    """Show the verdicts, and the table of means and of each setting's paired difference from the last."""
    shown = result.get("table") or {}
    verdicts = list(result.get("verdicts", {}).values())
    scored = [result["meaning"]] if result.get("meaning") else []
    scored += [f"Scored on {result['scored']}"] if result.get("scored") else []
    sentence = "".join(f"<p>{escape(text[:1].upper() + text[1:])}.</p>" for text in [*verdicts, *scored])
    drawn = table(shown["columns"], shown["rows"]) if shown else ""
    if luck := result.get("luck"):
        note = f"± is the deviation over seeds. The 95 % intervals are about the luck of the {luck}."
        drawn += f'<p class="quiet">{escape(note)} More seeds do not make up for few images.</p>'
    return f'<div class="verdict">{sentence}{drawn}</div>' if drawn else ""


def unfinished(records: list[RunRecord]) -> str:
    """Warn that the numbers of an unfinished run are not its result."""
    folders = ", ".join(console.shell_quote(record.folder) for record in records if not record.finished)
    if not folders:
        return ""
    text = f"Not finished: {folders}. The page shows the current state. If a run was stopped, resume it with --resume."
    return f'<p class="lead unfinished">{escape(text)}</p>'


def curves(records: list[RunRecord], *, main: bool) -> str:
    """Draw losses and scores (``main``), or the other curves."""
    panels = [panel for panel in svg_charts.panels(records) if (panel.heading in svg_charts.MAIN) == main]
    drawn = "".join(svg_charts.chart(panel) for panel in panels)
    return f'{legend(records)}<div class="charts">{drawn}</div>' if drawn else ""


def class_accuracy(record: RunRecord) -> str:
    """Show the accuracy of every class as a bar, worst first; many classes are folded."""
    matrix = record.summary.get("confusion")
    if not isinstance(matrix, list) or not matrix:
        return ""
    names = record.summary.get("classes") or range(len(matrix))
    counts = [(str(name), row[k], sum(row)) for k, (name, row) in enumerate(zip(names, matrix, strict=False))]
    shares = sorted((right / count, name, count) for name, right, count in counts if count)
    rows = [(name, share, pluralize(count, "image")) for share, name, count in shares]
    more = f"<details><summary>{len(rows) - _BARS} more classes</summary>{bar_table(rows[_BARS:])}</details>"
    return bar_table(rows[:_BARS]) + (more if len(rows) > _BARS else "")


def bar_table(rows: Iterable[tuple[str, float, str]]) -> str:
    """Draw names with their shares as bars, and a note beside each."""
    lines = (
        f'<tr><th scope="row">{escape(name)}</th><td class="meter"><i style="--share:{share:.3f}"></i></td>'
        f'<td class="number">{100 * share:.0f} %</td><td class="number quiet">{note}</td></tr>'
        for name, share, note in rows
    )
    return f'<table class="bars">{"".join(lines)}</table>'


def stored_table(record: RunRecord, key: str) -> str:
    """Show a table of the summary: "per_class" (labels, or ranges of a number) or "pseudo_labels"."""
    stored = record.summary.get(key)
    return table(stored["columns"], stored["rows"]) if isinstance(stored, dict) else ""


def calibration(record: RunRecord) -> str:
    """Compare the confidence of the predictions with their accuracy, in words and as a curve."""
    stored = record.summary.get("calibration") or {}
    bins, error = stored.get("bins") or [], as_finite(stored.get("error"))
    if error is None or not bins:
        return ""
    images = sum(row["images"] for row in bins)
    found = str(stored.get("how") or "").replace("not calibrated: ", "it is not corrected, because ")
    how = f" {found[0].upper()}{found[1:]}." if found else ""
    if images < _CALIBRATION_IMAGES:
        return f"<p>{pluralize(images, 'image')}: too few to judge the confidence of the model.{escape(how)}</p>"
    surplus = sum(row["images"] * (row["confidence"] - row["accuracy"]) for row in bins) / images
    text = f"Its confidence is {error:.1f} points from its accuracy, on average over {pluralize(images, 'image')}: "
    words = "it is too sure" if surplus > 0 else "it is too cautious"
    text += "you can read it as a probability." if error < _CALIBRATED else f"{words}."
    text += how
    before = stored.get("before") or {}
    drawn = {"measured": bins, "before": (before.get("bins") or []) if before.get("bins") != bins else []}
    points = {name: [(row["confidence"], row["accuracy"]) for row in rows] for name, rows in drawn.items() if rows}
    points["ideal"] = [(0.0, 0.0), (100.0, 100.0)]
    series = [svg_charts.Series(name, number, curve) for number, (name, curve) in enumerate(points.items())]
    panel = svg_charts.Panel("Calibration", "right, %", "confidence, %", series, by_split=True)
    return f"<p>{escape(text)}</p>{svg_charts.chart(panel)}"


def confusion(record: RunRecord) -> str:
    matrix = record.summary.get("confusion")
    if not isinstance(matrix, list) or not matrix:
        return ""
    names = [str(name) for name in record.summary.get("classes") or range(len(matrix))]
    totals = [sum(row) for row in matrix]
    body = _confusion_table(matrix, names, totals) if len(matrix) <= _LARGEST_TABLE else ""
    wrong = [
        (count, names[i], names[j], count / totals[i])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    wrong.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    if wrong:
        rows = [[truth, guess, count, f"{100 * share:.0f} %"] for count, truth, guess, share in wrong[:12]]
        body += table(["true class", "predicted", "times", "of the class"], rows, "Confused most often")
    return body


def _confusion_table(matrix: list[list[int]], names: list[str], totals: list[int]) -> str:
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    lines = []
    for i, row in enumerate(matrix):
        cells = "".join(
            f'<td style="--share:{count / max(totals[i], 1):.3f}" class="{"hit" if i == j else "miss"}'
            f'{" strong" if count > 0.55 * max(totals[i], 1) else ""}">{count if count else ""}</td>'
            for j, count in enumerate(row)
        )
        lines.append(f'<tr><th scope="row">{escape(names[i])}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="confusion"><thead><tr><th scope="col">true \\ predicted</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def mistakes(record: RunRecord) -> str:
    entries = [
        {**entry, "score": "" if entry["probability"] is None else f"{100 * entry['probability']:.0f}\u00a0%"}
        for entry in record.mistakes
    ]
    return gallery(entries, "predicted as")


def gallery(entries: Iterable[Mapping[str, Any]], relation: str) -> str:
    """Show pictures, each with "label RELATION predicted score" and its file; the image is a data URI.

    If label and prediction are the same, only the label is shown.
    """
    pairs = [(entry, escape(entry["label"]), escape(entry["predicted"])) for entry in entries]
    items = "".join(
        f'<figure><img src="{escape(entry["image"])}" alt=""><figcaption>'
        f"<b>{label}</b>{f' {relation} <b>{predicted}</b>' if predicted != label else ''}"
        f' <span class="quiet">{entry["score"]}</span>'
        f'<br><span class="quiet">{escape(entry.get("file", ""))}</span></figcaption></figure>'
        for entry, label, predicted in pairs
    )
    return f'<div class="gallery">{items}</div>' if items else ""


def augmentations(record: RunRecord) -> str:
    if record.augmentations is None:
        return ""
    return f'<figure class="wide"><img src="{record.augmentations}" alt="training images after augmentation"></figure>'


def automatic(record: RunRecord) -> str:
    rows = [[entry["name"], entry["value"], entry["reason"]] for entry in record.summary["auto"]]
    return table(["option", "chosen", "reason"], rows) if rows else ""


def configuration(records: list[RunRecord]) -> str:
    """Show all options; for several runs, those that differ first."""
    names = list(dict.fromkeys(name for record in records for name in record.setting))
    if not names:
        return ""
    columns = ["option", *(record.name for record in records)]

    def row(name: str) -> list[Any]:
        values = ("-" if (value := record.setting.get(name, {})) == {} else value for record in records)
        return [name, *(", ".join(map(str, value)) if isinstance(value, list) else value for value in values)]

    differing = [name for name in names if len({repr(record.setting.get(name)) for record in records}) > 1]
    parts = []
    if differing:
        parts.append(table(columns, [row(name) for name in differing], "What differs"))
    same = [name for name in names if name not in differing]
    common = table(["option", "value"], [row(name)[:2] for name in same])
    parts.append(f"<h3>{len(same)} options in common</h3>{common}" if differing else common)
    return "".join(parts)


def _scalars(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the scalars of a summary; those of a dict, as k-NN by k, become "knn 20"."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if key in _NOT_RESULTS or value is None:
            continue
        if isinstance(value, dict):
            flat |= {f"{key} {k}": v for k, v in value.items() if isinstance(v, int | float | str)}
        elif isinstance(value, int | float | str):
            flat[key] = value if isinstance(value, str) else as_percent(key, value)
    return flat


def _is_score(key: str) -> bool:
    """True for scores, which a table with intervals shows, and scores on training images, which stand above."""
    return key.startswith(("chance ", "training_images ")) or key.removeprefix("val_").split()[0] in SCORE_NAMES


def _mean(key: str, values: list[Any]) -> Any:
    if key == "seed":
        return None
    if len(set(map(str, values))) == 1:
        return values[0]  # a common value has no deviation
    numbers = [number for value in values if (number := as_finite(value)) is not None]
    if len(numbers) != len(values):
        return "-"
    return f"{as_text(statistics.fmean(numbers))} ± {as_text(statistics.stdev(numbers))}"


def data(record: RunRecord) -> str:
    """Show the number of images, the notes on the data, and the skipped files."""
    used, notes = record.data.get("used", {}), record.data.get("notes", [])
    skipped = record.data.get("left_out", {"count": 0, "files": []})
    count, files = skipped["count"], skipped["files"]
    texts = [f"{name}: {pluralize(number, 'image')}" for name, number in used.items()]
    texts += [f"{pluralize(count, 'unreadable file')} skipped"] if count else []
    body = f"<p>{escape(' · '.join(texts))}</p>" if texts else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body += f"<ul>{items}</ul>" if items else ""
    if not files:
        return body
    rows = [[file["name"], file["split"], file["reason"]] for file in files]
    listed = table(["skipped", "split", "reason"], rows)
    if count > len(files):
        listed += f'<p class="quiet">and {count - len(files):,} more</p>'
    return body + (listed if len(files) <= _OPEN else f"<details><summary>Files</summary>{listed}</details>")
