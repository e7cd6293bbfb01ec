"""The model card of an exported folder: what the model is, what it learned from, how well it does, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from frugalvit import __version__
from frugalvit.backbones.weights.timm_config import timm_config
from frugalvit.experiment.load_model import without_scores
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import as_markdown, markdown_text

if TYPE_CHECKING:
    from frugalvit.export.inference_model import ReadyModel

_SCORES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "mean accuracy per class"}
_RECIPE = ("recipe", "init", "epochs", "steps", "batch", "lr", "seed", "precision")


def write_card(
    folder: Path,
    model: ReadyModel,
    licence: str,
    summary: dict[str, Any],
    settings: dict[str, Any],
    scored_at: tuple[int, int] | None = None,
) -> None:
    """``README.md`` with the front matter the hub reads.

    summary and settings: a run's, or empty
    scored_at:            the size of the images the model was scored on, where it now takes another
    """
    write_text(folder / "README.md", card(model, licence, summary, settings, scored_at))


def card(
    model: ReadyModel,
    licence: str,
    summary: dict[str, Any],
    settings: dict[str, Any],
    scored_at: tuple[int, int] | None = None,
) -> str:
    known = {**model.meta, **summary}
    stated = known if scored_at is None else without_scores(known)  # machines read no reservations
    front = yaml.safe_dump(_front_matter(model, licence, stated), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {markdown_text(model.name)}",
        _what(model),
        "## Data\n\n" + _data(model, known, settings),
        "## Recipe\n\n" + _recipe(settings, known),
        "## Scores\n\n" + _scores(known, model, scored_at),
        "## Use\n\n" + _use(model),
        "## Licence\n\n" + _licence(licence),
    ]
    return "\n\n".join(sections) + "\n"


def in_pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]} pixels"


def _front_matter(model: ReadyModel, licence: str, known: dict[str, Any]) -> dict[str, Any]:
    task = "image-classification" if model.backbone.num_classes else "image-feature-extraction"
    front: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": task,
        "license": licence,
        "tags": ["timm", "frugalvit", task],
    }
    scores = [
        {"type": "accuracy", "name": label, "value": value}
        for label, value in _given_scores(known, model.backbone.num_classes).items()
    ]
    if scores and known.get("data"):
        data = str(known["data"])
        result = {"task": {"type": task}, "dataset": {"name": data, "type": data}, "metrics": scores}
        front["model-index"] = [{"name": model.name, "results": [result]}]
    return front


def _what(model: ReadyModel) -> str:
    backbone = model.backbone
    size = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    grid = " × ".join(map(str, backbone.grid_size(backbone.img_size)))
    purpose = f"a classifier of {backbone.num_classes} classes" if backbone.num_classes else "a feature extractor"
    return (
        f"`{backbone.name}` with {size:.2f} M parameters, {purpose}, for images of {in_pixels(backbone.img_size)}. "
        f"It gives {backbone.dim} features and a final grid of {grid}. Made with frugalvit {__version__}."
    )


def _data(model: ReadyModel, known: dict[str, Any], settings: dict[str, Any]) -> str:
    data = known.get("data") or settings.get("data")
    lines = [f"Trained on {markdown_text(str(data))}." if data else "What it was trained on is not recorded."]
    if model.classes:
        shown = ", ".join(markdown_text(name) for name in model.classes[:50])
        more = f" … and {len(model.classes) - 50} more" if len(model.classes) > 50 else ""
        lines.append(f"Classes: {shown}{more}.")
    return "\n\n".join(lines)


def _recipe(settings: dict[str, Any], known: dict[str, Any]) -> str:
    chosen = {"recipe": known.get("recipe"), **{name: settings.get(name) for name in _RECIPE if name in settings}}
    for group in ("localization", "matching", "optimizer"):
        inner = settings.get(group)
        if isinstance(inner, dict):
            plain = {name: value for name, value in inner.items() if not isinstance(value, dict | list)}
            chosen |= {f"{group}.{name}": value for name, value in plain.items()}
    rows = [(name, str(value)) for name, value in chosen.items() if value not in (None, "auto")]
    if not rows:
        return "How it was trained is not recorded."
    return as_markdown(["setting", "value"], rows).rstrip()


def _given_scores(known: dict[str, Any], classes: int) -> dict[str, float]:
    """Those that are known; top-5 of five classes is always 100 and says nothing."""
    given = {label: known[name] for name, label in _SCORES.items() if isinstance(known.get(name), int | float)}
    return {label: value for label, value in given.items() if classes > 5 or label != _SCORES["top5"]}


def _scores(known: dict[str, Any], model: ReadyModel, scored_at: tuple[int, int] | None) -> str:
    rows = [(label, f"{value:.2f} %") for label, value in _given_scores(known, model.backbone.num_classes).items()]
    if not rows:
        return "Not scored."
    place = f" on {known['scored_on']}" if known.get("scored_on") else ""
    count = f", {known['scored_images']:,} images" if isinstance(known.get("scored_images"), int) else ""
    if scored_at is None:
        return as_markdown([f"score{place}{count}", ""], rows).rstrip()
    table = as_markdown([f"score{place}{count}, at {in_pixels(scored_at)}", ""], rows).rstrip()
    return f"At {in_pixels(model.backbone.img_size)}, the size of this model, it was not scored.\n\n{table}"


def _use(model: ReadyModel) -> str:
    stock = _is_stock(timm_config(model.backbone)["architecture"])
    ours = "" if stock else "import frugalvit  # adds this architecture to timm\n"
    # Without a classifier a folder's names follow timm's loader, which transformers goes around.
    theirs = (
        "With transformers (4.53 or newer):\n\n```python\n"
        "from transformers import pipeline\n\n"
        'classify = pipeline("image-classification", model="FOLDER")\n```\n\n'
        if stock and model.backbone.num_classes
        else ""
    )
    return (
        "```python\n"
        f'{ours}import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        "```\n\n"
        f"{theirs}"
        "With frugalvit, preprocessing and class names come along:\n\n"
        "```python\n"
        'import frugalvit as fv\n\nmodel = fv.load("FOLDER")\n'
        'features = model.features(model.transform("photo.jpg"))\n'
        "```"
    )


def _is_stock(architecture: str) -> bool:
    import timm

    return timm.models.model_entrypoint(architecture).__module__.startswith("timm.")


def _licence(licence: str) -> str:
    if licence == "unknown":
        return "Not stated. The weights belong to whoever trained them; their licence is that person's to choose."
    return f"The weights: {markdown_text(licence)}."
