"""Which parameters are decayed, how fast each layer learns, and which do not learn at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from frugalvit.errors import UserError

# Tables and tokens that say where something is are no weights to be shrunk, although they have two dimensions or more.
# Nor are the scales of an attention's logits, one number a head (Swin V2, XCiT, EdgeNeXt).
_UNDECAYED = (
    *("bias_table", "position_bias", "attention_biases", "rel_pos_h", "rel_pos_w", "patch_pos", "pixel_pos"),
    *("logit_scale", "temperature"),
)
_NUMBERED = ("pos_embed", "cls_token", "reg_token", "dist_token")  # with a number behind where a network has several


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    lr_scale: float = 1.0,
    spared: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Two groups of the parameters that learn: matrices are decayed; vectors (biases, norms) and positions are not.

    spared: names of more that are not (:func:`no_weight_decay_names`).
    As in the released code, the (1, C, 1, 1) norms of its CvT-13 count as matrices.
    The names go into the optimiser's state, so that another run can find a parameter's moments again.
    """
    decayed, rest = [], []
    for name, parameter in parameters:
        if parameter.requires_grad:
            known = name.endswith(_UNDECAYED) or name.rpartition(".")[2].startswith(_NUMBERED)
            plain = parameter.ndim <= 1 or known or name in spared
            (rest if plain else decayed).append((name, parameter))
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "decayed": True, "lr_scale": lr_scale},
        {"params": rest, "weight_decay": 0.0, "decayed": False, "lr_scale": lr_scale},
    ]
    return [group for group in groups if group["params"]]


def no_weight_decay_names(module: nn.Module) -> set[str]:
    """What the networks in a module say themselves is not to be decayed (timm's ``no_weight_decay``).

    They name parameters, or a part with all its parameters: Swin V2 its ``cpb_mlp``.
    """
    found: set[str] = set()
    for path, part in module.named_modules():
        ask = getattr(part, "no_weight_decay", None)
        if callable(ask):
            named: Any = ask()
            parents = tuple(f"{name}." for name in named)
            found |= {
                f"{path}.{name}" if path else name
                for name, _ in part.named_parameters()
                if name in named or name.startswith(parents)
            }
    return found


def layers_of(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """The named parameters from input to output, one list per layer: the embedding, the blocks, the head."""
    from timm.models import group_parameters

    matcher = getattr(model, "group_matcher", None)
    depth_of: Any = {} if matcher is None else group_parameters(model, matcher(coarse=False), reverse=True)
    parameters = dict(model.named_parameters())
    layers = [
        [(name, parameters[name]) for name, depth in depth_of.items() if depth == wanted and name in parameters]
        for wanted in sorted(set(depth_of.values()))
    ]
    # Some (LeViT, RepViT) name modules that they do not have: all they say of their blocks fits none.
    if len(layers) < 3:
        raise UserError(
            f"{type(model).__name__} does not say how its layers are ordered; freeze and layer_decay need it."
        )
    return layers


def layer_groups(model: nn.Module, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Groups whose learning rate falls by ``layer_decay`` from each layer to the one before it."""
    layers, spared = layers_of(model), no_weight_decay_names(model)
    last = len(layers) - 1
    groups: list[dict[str, Any]] = []
    for depth, layer in enumerate(layers):
        groups += decay_groups(layer, weight_decay, layer_decay ** (last - depth), spared)
    return groups


def merge_param_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that learn alike as one: an optimiser takes its steps group by group."""
    alike: dict[tuple[float, bool, float], dict[str, Any]] = {}
    for group in groups:
        key = (group["weight_decay"], group["decayed"], group["lr_scale"])
        first = alike.setdefault(key, group | {"params": []})
        first["params"] = first["params"] + group["params"]
    return list(alike.values())


def remap_optimizer_state(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's moments under the numbers its parameters have in ``new``; new parameters start without any."""
    number_of = {name: number for group in old["param_groups"] for name, number in _numbered(group)}
    moments = {
        number: old["state"][number_of[name]]
        for group in new["param_groups"]
        for name, number in _numbered(group)
        if number_of.get(name) in old["state"]
    }
    return {"state": moments, "param_groups": new["param_groups"]}


def _numbered(group: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def freeze_first(model: nn.Module, count: int) -> int:
    """Stop gradients for the embedding and the first ``count`` blocks; how many parameters that froze."""
    layers = layers_of(model)
    if count >= len(layers) - 1:
        raise UserError(f"--freeze {count} would freeze everything: the model has {len(layers) - 2} blocks.")
    frozen = [parameter for layer in layers[: count + 1] for _, parameter in layer]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)
