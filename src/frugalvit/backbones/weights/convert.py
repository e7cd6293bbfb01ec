"""Recognize a checkpoint by its content: its format, its network, and the tensors by our names.

Three steps: open the container (teacher, student, EMA, ``model`` …), remove prefixes of wrappers, recognize the layout
by the names. Our networks keep the released names; Swin, ViT and ResNet keep timm's. Only Microsoft's Swin is renamed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frugalvit.backbones.lora import merged_tensors
from frugalvit.errors import UserError

State = dict[str, Tensor]

# The networks that a training checkpoint may contain, the preferred first: an EMA is better than the last step.
_NETWORKS = ("teacher", "state_dict_ema", "model_ema", "ema", "model", "state_dict", "student", "backbone", "task")
# The same in a flat dictionary: prefixes that training tasks use for their network.
_WRAPPERS = ("teacher.", "average.", "backbone.", "student.")
_PROJECTION_HEAD = re.compile(r"^(?:head|head_dense|dino_head|ibot_head)\.(?:mlp|last_layer)\.")
_LOCALIZATION = re.compile(r"^drloc\.(?:\d+\.)?(?:layers|unshared)\.")
# The model rebuilds these, so they are neither missing nor left over.
_DERIVED = re.compile(r"(?:^|\.)(?:relative_position_index|relative_coords_table|attn_mask)$")
_CLASSIFIER = re.compile(r"^(?:head|head\.fc|fc|classifier|mlp_head\.1)\.(weight|bias)$")
# The second classifier of a distilled DeiT. It reads another token and never replaces the first.
_SECOND_CLASSIFIER = re.compile(r"^head_(dist\.(?:weight|bias))$")


class Layout(NamedTuple):
    """A naming scheme of tensors, and the pattern that recognizes it."""

    label: str
    kind: str
    pattern: str


@dataclass(frozen=True)
class Contents:
    """An opened checkpoint. Names have no wrapper prefixes and are not renamed yet."""

    kind: str  # "frugalvit", "esvit", "dino", "vts-drloc", "swin" (Microsoft), "t2t-vit", "torchvision" or "timm"
    layout: Layout
    network: State
    heads: State  # ``head.*`` of the view level, ``head_dense.*`` of the region level
    localization: State  # Drloc's MLP, ``drloc.*``


_LAYOUTS = (
    Layout("CvT of VTs-Drloc", "vts-drloc", r"^layers\.0\.2\.layers\.0\.0\.fn\.to_q\."),
    Layout("CvT of EsViT", "esvit", r"^stage0\.1\.layers\.0\.0\.fn\.qkv\."),
    Layout("Vision Longformer of EsViT", "esvit", r"^layer1\.1\.attn\.(?:query|local_relative_position_bias_table)"),
    Layout("T2T-ViT", "t2t-vit", r"^tokens_to_token\.attention1\."),
    Layout("ResNet", "torchvision", r"^layer1\.0\.conv1\.weight$"),
    Layout("Swin (Microsoft's names)", "swin", r"^layers\.0\.downsample\."),
    Layout("Swin", "timm", r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$"),
    Layout("ViT", "timm", r"^blocks\.0\.attn\.qkv\.weight$"),
)
_UNKNOWN = Layout("network of an unknown kind", "timm", "")


def open_contents(raw: Mapping[str, Any]) -> Contents:
    state = merged_tensors(_find_network(raw))
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
            raise UserError(
                f"the checkpoint's {name} is not a dense real tensor; save ordinary floating-point numbers."
            )
    network, rest = _remove_wrappers(state)
    heads = {name: tensor for name, tensor in (network | rest).items() if _PROJECTION_HEAD.match(name)}
    localization = {name: tensor for name, tensor in network.items() if _LOCALIZATION.match(name)}
    other = heads.keys() | localization.keys()
    network = {name: tensor for name, tensor in network.items() if name not in other and not is_derived(name)}
    matching = (layout for layout in _LAYOUTS if any(re.match(layout.pattern, name) for name in network))
    layout = next(matching, _UNKNOWN)
    return Contents(_find_kind(raw, layout, heads, localization), layout, network, heads, localization)


def translate(contents: Contents) -> dict[str, tuple[str, Tensor]]:
    """Return our name -> (the file's name, tensor)."""
    network, is_microsoft = contents.network, contents.layout.kind == "swin"
    return {
        _next_stage(name) if is_microsoft else name: (name, tensor)
        for name, tensor in network.items()
        if not _is_duplicate(name, network)
    }


def _next_stage(name: str) -> str:
    """Rename patch merging: Microsoft has it at the end of a stage, timm at the start of the next one."""
    return re.sub(r"^layers\.(\d+)\.downsample\.", lambda match: f"layers.{int(match[1]) + 1}.downsample.", name)


def _is_duplicate(name: str, network: State) -> bool:
    """Whether a Vision Longformer stores a projection shared by local and global tokens a second time."""
    local = network.get(name.replace("_global.", ".")) if "_global." in name else None
    return local is not None and torch.equal(local, network[name])


def is_derived(name: str) -> bool:
    """Whether a tensor is rebuilt by the model itself (index tables, masks)."""
    return _DERIVED.search(name) is not None


def is_optional(name: str) -> bool:
    """Whether a tensor may be missing: a derived one, or the counter of a batch norm."""
    return is_derived(name) or name.endswith("num_batches_tracked")


def classifier_part(name: str) -> str | None:
    """Return "weight" or "bias" if the name is a linear classifier's in any layout, else None.

    For the second classifier of a distilled network it is "dist.weight" or "dist.bias", which never match a first one.
    """
    match = _CLASSIFIER.match(name) or _SECOND_CLASSIFIER.match(name)
    return match[1] if match else None


def _find_network(raw: Mapping[str, Any]) -> State:
    for key in _NETWORKS:
        inner = raw.get(key)
        if isinstance(inner, Mapping) and (state := _find_network(inner)):
            return state
    return {key: value for key, value in raw.items() if isinstance(key, str) and isinstance(value, Tensor)}


def _remove_wrappers(state: State) -> tuple[State, State]:
    """Return the network's tensors by plain names, and the other tensors of the wrapper."""
    network, rest = dict(state), {}
    while True:
        network = {re.sub(r"^(?:module\.|_orig_mod\.)+", "", name): tensor for name, tensor in network.items()}
        wrapper = next((prefix for prefix in _WRAPPERS if any(name.startswith(prefix) for name in network)), None)
        # A wrapper's "model." covers every tensor of the network.
        in_model = sum(name.startswith("model.") for name in network)
        if wrapper is None and in_model * 2 > len(network):
            wrapper = "model."
        if wrapper is None:
            return network, rest
        rest |= {name: tensor for name, tensor in network.items() if not name.startswith(wrapper)}
        network = {name[len(wrapper) :]: tensor for name, tensor in network.items() if name.startswith(wrapper)}


def _find_kind(raw: Mapping[str, Any], layout: Layout, heads: State, localization: State) -> str:
    if "frugalvit" in raw or isinstance(raw.get("task"), Mapping):
        return "frugalvit"
    if localization:
        return "vts-drloc"
    if isinstance(raw.get("teacher"), Mapping) or isinstance(raw.get("student"), Mapping):
        regions = any(name.startswith("head_dense.") for name in heads)
        several_stages = layout.label not in ("ViT", "ResNet")
        return "esvit" if regions or several_stages else "dino"
    return layout.kind
