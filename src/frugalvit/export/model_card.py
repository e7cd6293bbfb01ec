"""The model card (README.md) of an exported folder: architecture, data, recipe, scores, use."""

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
    """Write README.md with the front matter that the hub reads.

    summary, settings: of the run; empty if there is none
    scored_at:         the input size of the scores, if the model now has another
    """
    known = {**model.meta, **summary}
    certain = known if scored_at is None else without_scores(known)  # the front matter has no room for the size
    front = yaml.safe_dump(_front_matter(model, licence, certain), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {markdown_text(model.name)}",
        _architecture(model),
        "## Data\n\n" + _data(model, known, settings),
        "## Recipe\n\n" + _recipe(settings, known),
        "## Scores\n\n" + _scores(known, model, scored_at),
        "## Use\n\n" + _use(model),
        "## Licence\n\n" + _licence(licence),
    ]
    write_text(folder / "README.md", "\n\n".join(sections) + "\n")


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
        for label, value in known_scores(known, model.backbone.num_classes).items()
    ]
    if scores and known.get("data"):
        data = str(known["data"])
        result = {"task": {"type": task}, "dataset": {"name": data, "type": data}, "metrics": scores}
        front["model-index"] = [{"name": model.name, "results": [result]}]
    return front


def _architecture(model: ReadyModel) -> str:
    backbone = model.backbone
    size = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    grid = " × ".join(map(str, backbone.grid_size(backbone.img_size)))
    purpose = f"a classifier of {backbone.num_classes} classes" if backbone.num_classes else "a feature extractor"
    return (
        f"`{backbone.name}` with {size:.2f} M parameters, {purpose}, for images of {in_pixels(backbone.img_size)}. "
        f"Its output is {backbone.dim} features and a final grid of {grid}. Made with frugalvit {__version__}."
    )


def _data(model: ReadyModel, known: dict[str, Any], settings: dict[str, Any]) -> str:
    data = known.get("data") or settings.get("data")
    lines = [f"Trained on {markdown_text(str(data))}." if data else "The training data is not recorded."]
    if model.classes:
        names = ", ".join(markdown_text(name) for name in model.classes[:50])
        more = f" … and {len(model.classes) - 50} more" if len(model.classes) > 50 else ""
        lines.append(f"Classes: {names}{more}.")
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
        return "The training options are not recorded."
    return as_markdown(["setting", "value"], rows).rstrip()


def known_scores(known: dict[str, Any], classes: int) -> dict[str, float]:
    """Return the recorded scores by their labels; without top-5 of five classes, which is always 100."""
    scores = {label: known[name] for name, label in _SCORES.items() if isinstance(known.get(name), int | float)}
    return {label: value for label, value in scores.items() if classes > 5 or label != _SCORES["top5"]}


def _scores(known: dict[str, Any], model: ReadyModel, scored_at: tuple[int, int] | None) -> str:
    rows = [(label, f"{value:.2f} %") for label, value in known_scores(known, model.backbone.num_classes).items()]
    if not rows:
        return "Not scored."
    split = f" on {known['scored_on']}" if known.get("scored_on") else ""
    count = f", {known['scored_images']:,} images" if isinstance(known.get("scored_images"), int) else ""
    if scored_at is None:
        return as_markdown([f"score{split}{count}", ""], rows).rstrip()
    table = as_markdown([f"score{split}{count}, at {in_pixels(scored_at)}", ""], rows).rstrip()
    return f"The model was not scored at {in_pixels(model.backbone.img_size)}, its input size here.\n\n{table}"


def _use(model: ReadyModel) -> str:
    is_timms = _is_timms(timm_config(model.backbone)["architecture"])
    ours = "" if is_timms else "import frugalvit  # adds this architecture to timm\n"
    # Without a classifier the tensors have names that only timm's loader understands; transformers does not use it.
    theirs = (
        "With transformers (4.53 or newer):\n\n```python\n"
        "from transformers import pipeline\n\n"
        'classify = pipeline("image-classification", model="FOLDER")\n```\n\n'
        if is_timms and model.backbone.num_classes
        else ""
    )
    return (
        "```python\n"
        f'{ours}import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        "```\n\n"
        f"{theirs}"
        "With frugalvit, including preprocessing and class names:\n\n"
        "```python\n"
        'import frugalvit as fv\n\nmodel = fv.load("FOLDER")\n'
        'features = model.features(model.transform("photo.jpg"))\n'
        "```"
    )


def _is_timms(architecture: str) -> bool:
    import timm

    return timm.models.model_entrypoint(architecture).__module__.startswith("timm.")


def _licence(licence: str) -> str:
    if licence == "unknown":
        return "Not stated. The person who trained the weights chooses their licence."
    return f"The weights: {markdown_text(licence)}."
