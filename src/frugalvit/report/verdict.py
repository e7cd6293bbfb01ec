"""What a page says first: what the model is, how good it is, and what to do next."""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from frugalvit.config.defaults import published_backbone
from frugalvit.report.run_record import RunRecord, as_finite
from frugalvit.utils import console
from frugalvit.utils.scores import Score, read_scores, share_interval
from frugalvit.utils.tables import as_text
from frugalvit.utils.text import pluralize

_GAP = 10.0  # points between training and unseen images; more is overfitting
_LEARNED = 90.0  # per cent of the training images; less is underfitting

_FEATURE_TASKS = ("pretrain", "distil")

Tile = tuple[str, str, str]
"""Label, value, and a note on what is good."""


def find_title(records: list[RunRecord], compared: Mapping[str, dict[str, Any]]) -> str:
    """Return what the page is about: a model and its data, a question, or the number of runs."""
    if len(compared) == 1:
        result = next(iter(compared.values()))
        return result.get("question") or f"Which is better: {' or '.join(result.get('settings', {}))}?"
    record, task = records[0], records[0].summary.get("task")
    if len(records) > 1 or task is None:
        return record.name if len(records) == 1 else pluralize(len(records), "run")
    data = Path(str(_data_of(record) or "")).name or "its data"
    if task in _FEATURE_TASKS:
        return f"Features learned without labels from {data}"
    classes, target = list(record.summary.get("classes") or ()), record.summary.get("target", "class")
    what = pluralize(len(classes), "label" if target == "labels" else "class") + " of " if classes else ""
    if target == "number":
        return f"Regression: {classes[0]} of {data}"
    return f"{ {'detect': 'Detector', 'segment': 'Segmenter'}.get(task, 'Classifier') }: {what}{data}"


def verdict(record: RunRecord) -> str:
    """Say how good the model is, with numbers, alarms and the next commands."""
    scores = read_scores(record.summary)
    if record.summary.get("task") in _FEATURE_TASKS:
        sentences, tiles = _judge_features(record)
    else:
        sentences = [_describe_score(scores[0]), *_judge_fit(record)] if scores else []
        tiles = _score_tiles(record, scores)
    text = _mark_options("".join(f"<p>{escape(sentence)}</p>" for sentence in sentences))
    cells = "".join(
        f"<div><dt>{escape(label)}{f'<span>{escape(note)}</span>' if note else ''}</dt><dd>{escape(value)}</dd></div>"
        for label, value, note in tiles
    )
    text += f'<dl class="tiles">{cells}</dl>' if cells else ""
    alarms = "".join(
        f"<li>{escape(alarm[:1].upper() + alarm[1:])}</li>" for alarm in record.summary.get("alarms") or []
    )
    text += f'<ul class="alarms" id="alarms">{_mark_options(alarms)}</ul>' if alarms else ""
    steps = "".join(f"<li>{escape(why)}: <code>{escape(command)}</code></li>" for why, command in next_steps(record))
    text += f'<h2 id="next">What to do next</h2><ul class="next">{steps}</ul>' if text and steps else ""
    return f'<div class="verdict">{text}</div>' if text else ""


def _mark_options(text: str) -> str:
    """Set the options in a text as code, so that no line breaks inside one."""
    return re.sub(r"(--[a-z][a-z.-]*[a-z])", r"<code>\1</code>", text)


def _describe_score(score: Score) -> str:
    start = "It is right on" if score.name == "top-1" else f"Its {score.name} is"
    joint = " of" if score.name == "top-1" else " on"
    interval = "" if score.interval is None else f" (95 % interval {score.show(*score.interval)})"
    chance = (
        "" if score.chance is None else f" A model that does not look at the images has {score.show(score.chance)}."
    )
    return f"{start} {score.show(score.value)}{joint} {score.scored_on}{interval}.{chance}"


def _judge_fit(record: RunRecord) -> list[str]:
    """Tell over- from underfitting by the accuracy on training images and on others."""
    known, unseen = _training_score(record), as_finite(record.summary.get("top1"))
    if record.summary.get("at_chance"):
        return ["It failed: it has learned hardly anything about these classes. See the alarms below."]
    if known is None or unseen is None:
        return []
    numbers = f"it is right on {known:.1f} % of the training images and on {unseen:.1f} % of the others"
    simple = as_finite((record.summary.get("floor") or {}).get("best")) if _is_near_floor(record) else None
    floor = [] if simple is None else [f"A simple method without a network has {simple:.1f} % on these others."]
    if known < _LEARNED:
        also = "; it overfits too" if known - unseen > _GAP else ""
        advice = "Train longer (--epochs), or use a larger --backbone."
        return [f"It underfits{also}: {numbers}. {advice}", *floor]
    if known - unseen > _GAP:
        advice = "More images help most, with or without labels (pretrain, --unlabelled)."
        return [f"It overfits: {numbers}. {advice}", *floor]
    if floor:
        low = share_interval(simple or 0.0, record.summary["floor"]["scored_images"])[0]
        advice = "Add images, or start from published weights: 'frugalvit probe', or --pretrained if you have a GPU."
        return [
            f"It is {'worse' if unseen < low else 'not clearly better'} than a simple method: {numbers}.",
            *floor,
            advice,
        ]
    return [f"It fits well: {numbers}."]


def _is_near_floor(record: RunRecord) -> bool:
    """True if the score is within or below the 95 % interval of the best simple method."""
    floor, top1 = record.summary.get("floor") or {}, as_finite(record.summary.get("top1"))
    best, images = as_finite(floor.get("best")), floor.get("scored_images")
    return best is not None and top1 is not None and bool(images) and top1 <= share_interval(best, images)[1]


def _training_score(record: RunRecord) -> float | None:
    return as_finite((record.summary.get("training_images") or {}).get("top1"))


def _score_tiles(record: RunRecord, scores: list[Score]) -> list[Tile]:
    summary = record.summary
    tiles = []
    for score in scores[:1]:
        interval = f"{score.interval_text}; " if score.interval else ""
        tiles.append((score.name, score.show(score.value), interval + score.scored_on))
    if (known := _training_score(record)) is not None:
        images = int(summary["training_images"]["count"])
        interval = "95 %: {:.1f} to {:.1f}; ".format(*share_interval(known, images)) if images else ""
        note = f"{interval}top-1 on {pluralize(images, 'image')}, not augmented"
        tiles.append(("training images", f"{known:.1f} %", note))
    if (floor := as_finite((summary.get("floor") or {}).get("best"))) is not None:
        note = "the best simple method: " + str(summary["floor"].get("method", "")).replace("_", " ")
        if images := summary["floor"].get("scored_images"):
            low, high = share_interval(floor, images)
            about = "clearly worse" if summary.get("top1", 0) < low else "not clearly better or worse"
            note = f"95 %: {low:.1f} to {high:.1f}; {note}"
            note += f"; the model is {about}" if _is_near_floor(record) else ""
        tiles.append(("floor, without a network", f"{floor:.1f} %", note))
    return tiles + [(score.name, score.show(score.value), score.interval_text) for score in scores[1:4]]


def _judge_features(record: RunRecord) -> tuple[list[str], list[Tile]]:
    """Judge pre-training by its health metrics; not by the loss, which also falls in a collapse."""
    summary, tiles = record.summary, []
    health, rank = summary.get("health"), summary.get("effective_rank")
    sentences = []
    if isinstance(health, str):
        fine = "It is healthy: no sign of collapse or stagnation."
        sentences = [fine if health == "healthy" else f"It is not healthy ({health}): see the alarms."]
    for score in read_scores(summary):
        optimistic = "; optimistic, on training images" if summary.get("knn_on") == "sample" else ""
        note = f"{score.interval_text}; {score.scored_on}, by the labels of the most similar images"
        note += "" if score.chance is None else f"; chance {score.chance:.1f} %"
        tiles.append((score.name, f"{score.value:.1f} %", note + optimistic))
    if isinstance(rank, int | float):
        most = f" of at most {summary['largest_rank']:,}" if isinstance(summary.get("largest_rank"), int) else ""
        note = f"dimensions{most} that the features use; 1 means that all images look the same"
        tiles.append(("effective rank", as_text(rank), note))
    return sentences, tiles


def next_steps(record: RunRecord) -> list[tuple[str, str]]:
    """Return what to do next, and its command."""
    run, task = console.shell_quote(record.summary.get("run", record.folder)), record.summary.get("task")
    if task in _FEATURE_TASKS:
        return [
            ("Measure the features with a few labels", f"frugalvit probe knn {run} LABELLED/"),
            ("Train a classifier from them", f"frugalvit train LABELLED/ --init {run}"),
        ]
    if task not in ("train", "probe", "detect", "segment"):
        return []
    command = f"frugalvit {task}" if task in ("detect", "segment") else "frugalvit"
    steps = [
        ("Use it on new images", f"{command} predict {run} IMAGE"),
        ("Score it on labelled images that it has not seen", f"{command} eval {run} OTHERS/"),
    ]
    data = console.shell_quote(_data_of(record) or "DATA")
    is_photo = "backbone_args.pixel_type" not in record.setting  # published networks see photos
    if record.mistakes and is_photo and record.summary.get("target", "class") == "class":
        # Not the run itself: it has learned these labels, the wrong ones too.
        steps.append(("Find wrong labels", f"frugalvit data {data} --suspicious {published_backbone('cpu')[0]}"))
    if record.summary.get("alarms") or _is_near_floor(record):
        steps.insert(0, ("See what these images and this machine allow", f"frugalvit advise {data}"))
    return steps


def _data_of(record: RunRecord) -> str | None:
    """Return the path or name of the data; a saved probe has no configuration."""
    return record.setting.get("data") or record.data.get("data")
