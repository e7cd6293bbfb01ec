"""What lies in a checkpoint, by looking: whose it is, which network it holds, and that network's tensors by our names.

First the container is opened (teacher, student, EMA, ``model`` …), then the wrappers' prefixes fall off, then the names
tell the layout, and the layout's rules rename them. Networks written here keep the released names, Swin, ViT and ResNet
timm's, so that most layouts need few rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frugalvit.errors import UserError

State = dict[str, Tensor]

# The networks a training checkpoint may hold, the one to prefer first: an average over training beats its last step.
_NETWORKS = ("teacher", "state_dict_ema", "model_ema", "ema", "model", "state_dict", "student", "backbone", "task")
# The same inside one flat dictionary: what a training task calls the network it holds.
_WRAPPERS = ("teacher.", "average.", "backbone.", "student.")
_PROJECTION_HEAD = re.compile(r"^(?:head|head_dense|dino_head|ibot_head)\.(?:mlp|last_layer)\.")
_LOCALIZATION = re.compile(r"^drloc\.(?:(\d+)\.)?(layers|unshared)\.")
# Rebuilt by every model, so neither wanted nor left over.
_DERIVED = re.compile(r"(?:^|\.)(?:relative_position_index|relative_coords_table|attn_mask)$")
_CLASSIFIER = re.compile(r"^(?:head|head\.fc|fc|classifier|mlp_head\.1)\.(weight|bias)$")
# The second classifier of a distilled DeiT. It answers to a token of its own, and must never stand in for the first.
_SECOND_CLASSIFIER = re.compile(r"^head_(dist\.(?:weight|bias))$")


@dataclass(frozen=True)
class Contents:
    """A checkpoint, opened. Names are without wrappers' prefixes, not yet renamed."""

    kind: str
    """Whose file: "frugalvit", "esvit", "dino", "vts-drloc", "swin" (Microsoft), "t2t-vit", "torchvision", "timm"."""

    label: str
    """The network in words for people: "Swin (Microsoft's names), teacher"."""

    layout: Layout
    network: State
    heads: State
    """Projection heads: ``head.*`` of the view level, ``head_dense.*`` of the region level."""

    localization: State
    """Drloc's MLP, ``drloc.*``."""


@dataclass(frozen=True)
class Layout:
    """A way of naming a network's tensors: what it is recognised by, and the rules to our names."""

    label: str
    kind: str
    sign: str
    rules: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    convert: Callable[[str, Tensor], Tensor] = field(default=lambda name, tensor: tensor)

    def rename(self, name: str) -> str:
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name


def _next_stage(match: re.Match[str]) -> str:
    return f"layers.{int(match[1]) + 1}.downsample."


def _patches_to_convolution(name: str, tensor: Tensor) -> Tensor:
    """VTs-Drloc's ViT embeds flattened patches (p p 3): (D, p p 3) -> (D, 3, p, p)."""
    if name != "to_patch_embedding.1.weight" or tensor.ndim != 2:
        return tensor
    side = math.isqrt(tensor.shape[1] // 3)
    if 3 * side * side != tensor.shape[1]:  # of other channels: it will find no place
        return tensor
    return tensor.reshape(len(tensor), side, side, 3).permute(0, 3, 1, 2).contiguous()


_LAYOUTS = (
    Layout("CvT of VTs-Drloc", "vts-drloc", r"^layers\.0\.2\.layers\.0\.0\.fn\.to_q\."),
    Layout("CvT of EsViT", "esvit", r"^stage0\.1\.layers\.0\.0\.fn\.qkv\."),
    Layout("Vision Longformer of EsViT", "esvit", r"^layer1\.1\.attn\.(?:query|local_relative_position_bias_table)"),
    Layout("T2T-ViT", "t2t-vit", r"^tokens_to_token\.attention1\."),
    Layout(
        "ViT of VTs-Drloc",
        "vts-drloc",
        r"^transformer\.layers\.0\.0\.fn\.to_qkv\.",
        rules=(
            (r"^pos_embedding$", "pos_embed"),
            (r"^to_patch_embedding\.1\.", "patch_embed.proj."),
            (r"^transformer\.layers\.(\d+)\.0\.norm\.", r"blocks.\1.norm1."),
            (r"^transformer\.layers\.(\d+)\.0\.fn\.to_qkv\.", r"blocks.\1.attn.qkv."),
            (r"^transformer\.layers\.(\d+)\.0\.fn\.to_out\.0\.", r"blocks.\1.attn.proj."),
            (r"^transformer\.layers\.(\d+)\.1\.norm\.", r"blocks.\1.norm2."),
            (r"^transformer\.layers\.(\d+)\.1\.fn\.net\.0\.", r"blocks.\1.mlp.fc1."),
            (r"^transformer\.layers\.(\d+)\.1\.fn\.net\.3\.", r"blocks.\1.mlp.fc2."),
            (r"^mlp_head\.0\.", "norm."),
        ),
        convert=_patches_to_convolution,
    ),
    Layout(
        "ResNet of VTs-Drloc",
        "vts-drloc",
        r"^model\.4\.0\.conv1\.",
        rules=(
            (r"^model\.0\.", "conv1."),
            (r"^model\.1\.", "bn1."),
            (r"^model\.([4-7])\.", lambda match: f"layer{int(match[1]) - 3}."),
        ),
    ),
    Layout("ResNet", "torchvision", r"^layer1\.0\.conv1\.weight$"),
    # timm puts the merging of patches at the start of the stage it leads to, Microsoft at the end of the one before.
    Layout(
        "Swin (Microsoft's names)",
        "swin",
        r"^layers\.0\.downsample\.",
        rules=((r"^layers\.(\d+)\.downsample\.", _next_stage),),
    ),
    Layout("Swin", "timm", r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$"),
    Layout("ViT", "timm", r"^blocks\.0\.attn\.qkv\.weight$"),
)
_UNKNOWN = Layout("network of an unknown kind", "timm", "")


def open_contents(raw: Mapping[str, Any], prefer: str | None = None) -> Contents:
    """Find the network in a checkpoint's dictionary; ``prefer`` names one ("student") before the usual order."""
    found, state = _find_network(raw, prefer)
    for name, tensor in state.items():
        kinds = {"sparse": tensor.layout != torch.strided, "quantized": tensor.is_quantized}
        kinds |= {"complex": tensor.is_complex(), "empty (meta)": tensor.is_meta}
        if odd := next((kind for kind, is_so in kinds.items() if is_so), None):
            raise UserError(f"the checkpoint holds {name} as a tensor that is {odd}; save ordinary floating numbers.")
    network, rest = _without_wrappers(state, (f"{prefer}.", *_WRAPPERS) if prefer else _WRAPPERS)
    heads = {name: tensor for name, tensor in (network | rest).items() if _PROJECTION_HEAD.match(name)}
    localization = {name: tensor for name, tensor in network.items() if _LOCALIZATION.match(name)}
    aside = heads.keys() | localization.keys()
    network = {name: tensor for name, tensor in network.items() if name not in aside and not is_derived(name)}
    layout = recognise(network)
    label = layout.label + (f", {found}" if found in ("teacher", "student") else "")
    return Contents(_whose(raw, layout, heads, localization), label, layout, network, heads, localization)


def recognise(names: Iterable[str]) -> Layout:
    """The layout whose sign is among ``names``."""
    names = list(names)
    for layout in _LAYOUTS:
        sign = re.compile(layout.sign)
        if any(sign.match(name) for name in names):
            return layout
    return _UNKNOWN


def translate(contents: Contents) -> dict[str, tuple[str, Tensor]]:
    """Our name -> (the file's name, tensor)."""
    layout, network = contents.layout, contents.network
    return {
        layout.rename(name): (name, layout.convert(name, tensor))
        for name, tensor in network.items()
        if not _stored_twice(name, network)
    }


def _stored_twice(name: str, network: State) -> bool:
    """Vision Longformer shares the projections of local and global tokens and stores them under both names."""
    local = network.get(name.replace("_global.", ".")) if "_global." in name else None
    return local is not None and torch.equal(local, network[name])


def is_derived(name: str) -> bool:
    """Whether a tensor is rebuilt by the model itself (index tables, masks)."""
    return _DERIVED.search(name) is not None


def is_optional(name: str) -> bool:
    """Whether a tensor may be absent without loss: a derived one, or the counter of a batch norm."""
    return is_derived(name) or name.endswith("num_batches_tracked")


def shape_in_words(contents: Contents) -> str:
    """ " (width 96, depths 2-2-6-2)" for Swin and ViT, empty for others."""
    depths: dict[str, set[str]] = {}
    for name in contents.network:
        match = re.match(r"(?:layers\.(\d+)\.)?blocks\.(\d+)\.", name)
        if match:
            depths.setdefault(match[1] or "0", set()).add(match[2])
    first = next((t for name, t in contents.network.items() if name.endswith("blocks.0.norm1.weight")), None)
    if not depths or first is None or not first.ndim:
        return ""
    return f" (width {len(first)}, depths {'-'.join(str(len(blocks)) for blocks in depths.values())})"


def classifier_part(name: str) -> str | None:
    """ "weight" or "bias" when the name is a linear classifier's in any layout; None for anything else.

    Of a distilled network's second classifier "dist.weight" or "dist.bias", which are parts of no first one: it goes to
    a layer of its own name or nowhere.
    """
    match = _CLASSIFIER.match(name) or _SECOND_CLASSIFIER.match(name)
    return match[1] if match else None


def localization_mlp(contents: Contents) -> State:
    """Drloc's MLP with plain names (``layers.0.weight`` …), of the last scale where there are several."""
    last = max((int(m[1] or 0) for m in map(_LOCALIZATION.match, contents.localization) if m), default=0)
    mine = {}
    for name, tensor in contents.localization.items():
        match = _LOCALIZATION.match(name)
        if match and int(match[1] or 0) == last:
            mine[match[2] + "." + name[match.end() :]] = tensor
    return mine


def _find_network(raw: Mapping[str, Any], prefer: str | None) -> tuple[str, State]:
    order = [prefer, *_NETWORKS] if prefer else list(_NETWORKS)
    for key in order:
        inner = raw.get(key)
        if isinstance(inner, Mapping):
            name, state = _find_network(inner, prefer)
            if state:
                return (key if name == "" else f"{key}.{name}" if name != key else key), state
    return "", {key: value for key, value in raw.items() if isinstance(key, str) and isinstance(value, Tensor)}


def _without_wrappers(state: State, wrappers: tuple[str, ...]) -> tuple[State, State]:
    """The network's tensors by bare names, and those that stood beside it in a wrapper."""
    network, rest = dict(state), {}
    while True:
        network = {re.sub(r"^(?:module\.|_orig_mod\.)+", "", name): tensor for name, tensor in network.items()}
        inside = next((prefix for prefix in wrappers if any(name.startswith(prefix) for name in network)), None)
        # A wrapper's "model." covers every network tensor; VTs-Drloc's ResNet numbers its parts ("model.4.0.conv1").
        in_model = sum(re.match(r"model\.(?!\d)", name) is not None for name in network)
        if inside is None and in_model * 2 > len(network):
            inside = "model."
        if inside is None:
            return network, rest
        rest |= {name: tensor for name, tensor in network.items() if not name.startswith(inside)}
        network = {name[len(inside) :]: tensor for name, tensor in network.items() if name.startswith(inside)}


def _whose(raw: Mapping[str, Any], layout: Layout, heads: State, localization: State) -> str:
    if "frugalvit" in raw or isinstance(raw.get("task"), Mapping):
        return "frugalvit"
    if localization:
        return "vts-drloc"
    if isinstance(raw.get("teacher"), Mapping) or isinstance(raw.get("student"), Mapping):
        regions = any(name.startswith("head_dense.") for name in heads)
        several_stages = layout.label not in ("ViT", "ResNet")
        return "esvit" if regions or several_stages else "dino"
    return layout.kind


def heads_of(contents: Contents) -> tuple[State, State]:
    """The view head and the region head, each with bare names (``mlp.0.weight``, ``last_layer.weight_g`` …)."""
    parts: dict[str, State] = {"head": {}, "head_dense": {}}
    for name, tensor in contents.heads.items():
        which, _, bare = name.partition(".")
        if which in parts:
            parts[which][bare] = tensor
    return parts["head"], parts["head_dense"]


def centres_of(raw: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The centres of the view and of the region level."""
    loss = raw.get("dino_loss")
    if not isinstance(loss, Mapping):
        return None, None
    view, region = loss.get("center"), loss.get("center_grid")
    for centre in (view, region):
        if centre is not None and not isinstance(centre, torch.Tensor):
            raise UserError("the checkpoint's dino_loss holds centres that are no tensors.")
    return view, region
