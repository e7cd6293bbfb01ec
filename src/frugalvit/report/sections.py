"""The parts of a report, each a function from records to HTML; an empty string where there is nothing to show.

Every name that comes from outside (classes, files, options) passes through ``escape``.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from frugalvit.report import svg_charts
from frugalvit.report.run_record import RunRecord, distinct, finite
from frugalvit.utils import console, palette
from frugalvit.utils.statistics import Difference, Spread
from frugalvit.utils.tables import as_text
from frugalvit.utils.text import pluralize, truncate_list

_LARGEST_TABLE = 30
"""Above so many classes a confusion matrix is a picture, not a table."""

_NOT_RESULTS = {"run", "auto", "classes", "confusion", "per_class", "notes", "config"}
_FIRST = ("task", "backbone", "data", "top1", "top5", "mean_per_class", "knn", "box_ap", "mask_ap", "miou", "loss")


def section(identity: str, title: str, body: str, lead: str = "") -> str:
    if not body:
        return ""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section id="{identity}"><h2>{title}</h2>{lead}{body}</section>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", marks: Iterable[str] = ()) -> str:
    """Cells are escaped; numbers are set to the right. A row's first cell is its heading, after its mark (HTML)."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = []
    for (first, *rest), mark in itertools.zip_longest(rows, marks, fillvalue=""):
        cells = "".join(
            f'<td class="number">{escape(as_text(cell))}</td>'
            if (isinstance(cell, int | float) and not isinstance(cell, bool)) or " ± " in str(cell)
            else f"<td>{escape(as_text(cell))}</td>"
            for cell in rest
        )
        lines.append(f'<tr><th scope="row">{mark}{escape(as_text(first))}</th>{cells}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(lines)
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(records: list[RunRecord]) -> str:
    """Which line is which run, when there are several kinds."""
    kinds = list(dict.fromkeys(record.kind() for record in records))
    if len(kinds) < 2:
        return ""
    items = []
    for style, kind in enumerate(kinds):
        names = [record.name for record in records if record.kind() == kind]
        text = truncate_list(names, 1)
        swatch = f'<svg viewBox="0 0 34 8" aria-hidden="true">{svg_charts.swatch(style, 34)}</svg>'
        items.append(f"<li>{swatch}{escape(text)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def data_names(records: list[RunRecord]) -> list[str]:
    """What each run learned from, as short as tells the places apart; "" where it is not known."""
    places = [str(record.setting.get("data") or "") for record in records]
    names = [Path(place).name or place for place in places]
    return names if len(set(names)) == len(set(places)) else places


def results(records: list[RunRecord]) -> str:
    """One row per run with every single value of its summary, and its data where they differ; a row of means where
    several seeds ran.

    Words that are the same for all runs stand below, once; so does which of them are the same run.
    """
    shown = [_scalars(record.summary) for record in records]
    keys = dict.fromkeys(key for values in shown for key in values)
    ordered = sorted(keys, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), list(keys).index(key)))
    if not ordered:
        return ""
    if len(records) == 1:
        return table(["", ""], [[key.replace("_", " "), as_text(shown[0][key])] for key in ordered])
    if "best_step" in keys:  # the number says what the sentence about the weights says
        ordered = [key for key in ordered if key != "weights"]
    data = data_names(records)
    if "data" not in keys and len(set(data)) > 1:
        ordered.insert(0, "data")
        shown = [values | {"data": name or None} for values, name in zip(shown, data, strict=True)]
    words = {key: [values.get(key) for values in shown] for key in ordered}
    common = {key: found[0] for key, found in words.items() if isinstance(found[0], str) and len(set(found)) == 1}
    ordered = [key for key in ordered if key not in common]
    values = {id(record): found for record, found in zip(records, shown, strict=True)}
    rows: list[list[Any]] = []
    for kind in dict.fromkeys(record.kind() for record in records):
        members = distinct([record for record in records if record.kind() == kind])
        if len(members) > 1:
            name = f"mean of {len(members)}: {members[0].name} …"
            rows.append([name, *(_mean(key, [values[id(m)].get(key) for m in members]) for key in ordered)])
    rows += [[record.name, *(values[id(record)].get(key) for key in ordered)] for record in records]
    below = " · ".join(f"{key.replace('_', ' ')}: {value}" for key, value in common.items())
    drawn = table(["run", *(key.replace("_", " ") for key in ordered)], rows)
    return drawn + (f'<p class="quiet">All runs: {escape(below)}</p>' if below else "") + _copies(records)


def _copies(records: list[RunRecord]) -> str:
    """Which runs are one and the same."""
    together: dict[tuple[str, str], list[str]] = {}
    for record in records:
        together.setdefault(record.identity(), []).append(record.name)
    texts = [f"{', '.join(names)}: the same run (settings and seed)" for names in together.values() if len(names) > 1]
    return "".join(f'<p class="quiet">{escape(text)}; it counts once.</p>' for text in texts)


def comparisons(found: Mapping[str, dict[str, Any]]) -> str:
    """Each comparison's table, under its name where there are several."""
    tables = {name: body for name, values in found.items() if (body := _comparison(values))}
    if len(tables) < 2:
        return "".join(tables.values())
    return "".join(f"<h3>{escape(name)}</h3>{body}" for name, body in tables.items())


def _comparison(found: dict[str, Any]) -> str:
    """Settings over the same seeds: means, and each one's paired difference from the last."""
    metric = str(found.get("metric", "result"))
    differences = found.get("differences", {})
    rows: list[list[Any]] = []
    for name, values in found.get("settings", {}).items():
        other = differences.get(name)
        against = "-"
        if other:
            without_interval: dict[str, Any] = dict.fromkeys(("low", "high", "p_value"), math.nan)
            against = str(Difference(**without_interval | {part: n for part, n in other.items() if n is not None}))
        seeds = len(values["values"])
        rows.append([name, str(Spread(values["mean"], values["deviation"], seeds)), seeds, against])
    return table(["setting", metric, "seeds", "difference from the last, 95 % interval"], rows) if rows else ""


def unfinished(records: list[RunRecord]) -> str:
    """Numbers of a run that was stopped must not be taken for its result."""
    waiting = [record for record in records if not record.finished]
    if not waiting:
        return ""
    if len(records) == 1:
        way = f"if it was stopped, --resume {console.shell_quote(waiting[0].folder)} goes on with it"
        text = f"This run is not finished. What is shown is how far it came; {way}."
    else:
        names = ", ".join(record.name for record in waiting)
        way = "--resume FOLDER goes on with one that was stopped"
        text = f"Not finished: {names}. What is shown of them is how far they came; {way}."
    return f'<p class="lead unfinished">{escape(text)}</p>'


def tiles(record: RunRecord) -> str:
    """The few numbers to read first, each with a word on what is good where the number does not say it itself."""
    found = _signs(record) if record.summary.get("task") == "pretrain" else _scores(record)
    cells = "".join(
        f"<div><dt>{label}{f'<span>{escape(word)}</span>' if word else ''}</dt><dd>{escape(as_text(value))}</dd></div>"
        for label, value, word in found
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _signs(record: RunRecord) -> list[tuple[str, Any, str]]:
    """Of a label-free run: its loss falls in a collapse too, so what tells of good features comes first."""
    summary, found = record.summary, []
    verdict, rank, knn = (summary.get(name) for name in ("health", "effective_rank", "knn"))
    if isinstance(verdict, str):
        fine = verdict == "healthy"
        found.append(("health", verdict, "no sign of collapse or standstill" if fine else "see the alarms below"))
    if isinstance(knn, int | float):
        classes = len(record.data.get("classes", ()))
        guess = f"; guessing gives about {100 / classes:.0f}" if classes else ""
        flatters = "; it flatters, for these images were learned from" if summary.get("knn_on") == "sample" else ""
        words = f"% right by the labels of the most similar images: more is better{guess}{flatters}"
        found.append(("k-NN", knn, words))
    if isinstance(rank, int | float):
        most = f" of at most {summary['largest_rank']:,}" if isinstance(summary.get("largest_rank"), int) else ""
        word = f"directions{most} that the features use: more is better; 1 means that all images look alike"
        found.append(("effective rank", rank, word))
    return found


def _scores(record: RunRecord) -> list[tuple[str, Any, str]]:
    wanted = (
        ("top1", "top-1"),
        ("top5", "top-5"),
        ("mean_per_class", "mean per class"),
        ("box_ap", "box AP"),
        ("mask_ap", "mask AP"),
        ("miou", "mIoU"),
        ("knn", "k-NN"),
        ("loss", "loss"),
    )
    summary = record.summary
    found = [(label, summary[key], "") for key, label in wanted if isinstance(summary.get(key), int | float)]
    knn = summary.get("knn")
    if isinstance(knn, dict):
        best = max((value for value in knn.values() if isinstance(value, int | float)), default=None)
        if best is not None:
            found.append(("best k-NN", best, ""))
    return found


def curves(records: list[RunRecord]) -> str:
    drawn = "".join(svg_charts.chart(panel) for panel in svg_charts.panels(records))
    return f'{legend(records)}<div class="charts">{drawn}</div>' if drawn else ""


def confusion(record: RunRecord) -> str:
    """Rows are the true classes, columns the predicted ones; with the pairs confused most."""
    matrix = record.summary.get("confusion")
    if not isinstance(matrix, list) or not matrix:
        return ""
    names = [str(name) for name in record.summary.get("classes") or range(len(matrix))]
    totals = [sum(row) for row in matrix]
    body = _small_confusion(matrix, names, totals) if len(matrix) <= _LARGEST_TABLE else _large_confusion(matrix, names)
    wrong = [
        (count, names[i], names[j], count / totals[i])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    wrong.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    if wrong:
        rows = [[truth, guess, count, f"{100 * share:.0f} %"] for count, truth, guess, share in wrong[:12]]
        body += table(["true class", "taken for", "times", "of the class"], rows, "Confused most often")
    return body


def _small_confusion(matrix: list[list[int]], names: list[str], totals: list[int]) -> str:
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


def _large_confusion(matrix: list[list[int]], names: list[str]) -> str:
    from PIL import Image

    colours = palette.heat_bytes()
    pixels = bytearray()
    for row in matrix:
        total = max(sum(row), 1)
        for count in row:
            level = round(255 * (count / total) ** 0.5)  # the root lifts rare mistakes into sight
            pixels += colours[3 * level : 3 * level + 3]
    side = len(matrix)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), bytes(pixels)).save(buffer, "PNG", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    cells = {str(i): {str(j): count for j, count in enumerate(row) if count} for i, row in enumerate(matrix)}
    return (
        f'<figure class="matrix"><img src="{source}" alt="confusion matrix of {side} classes, rows true, columns '
        f'predicted"><p class="readout" aria-live="polite">Rows are true classes, columns predicted ones.</p>'
        f"{svg_charts.json_block({'names': names, 'cells': cells})}</figure>"
    )


def mistakes(record: RunRecord) -> str:
    """Pictures with their classes and, where the run has written it down, the file to look at."""
    items = "".join(
        f'<figure><img src="{escape(str(entry["image"]))}" alt=""><figcaption>'
        f"<b>{escape(str(entry.get('label', '?')))}</b> taken for <b>{escape(str(entry.get('predicted', '?')))}</b>"
        f"{_probability(entry.get('probability'))}{_file(entry.get('file'))}</figcaption></figure>"
        for entry in record.mistakes
    )
    return f'<div class="gallery">{items}</div>' if items else ""


def _probability(value: Any) -> str:
    return f' <span class="quiet">{100 * value:.0f}\u00a0%</span>' if isinstance(value, int | float) else ""


def _file(name: Any) -> str:
    return f'<br><span class="quiet">{escape(name)}</span>' if isinstance(name, str) else ""


def augmentations(record: RunRecord) -> str:
    if record.augmentations is None:
        return ""
    return f'<figure class="wide"><img src="{record.augmentations}" alt="training images after augmentation"></figure>'


def alarms(record: RunRecord) -> str:
    items = "".join(f"<li>{escape(str(alarm))}</li>" for alarm in record.summary.get("alarms") or [])
    return f'<ul class="alarms">{items}</ul>' if items else ""


def automatic(record: RunRecord) -> str:
    """What "auto" chose, and why."""
    rows = [
        [entry.get("name", "?"), entry.get("value"), entry.get("reason", "")]
        for entry in record.summary.get("auto") or []
        if isinstance(entry, dict)
    ]
    return table(["option", "chosen", "because"], rows) if rows else ""


def configuration(records: list[RunRecord]) -> str:
    """Every option; with several runs, those that differ first."""
    names = list(dict.fromkeys(name for record in records for name in record.setting))
    if not names:
        return ""
    columns = ["option", *(record.name for record in records)]

    def row(name: str) -> list[Any]:
        return [name, *(_value(record.setting[name]) if name in record.setting else "-" for record in records)]

    differing = [name for name in names if len({repr(record.setting.get(name)) for record in records}) > 1]
    parts = []
    if differing:
        parts.append(table(columns, [row(name) for name in differing], "What differs"))
    same = [name for name in names if name not in differing]
    shown = table(["option", "value"], [row(name)[:2] for name in same])
    label = f"{len(same)} options{' in common' if len(records) > 1 else ''}"
    parts.append(f"<details><summary>{label}</summary>{shown}</details>")
    return "".join(parts)


def _value(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value if value != {} else "-"


def _scalars(summary: dict[str, Any]) -> dict[str, Any]:
    """The single values of a summary; one level of numbers beneath (k-NN by k) becomes "knn 20"."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if key in _NOT_RESULTS or value is None:
            continue
        if isinstance(value, dict):
            flat |= {f"{key} {k}": v for k, v in value.items() if isinstance(v, int | float | str)}
        elif isinstance(value, int | float | str):
            flat[key] = value
    return flat


def _mean(key: str, values: list[Any]) -> Any:
    if key == "seed":
        return None
    if isinstance(values[0], int) and all(value == values[0] for value in values):
        return values[0]  # a count that all share has no deviation to tell
    numbers = [number for value in values if (number := finite(value)) is not None]
    if len(numbers) < 2 or len(numbers) != len(values):
        return values[0] if len(set(map(str, values))) == 1 else "-"
    return f"{as_text(statistics.fmean(numbers))} ± {as_text(statistics.stdev(numbers))}"


_OPEN = 10
"""Up to so many files that were left out are shown at once."""


def data(record: RunRecord) -> str:
    """A line of numbers, the notes of the data, and a table of the files that were left out."""
    used, notes = record.data.get("used", {}), record.data.get("notes", [])
    left_out = record.data.get("left_out", {"count": 0, "files": []})
    count, files = left_out["count"], left_out["files"]
    words = [f"{name}: {pluralize(number, 'image')}" for name, number in used.items()]
    words += [f"{pluralize(count, 'unreadable file')} left out"] if count else []
    body = f"<p>{escape(' · '.join(words))}</p>" if words else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body += f"<ul>{items}</ul>" if items else ""
    if not files:
        return body
    rows = [[file["name"], file["split"], file["reason"]] for file in files]
    shown = table(["left out", "of", "because"], rows)
    if count > len(files):
        shown += f'<p class="quiet">and {count - len(files):,} more</p>'
    return body + (shown if len(files) <= _OPEN else f"<details><summary>Which</summary>{shown}</details>")
