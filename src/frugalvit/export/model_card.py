"""The model card (README.md) of an exported folder: architecture, data, recipe, scores, use."""

from typing import Any

import timm
import yaml

from frugalvit import __version__
from frugalvit.backbones.weights.model_config import timm_architecture
from frugalvit.experiment.load_model import without_scores
from frugalvit.export.format import ExportJob
from frugalvit.export.inference_model import ReadyModel
from frugalvit.utils.files import write_text
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import as_markdown, markdown_text

_SCORES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "mean accuracy per class"}
_RECIPE = ("recipe", "init", "epochs", "steps", "batch", "lr", "seed", "precision")


def write_card(job: ExportJob, summary: dict[str, Any]) -> None:
    """Write README.md with the front matter that the hub reads. ``summary`` is the run's; empty if there is none."""
    model, settings = job.model, job.settings
    known = {**model.meta, **summary}
    if job.resized:
        known = without_scores(known)
    licence = f"The weights: {markdown_text(job.config.license)}."
    if job.config.license == "unknown":
        licence = "Not stated. The person who trained the weights chooses their licence."
    front = yaml.safe_dump(_front_matter(model, job.config.license, known), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {markdown_text(model.name)}",
        _architecture(model),
        "## Data\n\n" + _data(model, known, settings),
        "## Recipe\n\n" + _recipe(settings, known),
        "## Scores\n\n" + _scores(known, model),
        "## Use\n\n" + _use(model),
        "## Licence\n\n" + licence,
    ]
    write_text(job.folder / "README.md", "\n\n".join(sections) + "\n")


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
    height, width = backbone.img_size
    size = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    grid = " × ".join(map(str, backbone.grid_size(backbone.img_size)))
    purposes = {
        "labels": f"which tells which of {backbone.num_classes} labels an image has",
        "number": "which answers a number",
    }
    purpose = f"a classifier of {backbone.num_classes} classes" if backbone.num_classes else "a feature extractor"
    purpose = purposes.get(model.meta.get("target", ""), purpose)
    return (
        f"`{backbone.name}` with {size:.2f} M parameters, {purpose}, for images of {height} × {width} pixels. "
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


def _scores(known: dict[str, Any], model: ReadyModel) -> str:
    scores = [score for score in read_scores(known) if score.name != "top-5" or model.backbone.num_classes > 5]
    if not scores:
        return "Not scored."
    where = f"{scores[0].scored_on[0].upper()}{scores[0].scored_on[1:]}" if scores[0].images else "Images not recorded"
    table = score_table(scores)
    return f"{where}.\n\n{as_markdown(table.columns, table.rows).rstrip()}"


def _use(model: ReadyModel) -> str:
    if model.backbone.pixel_type != "uint8":
        return (
            f"The network takes {model.pixels} as files hold them. `preprocessing.py` in this folder reads a file as "
            'training did: `preprocess("image.tif", json.load(open("FOLDER/config.json")))`. '
            'With frugalvit: `fv.load("FOLDER").predict("image.tif")`.'
        )
    architecture, _ = timm_architecture(model.backbone)
    is_timms = timm.models.model_entrypoint(architecture).__module__.startswith("timm.")
    import_line = "" if is_timms else "import frugalvit  # adds this architecture to timm\n"
    # Without a classifier the tensors have names that only timm's loader understands; transformers does not use it.
    transformers_use = (
        "With transformers (4.53 or newer):\n\n```python\n"
        "from transformers import pipeline\n\n"
        'classify = pipeline("image-classification", model="FOLDER")\nclassify(read_rgb("photo.jpg"))\n```\n\n'
        if is_timms and model.backbone.num_classes and model.meta.get("target", "class") == "class"
        else ""
    )
    calibrated = ""
    if model.calibration is not None:
        calibrated = f"Calibrated probabilities are `softmax(logits / {model.calibration.temperature:.6g})`.\n\n"
    return (
        f"{calibrated}"
        "`preprocessing.py` in this folder reads a file as training did: upright by EXIF, transparent pixels on white, "
        "16 bits scaled to 8. Pillow's `convert` does none of these.\n\n"
        "```python\n"
        f'import sys\n\n{import_line}import timm\n\nsys.path.append("FOLDER")\n'
        'from preprocessing import read_rgb\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        'output = model(transform(read_rgb("photo.jpg"))[None])\n'
        "```\n\n"
        f"{transformers_use}"
        "With frugalvit, including preprocessing and class names:\n\n"
        "```python\n"
        'import frugalvit as fv\n\nmodel = fv.load("FOLDER")\n'
        'features = model.features(model.transform("photo.jpg"))\n'
        "```"
    )
