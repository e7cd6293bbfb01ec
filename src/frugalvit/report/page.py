"""The report of one or several runs: one HTML file that needs nothing else, and the explorer as such a file.

A page is made from files only. What a run folder may hold, every part optional:

    metrics.jsonl      one object per line: {"step": 120, "epoch": 1.5, "split": "train", "loss": 2.3, …}; every other
                       number becomes a curve
    config.yaml        all options
    decisions.json     what "auto" chose, for a run that has no summary yet
    summary.json       {"task": "train", "top1": 0.71, …,                         single values: the table of results
                        "knn": {"20": 0.6},                                       one level of numbers beneath
                        "knn_on": "sample",                                       k-NN asked images learned from
                        "alarms": ["teacher entropy …"],                          signs of a run that goes wrong
                        "auto": [{"name": …, "value": …, "reason": …}],           what "auto" chose, and why
                        "classes": ["cat", …], "confusion": [[9, 1], [0, 10]]}    rows true, columns predicted
    data.json          {"used": {"train": 80}, "notes": ["val is made from train …"],     images of each part, what was
                        "left_out": {"count": 1, "files": [{"name", "split", "reason"}]}} said of them, unreadable files
    mistakes.json      [{"image": a data URI or a file in the folder, "label": …, "predicted": …, "probability": 0.98,
                        "file": its name in the data}]
    augmentations.jpg  training images after augmentation
    transfer_report.json  of detection and segmentation: see transfer.py
    comparison.json    in a folder of runs: {"metric": …, "settings": {name: {"mean", "deviation", "values"}},
                       "differences": {name: {"mean", "low", "high", "p_value", "count"}}}
    lens.json          what ``visualization.explorer_data.gather`` found: similarities and attention for the explorer

``write_report`` writes lens.json itself when it is given the model and examples.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugalvit.errors import UserError
from frugalvit.report import dense_sections, sections, svg_charts
from frugalvit.report import sections as dataset
from frugalvit.report.run_record import RunRecord, find_runs, name_apart, read_comparison, read_run
from frugalvit.runs import layout
from frugalvit.utils import console, palette
from frugalvit.utils.files import write_text
from frugalvit.utils.text import truncate_list

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone
    from frugalvit.data import ImageDataset

GENERATOR = '<meta name="generator" content="frugalvit">'
_EXAMPLES_SHOWN = 2
_NAMED = 3
_HEAVIEST_LENS = 6_000_000
"""Bytes of similarities and attention in one report."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    model: Backbone | None = None,
    examples: ImageDataset | None = None,
    seen: Mapping[Path, dict[str, Any]] | None = None,
) -> Path:
    """Write the report of ``runs`` to ``out`` and return it.

    model:    looks at a few of the ``examples`` for the explorer; what it saw is saved as lens.json in the first
              run's folder
    examples: images to look at, usually the validation split
    seen:     by run folder, what its model saw already (``visualization.explorer_data.gather``); saved likewise
    """
    folders = find_runs([Path(run) for run in runs])
    seen = dict(seen or {})
    if model is not None and examples is not None:
        found = _look(folders[0], model, examples)
        seen |= {folders[0]: found} if found else {}
    records = [read_run(folder, seen.get(folder)) for folder in folders]
    name_apart(records)
    compared = {str(run): found for run in runs if (found := read_comparison(Path(run)))}
    text = report(records, compared, mark(runs, out))
    for folder, lens in seen.items():  # once the page is made: what cannot be shown must not stay in the folder
        write_text(folder / layout.LENS, json.dumps(lens))
    write_text(out, text)
    return out


def mark(runs: Sequence[Path], out: Path) -> str:
    """The line in a page that tells whether another one is about the same runs.

    It holds no paths, and counts from the page's own folder: one that was moved or copied with its runs stays theirs.
    """
    home = out.resolve().parent
    found = [run.resolve() for run in runs]
    # From one drive to another no way leads.
    places = sorted(os.path.relpath(run, home) if run.anchor == home.anchor else str(run) for run in found)
    return _mark(f"report {hashlib.sha256(chr(10).join(places).encode()).hexdigest()[:16]}")


def mark_of(text: str) -> str | None:
    """The line of a page that was written before; None in one of an earlier version."""
    found = re.search(_mark('[^"]*'), text)
    return found[0] if found else None


def _mark(content: str) -> str:
    return f'<meta name="frugalvit" content="{content}">'


def report(records: list[RunRecord], compared: Mapping[str, dict[str, Any]] | None = None, mark: str = "") -> str:
    """The page of one or several runs, and of what comparisons of them found, each by its name."""
    first = records[0]
    title = first.name if len(records) == 1 else f"{len(records)} runs"
    parts = [
        sections.section("comparison", "Comparison", sections.comparisons(compared or {})),
        sections.section("results", "Results", sections.results(records)),
        sections.section("alarms", "Alarms", _each(records, sections.alarms), "Signs of a run that goes wrong."),
        sections.section("data", "Data", _each(records, dataset.data)),
        sections.section("auto", "What “auto” chose", _each(records, sections.automatic)),
        sections.section("curves", "Curves", sections.curves(records)),
        sections.section(
            "confusion",
            "Confusion",
            _each(records, sections.confusion),
            "Rows are true classes, columns predicted ones.",
        ),
        sections.section(
            "mistakes", "Worst mistakes", _each(records, sections.mistakes), "Most confident errors first."
        ),
        sections.section(
            "recall", "Precision over recall", _each(records, dense_sections.precision_recall), "Mean over classes."
        ),
        sections.section("classes", "Classes", _each(records, dense_sections.per_class)),
        sections.section("best", "Best pictures", _each(records, dense_sections.best)),
        sections.section("worst", "Worst pictures", _each(records, dense_sections.worst)),
        sections.section("augmentations", "What training saw", _each(records, sections.augmentations)),
        explorer_section(_merge_lens(records)),
        sections.section("configuration", "Configuration", sections.configuration(records)),
    ]
    notes = [f"{record.name}: {note}" for record in records for note in record.notes]
    tail = "".join(f'<p class="quiet">{escape(note)}</p>' for note in notes)
    head = sections.unfinished(records) + (sections.tiles(first) if len(records) == 1 else "")
    return render(title, _about(records), head + "".join(parts) + tail, mark)


def explorer(data: dict[str, Any], title: str) -> str:
    """A page with the explorer alone."""
    about = ", ".join(model["name"] for model in data["models"])
    return render(title, about, explorer_section(data), _mark("explorer"))


def explorer_section(data: dict[str, Any] | None) -> str:
    if not data:
        return ""
    lead = (
        "Point at a region, tap it, or move with the arrow keys: the other image shows how similar each of its regions "
        "is, the outlined one most. Below, where each head of the last block looks from there, most focused first, "
        "with the entropy in bits."
    )
    return sections.section("explorer", "Explorer", f'<div class="explorer">{svg_charts.json_block(data)}</div>', lead)


def render(title: str, about: str, content: str, mark: str = "") -> str:
    """Fill the template. Scripts are named by their hash in the page's policy, so that nothing else can ever run."""
    style = _template("style.css")
    light, dark = palette.css_variables()
    scripts = [_template(name) for name in ("page.js", "charts.js", "explorer.js")]
    heat = base64.b64encode(palette.heat_bytes()).decode()
    scripts = [script.replace("{{heat}}", heat) for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    links = re.findall(r'<section id="([a-z]+)"><h2>([^<]*)</h2>', content)
    values = {
        "title": escape(title),
        "about": escape(about),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}",
        "generator": GENERATOR + mark,
        "style": style.replace("{{light}}", light).replace("{{dark}}", dark),
        "links": "".join(f'<a href="#{identity}">{text}</a>' for identity, text in links) if len(links) > 1 else "",
        "content": content,
        "scripts": "".join(f"<script>{script}</script>" for script in scripts),
    }
    # One pass: what is filled in is never filled again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _template("page.html"))


def _look(folder: Path, backbone: Backbone, examples: ImageDataset) -> dict[str, Any] | None:
    """What the model sees in a few examples, spread evenly; None where there is nothing to explore."""
    from frugalvit.visualization.explorer_data import Picture, gather
    from frugalvit.visualization.model_views import kept_share

    pictures: list[Picture] = []
    for index in range(0, len(examples), max(1, len(examples) // _EXAMPLES_SHOWN)):
        try:
            pictures.append(Picture.of(examples.names[index], examples.read(index)))
        except UserError:
            continue  # a bad image was named when the data were read; the next one serves as well
        if len(pictures) == _EXAMPLES_SHOWN:
            break
    keep = kept_share(backbone.img_size)
    try:
        return gather([(folder.resolve().name, backbone)], pictures, second_views=True, keep=keep)
    except UserError as reason:
        console.info(f"The report has no explorer: {reason}")
        return None


def _merge_lens(records: list[RunRecord]) -> dict[str, Any] | None:
    """One explorer for the runs that looked at the same images: one run of each kind, as many as a page can carry.

    The same are those of the same pixels: pictures of two datasets may well have one name.
    """
    kinds: dict[str, RunRecord] = {}
    for record in records:
        if record.lens:
            kinds.setdefault(record.kind(), record)
    images: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    weight = 0
    for record in kinds.values():
        assert record.lens is not None
        images = images or record.lens["images"]
        if [image["src"] for image in record.lens["images"]] != [image["src"] for image in images]:
            record.note("Not in the explorer, which shows other pictures than its model looked at (--images).")
            continue
        weight += len(json.dumps(record.lens["models"]))
        if models and weight > _HEAVIEST_LENS:
            break
        models += [{**model, "name": record.name} for model in record.lens["models"]]
    return {"images": images, "models": models} if models else None


def _each(records: list[RunRecord], part: Any) -> str:
    """A part for every run that has it, under the run's name where they differ."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(part(record), []).append(record.name)
    names.pop("", None)
    if len(records) == 1 or (len(names) == 1 and len(next(iter(names.values()))) == len(records)):
        return next(iter(names), "")
    return "".join(
        f"<details{' open' if i == 0 else ''}><summary>{escape(', '.join(owners))}</summary>{body}</details>"
        for i, (body, owners) in enumerate(names.items())
    )


def _about(records: list[RunRecord]) -> str:
    """One line: what was run on what, as far as all runs have it in common; of differing data, the first few names."""
    tasks = [record.summary.get("task") for record in records]
    backbones, data, epochs = ([r.setting.get(name) for r in records] for name in ("backbone", "data", "epochs"))
    lengths = [f"{count:g} epochs" if isinstance(count, int | float) else None for count in epochs]
    words = [values[0] if all(value == values[0] for value in values) else None for values in (tasks, backbones, data)]
    if words[2] is None:
        names = [name for name in dict.fromkeys(sections.data_names(records)) if name]
        words[2] = truncate_list(names, _NAMED)
    if len(set(lengths)) == 1:
        words.append(lengths[0])
    return " · ".join(str(word) for word in words if word)


def _template(name: str) -> str:
    return (resources.files("frugalvit.report") / "templates" / name).read_text(encoding="utf-8")
