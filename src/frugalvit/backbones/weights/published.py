"""Published networks by name: find their weights here or on the hub, and their preprocessing.

A published network is a tag of timm (``vit_small_patch14_dinov2.lvd142m``), ``torchvision:resnet50``, a repository of
the hub in timm's format (``hf-hub:owner/name``), or a file that someone released. The folder ``FRUGALVIT_WEIGHTS`` is
searched before the hub. It holds files (``NAME.safetensors``) or model folders (``NAME/``, ``owner/NAME/``).
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, list_pretrained
from torch import Tensor

from frugalvit.backbones.registry import get_architecture, is_model_name
from frugalvit.backbones.weights.convert import Contents, classifier_part, open_contents
from frugalvit.backbones.weights.safe_load import read_with_metadata
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.files import expand_home
from frugalvit.utils.text import truncate_list

FOLDER = "FRUGALVIT_WEIGHTS"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TIMEOUT = 5  # seconds to wait for the hub's first answer
# Files whose networks were published with timm's settings. Others (ours, EsViT's, Drloc's) use ImageNet's.
_KINDS = ("timm", "torchvision", "swin", "t2t-vit", "dino")


@dataclass(frozen=True)
class Published:
    """The network of a released file: its name, and how images are prepared for it.

    tag:      the tag of timm that fits, or None
    keywords: of ``create_backbone``: img_size, num_classes, mean, std, eval_crop
    meta:     classes, as in a model folder
    """

    architecture: str
    tag: str | None
    keywords: dict[str, Any]
    meta: dict[str, Any]

    def __str__(self) -> str:
        """Return one line about the guess."""
        if self.tag is None:
            return f"the published {self.architecture}, with ImageNet's pixel statistics"
        mean, std = ("/".join(f"{value:g}" for value in dict.fromkeys(self.keywords[key])) for key in ("mean", "std"))
        size = "x".join(str(side) for side in dict.fromkeys(self.keywords["img_size"]))
        crop = "{interpolation}, crop {crop_pct:g}".format(**self.keywords["eval_crop"])
        return f"taken for timm's {self.tag}: {size} px, mean {mean}, std {std}, {crop}"


def is_published(name: str) -> bool:
    """Whether a name means published weights: a tag of timm, ``torchvision:NAME`` or ``hf-hub:OWNER/NAME``."""
    return re.match(r"(?:torchvision|hf[-_]hub):", name) is not None or ("." in name and is_model_name(name))


def find_published(name: str) -> Path:
    """Return the file or folder of a published network (an architecture: of its first tag); download it if needed."""
    return locate_published(name) or _download(name, _repository(name))


def locate_published(name: str) -> Path | None:
    """Return the weights of a published network on this machine: in ``FRUGALVIT_WEIGHTS`` or the hub's cache."""
    repository = _repository(name)
    names = [repository, repository.rpartition("/")[2]]
    if is_model_name(name.rpartition(":")[2]):
        tag = to_tag(name)
        is_first = tag == next(iter(_tags(tag)))
        names += [f"{folder}{tag.partition('.')[0]}" for folder in ("", "timm/") if is_first]
    return _find_local(names) or _get_files(repository, offline=True)


def is_online() -> bool:
    try:
        _check_connection()
    except Exception:
        return False
    return True


def _repository(name: str) -> str:
    repository = re.sub(r"^hf[-_]hub:", "", name)
    if repository != name and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"'{name}' is not a repository of the hub. Use hf-hub:OWNER/NAME.")
    return repository if repository != name else f"timm/{to_tag(name)}"


def read_published(name: str) -> dict[str, Tensor]:
    """Return the tensors of a published network, by the names of its file."""
    path = find_published(name)
    file = next((path / weights for weights in _WEIGHTS if (path / weights).is_file()), path)
    return open_contents(read_with_metadata(file)[0]).network


def has_published(name: str) -> bool:
    return bool(_tags(get_architecture(name)))


def to_tag(name: str) -> str:
    """Return timm's tag of a name: itself, or the first tag of an architecture."""
    prefix, _, rest = name.rpartition(":")
    architecture = get_architecture(rest)
    tags = list(_tags(architecture))
    if prefix == "torchvision":
        tags = [tag for tag in reversed(tags) if re.search(r"\.tv\d?_", tag)]  # the newer tv2 first
    if "." in architecture and prefix != "torchvision":
        if architecture in tags:
            return architecture
        hint = did_you_mean(architecture, tags) or f" It has {truncate_list(tags, 4)}."
        raise UserError(f"timm has no weights '{architecture}'.{hint if tags else ''}")
    if not tags:
        source = "torchvision" if prefix == "torchvision" else "timm"
        raise UserError(
            f"{source} has published no weights of '{rest}' that fit. See 'frugalvit list models', or use --init FILE."
        )
    return tags[0]


def published_size(name: str) -> tuple[int, int]:
    tag = to_tag(name)
    _, height, width = _tags(tag)[tag]["input_size"]
    return height, width


def describe_file(path: Path, architecture: str | None = None) -> Published:
    """Recognize the network of a bare file by the name given, the file's name, and its tensors.

    architecture: may have a tag, which decides the preprocessing
    """
    name = architecture or network_in_name(path)
    if name is None:
        raise UserError(
            f"{path} does not store which network it is for. If it holds weights, set --backbone NAME, or rename it to "
            "NAME.safetensors. Of a run pass the folder."
        )
    return describe_contents(open_contents(read_with_metadata(path)[0]), name)


def describe_contents(contents: Contents, name: str) -> Published:
    """Return the tag of timm whose architecture, classifier and image size fit the tensors."""
    architecture = to_tag(name) if is_published(name) else get_architecture(name)
    weights = (tensor for key, tensor in contents.network.items() if classifier_part(key) == "weight")
    classes = next((len(tensor) for tensor in weights if tensor.ndim), 0)
    keywords: dict[str, Any] = {"num_classes": classes}
    tags = _tags(architecture) if contents.kind in _KINDS else {}
    if "." in architecture:
        tags = {architecture: _tags(architecture)[architecture]}
    tags = {tag: cfg for tag, cfg in tags.items() if cfg["num_classes"] == classes} or tags
    if not tags:
        return Published(name, None, keywords, {})
    tag, cfg = next(iter(tags.items()))
    keywords |= {"img_size": tuple(cfg["input_size"][1:])} | {key: list(cfg[key]) for key in ("mean", "std")}
    keywords["eval_crop"] = crop_settings(cfg)
    return Published(tag.partition(".")[0], tag, keywords, {"classes": _class_names(cfg)})


def crop_settings(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return ``eval_crop`` of ``create_backbone`` from timm's ``pretrained_cfg``."""
    return {
        "crop_pct": cfg.get("crop_pct") or 0.875,
        "interpolation": cfg.get("interpolation") or "bicubic",
        "squash": cfg.get("crop_mode") == "squash",
    }


def _class_names(cfg: dict[str, Any]) -> list[str] | None:
    """Return ImageNet's classes of a classifier, as "n02123045 tabby, tabby cat"; None for other classes."""
    subset = infer_imagenet_subset(cfg)
    if subset is None or not cfg["num_classes"]:
        return None
    info = ImageNetInfo(subset)
    return [f"{name} {info.label_name_to_description(name)}" for name in info.label_names()]


def _tags(architecture: str) -> dict[str, dict[str, Any]]:
    """Return the tags of an architecture with their settings, timm's default first."""
    cfgs = get_arch_pretrained_cfgs(architecture.partition(".")[0])
    return {tag: cfg.to_dict() for tag, cfg in cfgs.items() if cfg.has_weights}


def network_in_name(path: Path) -> str | None:
    """Return the network that a file is named after: its release, NAME.safetensors, or NAME/model.safetensors."""
    if path.name in _released_names():
        return _released_names()[path.name]
    for stem in (path.name.removesuffix(path.suffix), path.parent.name):
        if is_model_name(stem):
            return stem if stem in _tags(stem) else stem.partition(".")[0]
    return None


@cache
def _released_names() -> dict[str, str]:
    """Return timm's tag of every file name that the authors released, such as ``resnet50-0676ba61.pth``."""
    names: dict[str, str] = {}
    for tag in list_pretrained():
        cfg = get_pretrained_cfg(tag)
        if cfg is not None and cfg.url:
            names.setdefault(str(cfg.url).rpartition("/")[2], tag)
    return names


def _find_local(names: list[str]) -> Path | None:
    """Return the first file or model folder with one of these names in ``FRUGALVIT_WEIGHTS``."""
    if not os.environ.get(FOLDER):
        return None
    root = expand_home(os.environ[FOLDER])
    if not root.is_dir():
        raise UserError(f"{FOLDER}={root} is not a folder. Set it to a folder with published weights, or unset it.")
    for name in names:
        if (root / name / "config.json").is_file():
            return root / name
        for suffix in _SUFFIXES:
            if (file := root / f"{name}{suffix}").is_file():
                return file
        if snapshots := sorted(root.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")):
            return snapshots[-1].parent  # a copy of the hub's cache
    return None


def _get_files(repository: str, *, offline: bool) -> Path | None:
    """Return the hub's folder with weights and config.json; None if it has no weights, or not in its cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in _WEIGHTS:
        try:
            hf_hub_download(repository, file, local_files_only=offline)
            return Path(hf_hub_download(repository, "config.json", local_files_only=offline)).parent
        except (LocalEntryNotFoundError, EntryNotFoundError):
            continue
    return None


def _check_connection() -> None:
    """Raise at once if the hub does not answer: a download would retry for a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)


def _download(name: str, repository: str) -> Path:
    from huggingface_hub import constants

    try:
        _check_connection()
        folder = _get_files(repository, offline=False)
    except Exception as error:
        reason, root = (" ".join(str(error).split()) or type(error).__name__)[:80], os.environ.get(FOLDER) or "FOLDER"
        raise UserError(
            f"The weights of '{name}' are not on this machine and cannot be downloaded ({reason}). Put "
            f"model.safetensors and config.json of {constants.ENDPOINT}/{repository} into "
            f"{root}/{repository.removeprefix('timm/')}/ and set {FOLDER}={root}; or pass a file of weights as "
            "FILE.safetensors (with 'train': --init FILE.safetensors)."
        ) from None
    if folder is None:
        raise UserError(f"{constants.ENDPOINT}/{repository} has no config.json with {' or '.join(_WEIGHTS)}.")
    return folder
