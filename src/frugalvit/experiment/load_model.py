"""The MODEL argument and --init: a run folder, a checkpoint, an exported folder or an architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.registry import get_architecture, is_model_name, suggest_names
from frugalvit.backbones.weights.convert import classifier_part
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import WEIGHT_FILES, find_model_folder, saved_size
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.backbones.weights.published import (
    describe_file,
    find_published,
    has_published,
    is_published,
    network_in_name,
)
from frugalvit.config.train import RunConfig
from frugalvit.data.augmentation.transforms import EvalTransform
from frugalvit.engine.checkpoint import read_state
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import Calibration, read_calibration
from frugalvit.experiment.resolve import AutoValues
from frugalvit.runs import layout
from frugalvit.runs.resume import command_of
from frugalvit.utils import console
from frugalvit.utils.text import truncate_list

C = TypeVar("C", bound=RunConfig)

_MODELS = "Pass a run folder, a checkpoint or an exported folder"

SCORES = ("top1", "top5", "mean_per_class", "knn", "map", "r2", "calibration")
"""What a model folder stores about its weights at its input size."""


@dataclass
class Model:
    """A backbone with its preprocessing, class names and origin."""

    backbone: Backbone
    transform: EvalTransform
    classes: tuple[str, ...] | None = None
    name: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None


def load_model(
    source: str,
    device: str = "cpu",
    *,
    img_size: int | tuple[int, int] | None = None,
    architecture: str | None = None,
    random: bool = False,
    pretrained: bool = False,
) -> Model:
    """Load a model in eval mode on ``device``.

    architecture: of a bare checkpoint file, which does not store it; a tag of timm also sets the preprocessing
    pretrained:   the name of an architecture means its published weights
    random:       do not warn that the name of an architecture alone has random weights
    """
    path, checkpoint = Path(source), None
    by_name = not path.exists() and (pretrained or (is_published(source) and not (random and is_model_name(source))))
    if pretrained and not (by_name and (is_model_name(source) or is_published(source))):
        raise UserError(f"--pretrained needs the name of a published network, not '{source}'. Drop --pretrained.")
    if by_name:
        path = find_published(source)
    meta: dict[str, Any] = {}
    folder = described_by(path)
    if folder is not None and (architecture is None or path.name not in WEIGHT_FILES):
        path, checkpoint = folder, None if path.name in WEIGHT_FILES else path
    if path.is_dir():
        folder = find_model_folder(path)
        if folder is None:
            hint = _MODELS
            if (path / layout.CONFIG).exists():
                resume = f"frugalvit {command_of(path) or 'train'} --resume {console.shell_quote(path)}"
                hint = f"The run is not finished: resume it with '{resume}'"
            elif runs := sorted(path.glob(f"*/seed_*/{layout.MODEL}")):
                hint = f"It has several runs: pass one, for example {runs[0].parent}"
            raise UserError(f"{path} holds no model (no config.json). {hint}.")
        backbone, meta = load_model_folder(folder, img_size=img_size)
        if architecture not in (None, backbone.name):
            raise UserError(f"{path} holds a {backbone.name}. Drop --backbone {architecture}.")
        if img_size is not None:
            _log_notes(backbone.notes)
            if backbone.img_size != saved_size(folder):
                meta.pop("calibration", None)  # it was measured at the other size
        name = source if by_name else path.resolve().name
        if checkpoint is not None:
            state, fault = read_state(checkpoint)
            if state is None:
                advice = "Pass another checkpoint of the run, or the run itself"
                raise UserError(f"{checkpoint} is damaged ({fault}). {advice}.")
            prefix = "pyramid.backbone."  # of a detector or segmenter
            dense = {name.partition(prefix)[2]: value for name, value in state["task"].items() if prefix in name}
            load_weights(backbone, {"task": dense} if dense else checkpoint, strict=True)
            name, meta = f"{name}-{checkpoint.stem}", without_scores(meta) | {"checkpoint": True}
    elif path.is_file():
        backbone, meta = _load_file(path, source if by_name else architecture, img_size)
        name = source if by_name else path.stem
    else:
        if "/" in source or source.endswith((".pt", ".pth", ".safetensors")):
            raise UserError(f"There is no model at {source}. {_MODELS}.")
        if not is_model_name(source):
            names = "or a name of 'frugalvit list models'"
            raise UserError(
                f"There is no folder, file or network '{source}'.{suggest_names(source)} {_MODELS}, {names}."
            )
        if not random:
            hint = "Set --pretrained for the published ones" if has_published(source) else f"{_MODELS} for trained ones"
            console.warning(f"'{source}' is only a name: its weights are random. {hint}")
        backbone = create_backbone(source, img_size=img_size or 224)
        _log_notes(backbone.notes)
        name = source
    classes = meta.get("classes")
    calibration = read_calibration(folder or path, meta.get("calibration"), backbone.pooled_dim)
    classes, transform = tuple(classes) if classes else None, eval_transform(backbone)
    return Model(backbone.to(device).eval(), transform, classes, name, meta, calibration)


def eval_transform(backbone: Backbone) -> EvalTransform:
    """Return the preprocessing of a backbone: resize, center crop, normalize."""
    pixels, crop = backbone.pixel_type, backbone.eval_crop
    return EvalTransform(backbone.img_size, backbone.mean, backbone.std, pixel_type=pixels, **crop)


def adopt_init_architecture(config: C, auto: AutoValues, *, with_size: bool = True) -> C:
    """Take the architecture (``with_size``: and input size) that the user did not set from the folder of --init."""
    if not config.init or config.resume:
        return config
    path = find_init(config.init)
    folder = find_model_folder(described_by(path) or path)
    if folder is None and (path / layout.DATA).is_file():
        raise UserError(
            f"--init {config.init}: this run is not finished. Resume it, or use --init "
            f"{console.shell_quote(f'{config.init}/{layout.CHECKPOINTS}/{layout.LAST}')} with its --backbone."
        )
    if folder is None and path.is_file():
        return _adopt_published(config, path, auto, with_size)
    if folder is None:
        return config
    try:
        network = load_model_folder(folder)[0]
    except UserError:
        if config.backbone == "auto":
            raise
        return config  # not our folder, and the user names the network: loading shows whether the weights fit
    backbone = auto.choose("backbone", config.backbone, network.name, f"the network of {config.init}")
    statistics = ("mean", "std", "pixel_type")
    keywords = {key: network.keywords[key] for key in (*statistics, "eval_crop") if key in network.keywords}
    wanted, stored = (get_architecture(name).partition(".")[0] for name in (backbone, network.name))
    if wanted == stored:
        keywords = network.architecture_kwargs() | ({} if network.in_chans == 3 else {"in_chans": network.in_chans})
        if with_size:
            auto.choose("img_size", config.img_size, network.img_size, f"the input size of {config.init}")
    keywords |= config.backbone_args
    if keywords.get("in_chans", 3) != network.in_chans:  # mean and std are per channel
        keywords = {key: value for key, value in keywords.items() if key not in statistics} | config.backbone_args
    return auto.apply(config.with_options({"backbone_args": keywords}, type(config)), type(config))


def _adopt_published(config: C, path: Path, auto: AutoValues, with_size: bool) -> C:
    """Take the network and the pixel statistics of a bare file of --init from the tag of timm that it fits."""
    init = str(config.init)
    name = config.backbone if config.backbone != "auto" else network_in_name(path) if path == Path(init) else init
    if name is None:
        return config
    published = describe_file(path, name)
    if published.tag is None:
        return config
    console.info(f"{path} does not name its network: {published}")
    auto.choose("backbone", config.backbone, published.architecture, f"the network of {config.init}")
    if with_size:
        size = published.keywords["img_size"]
        auto.choose("img_size", config.img_size, size, f"the input size of {published.tag}")
    stored = {key: published.keywords[key] for key in ("mean", "std", "eval_crop")} | {"keep_patch_size": True}
    if config.backbone_args.get("in_chans", 3) != 3:  # mean and std are per channel
        stored = {}
    config = config.with_options({"backbone_args": stored | config.backbone_args}, type(config))
    return auto.apply(config, type(config))


def described_by(path: Path) -> Path | None:
    """Return the folder that describes the network of a weights file: the model's or the finished run's."""
    if not path.is_file():
        return None
    if path.name in WEIGHT_FILES and (path.parent / "config.json").is_file():
        return path.parent
    run = path.parent.parent
    in_run = path.parent.name == layout.CHECKPOINTS and path.name in layout.CHECKPOINT_FILES
    return run if in_run and (run / layout.MODEL / "config.json").is_file() else None


def without_scores(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name not in SCORES}


def _load_file(
    path: Path, architecture: str | None, img_size: int | tuple[int, int] | None
) -> tuple[Backbone, dict[str, Any]]:
    """Load a bare file into the published network, with the preprocessing of the tag of timm that it fits."""
    published = describe_file(path, architecture)
    keywords = {"img_size": 224, "keep_patch_size": True} | published.keywords
    if img_size is not None:
        keywords["img_size"] = img_size
    backbone = create_backbone(published.architecture, **keywords)
    report = load_weights(backbone, path)
    if report.missing:
        lacking = truncate_list(report.missing, 4)
        raise UserError(f"{path} lacks these tensors of '{published.architecture}': {lacking}. Is --backbone right?")
    console.info(f"{path} does not name its network: {published}")
    unused = [name for name in report.left_over if classifier_part(name) is None]
    if unused:
        console.warning(f"{path}: the network has no {truncate_list(unused, 4)}. Is --backbone right?")
    if report.notes:
        console.info(f"{path}: {'; '.join(report.notes)}")
    classes = published.meta.get("classes")
    return backbone, published.meta | {"classes": classes if len(classes or ()) == backbone.num_classes else None}


def find_init(init: str) -> Path:
    """Return the path of --init: as typed, or the weights of a published network."""
    if Path(init).exists():
        return Path(init)
    if is_published(init):
        return find_published(init)
    hint = f" For its published weights write --backbone {init} --pretrained." if is_model_name(init) else ""
    raise UserError(
        f"--init {init}: there is no such run, exported folder, checkpoint file or published network.{hint}"
    )


def _log_notes(notes: list[str]) -> None:
    for note in notes:
        console.info(note)
