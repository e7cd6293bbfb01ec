"""Write the report of one or several runs, or the explorer, as one HTML file that needs nothing else.

A report is made from the files of a run folder (runs/layout.py). All are optional. What it reads:

    metrics.jsonl      one object per line: {"step": 120, "epoch": 1.5, "split": "train", …}; other numbers are curves
    summary.json       {"task": "train", "top1": 0.71, …,                         scalars: the table of results
                        "floor": {"best": 0.35, …}, "alarms": ["teacher entropy …"], "auto": [{name, value, reason}],
                        "per_class", "pseudo_labels": {"columns": […], "rows": [[…], …]},
                        "classes": ["cat", …], "confusion": [[9, 1], [0, 10]]}    rows true, columns predicted
    data.json          {"used": {"train": 80}, "notes": […], "left_out": {"count": 1, "files": [{name, split, reason}]}}
    mistakes.json      [{"image": a data URI, "file", "label", "predicted", "probability"}]
    comparison.json    in a folder of runs: {"metric": …, "settings": {name: {"mean", "deviation", "values"}},
                       "differences": {name: {"mean", "low", "high", "p_value", "count"}}}
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugalvit.errors import UserError
from frugalvit.report import dense_sections, sections, svg_charts, verdict
from frugalvit.report.run_record import RunRecord, find_runs, make_names_unique, read_comparison, read_run
from frugalvit.runs import layout
from frugalvit.utils import console, palette
from frugalvit.utils.files import write_text

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone
    from frugalvit.data import ImageDataset

GENERATOR = '<meta name="generator" content="frugalvit">'
_EXAMPLES_SHOWN = 2
_EXPLORER_LEAD = (
    "Point at a region, tap it, or move with the arrow keys. The brighter a region of the other image, the more "
    "similar the network finds it; the outlined one is the most similar. Below is where each attention head of the "
    "last block looks from that region. Its number is the entropy in bits: low is focused."
)


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    model: Backbone | None = None,
    examples: ImageDataset | None = None,
    seen: Mapping[Path, dict[str, Any]] | None = None,
) -> Path:
    """Write the report of ``runs`` to ``out`` and return its path.

    model:    of the first run; the explorer shows its view of a few ``examples``, which is saved as lens.json
    examples: images for the explorer, usually the validation split
    seen:     explorer data by run folder (``visualization.explorer_data.gather``), saved as lens.json
    """
    folders = find_runs([Path(run) for run in runs])
    seen = dict(seen or {})
    if model is not None and examples is not None:
        lens = _explore(folders[0], model, examples)
        seen |= {folders[0]: lens} if lens else {}
    records = [read_run(folder, seen.get(folder)) for folder in folders]
    make_names_unique(records)
    compared = {str(run): result for run in runs if (result := read_comparison(Path(run)))}
    text = report(records, compared)
    for folder, lens in seen.items():  # after the page is made: a lens that cannot be shown must not stay in the folder
        write_text(folder / layout.LENS, json.dumps(lens))
    write_text(out, text)
    return out


def report(records: list[RunRecord], compared: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Make the page of one or several runs, and of comparisons by name."""
    compared, single = compared or {}, len(records) == 1
    details = [
        ("results", "All results", sections.results(records)),
        ("data", "Data", _each(records, sections.data)),
        ("auto", "What “auto” chose", _each(records, sections.automatic)),
        ("more", "More curves", sections.curves(records, main=False)),
        (
            "pseudo",
            "Pseudo-labels",
            _each(records, sections.stored_table, "pseudo_labels"),
            "From training. For each class: the share of the unlabelled images that were predicted as it, how many of "
            "these the network learned from, and how many of those were right (only if their labels are known).",
        ),
        ("augmentations", "What training saw", _each(records, sections.augmentations)),
        ("configuration", "Configuration", sections.configuration(records)),
    ]
    parts = [
        ("runs", "Runs", "" if single or compared else sections.results(records, main=True)),
        ("classes", "Classes", _each(records, dense_sections.per_class) or _each(records, sections.class_accuracy)),
        ("answers", "Answers", _each(records, sections.stored_table, "per_class")),
        ("calibration", "Calibration", _each(records, sections.calibration)),
        ("recall", "Precision over recall", _each(records, dense_sections.precision_recall), "Mean over classes."),
        ("curves", "Curves", sections.curves(records, main=True)),
        (
            "mistakes",
            "Worst mistakes",
            _each(records, sections.mistakes),
            "The largest or most confident errors first.",
        ),
        ("worst", "Worst pictures", _each(records, dense_sections.pictures, "worst")),
        ("best", "Best pictures", _each(records, dense_sections.pictures, "best")),
        ("confusion", "Confusion", _each(records, sections.confusion)),
        ("explorer", "Explorer", _explorer(_merge_lens(records)), _EXPLORER_LEAD),
        ("details", "Details", "".join(sections.section(*part, folded=True) for part in details)),
    ]
    head = sections.unfinished(records) + sections.comparisons(compared)
    head += _each(records, verdict.verdict) if not compared else ""
    about = " · ".join(dict.fromkeys(filter(None, [records[0].name if single else "", *_about(records)])))
    drawn = {part[0]: sections.section(*part) for part in parts}
    pair = drawn.pop("classes") + drawn.pop("calibration")  # beside each other on a wide screen
    content = drawn.pop("runs") + head + f'<div class="pair">{pair}</div>' + "".join(drawn.values())
    return render(verdict.find_title(records, compared), about, content)


def explorer(data: dict[str, Any], title: str) -> str:
    about = ", ".join(model["name"] for model in data["models"])
    return render(title, about, sections.section("explorer", "Explorer", _explorer(data), _EXPLORER_LEAD))


def _explorer(data: dict[str, Any] | None) -> str:
    return f'<div class="explorer">{svg_charts.json_block(data)}</div>' if data else ""


SCRIPTS = ("page.js", "charts.js", "explorer.js")


def render(title: str, about: str, content: str, scripts: Sequence[str] = SCRIPTS, connect: str = "'none'") -> str:
    """Fill the template. The page's policy lists the hashes of the scripts, so that no other script runs.

    connect: the servers that the scripts may call, in the words of the policy
    """
    style = _template("style.css")
    light, dark = palette.css_variables()
    heat = base64.b64encode(palette.heat_bytes()).decode()
    codes = [_template(name).replace("{{heat}}", heat) for name in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in codes)
    links = re.findall(r'<section id="([a-z]+)"><h2>([^<]*)</h2>', content)
    values = {
        "title": escape(title),
        "about": escape(about),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; "
        f"connect-src {connect}",
        "generator": GENERATOR,
        "style": style.replace("{{light}}", light).replace("{{dark}}", dark),
        "links": "".join(f'<a href="#{identity}">{text}</a>' for identity, text in links) if len(links) > 1 else "",
        "content": content,
        "scripts": "".join(f"<script>{script}</script>" for script in codes),
    }
    # One pass: inserted text is never filled again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _template("page.html"))


def _explore(folder: Path, backbone: Backbone, examples: ImageDataset) -> dict[str, Any] | None:
    """Make the explorer data of a few evenly spaced examples; None if there is nothing to explore."""
    from frugalvit.visualization.explorer_data import Picture, gather

    pictures: list[Picture] = []
    for index in range(0, len(examples), max(1, len(examples) // _EXAMPLES_SHOWN)):
        try:
            pictures.append(Picture.of(examples.names[index], examples.read(index)))
        except UserError:
            continue  # unreadable; take the next one
        if len(pictures) == _EXAMPLES_SHOWN:
            break
    try:
        return gather([(folder.resolve().name, backbone)], pictures, second_views=True)
    except UserError as reason:
        console.info(f"The report has no explorer: {reason}")
        return None


def _merge_lens(records: list[RunRecord]) -> dict[str, Any] | None:
    """Combine the explorers of runs with the images of the first: one run of each kind.

    Images are compared by their pixels: two datasets may have pictures of the same name.
    """
    kinds: dict[str, RunRecord] = {}
    for record in records:
        if record.lens:
            kinds.setdefault(record.kind(), record)
    images: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    for record in kinds.values():
        assert record.lens is not None
        images = images or record.lens["images"]
        if [image["src"] for image in record.lens["images"]] == [image["src"] for image in images]:
            models += [{**model, "name": record.name} for model in record.lens["models"]]
    return {"images": images, "models": models} if models else None


def _each(records: list[RunRecord], part: Any, *arguments: str) -> str:
    """Make a section for every run, with the runs' names as headings if the sections differ."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(part(record, *arguments), []).append(record.name)
    names.pop("", None)
    if len(records) == 1 or (len(names) == 1 and len(next(iter(names.values()))) == len(records)):
        return next(iter(names), "")
    return "".join(
        f"<details{' open' if i == 0 else ''}><summary>{escape(', '.join(owners))}</summary>{body}</details>"
        for i, (body, owners) in enumerate(names.items())
    )


def _about(records: list[RunRecord]) -> list[str]:
    facts = []
    for record in records:
        task, epochs = record.summary.get("task"), record.setting.get("epochs")
        length = f"{epochs:g} epoch{'s' * (epochs != 1)}" if isinstance(epochs, int | float) else None
        facts.append((task, record.setting.get("backbone"), record.setting.get("data"), length))
    return [str(values[0]) for values in zip(*facts, strict=True) if values[0] and len(set(values)) == 1]


def _template(name: str) -> str:
    return (resources.files("frugalvit.report") / "templates" / name).read_text(encoding="utf-8")
