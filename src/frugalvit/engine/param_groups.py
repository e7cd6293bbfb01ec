"""Parameter groups: weight decay, layer-wise learning rates, freezing."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from frugalvit.errors import UserError

# No weight decay for position tables and tokens, although they have two dimensions or more, and for the per-head
# scales of attention logits (Swin V2, XCiT, EdgeNeXt).
_UNDECAYED = (
    *("bias_table", "position_bias", "attention_biases", "rel_pos_h", "rel_pos_w", "patch_pos", "pixel_pos"),
    *("logit_scale", "temperature"),
)
_NUMBERED = ("pos_embed", "cls_token", "reg_token", "dist_token")  # a number follows if a network has several


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    lr_scale: float = 1.0,
    undecayed: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Group the trainable parameters: matrices with weight decay; vectors and positions without.

    undecayed: names of further parameters without decay (:func:`no_weight_decay_names`)
    As in the released code, the (1, C, 1, 1) norms of CvT-13 count as matrices. The names enter the optimizer's state,
    so that a continued run can find the moments of each parameter.
    """
    decayed, others = [], []
    for name, parameter in parameters:
        if parameter.requires_grad:
            is_position = name.endswith(_UNDECAYED) or name.rpartition(".")[2].startswith(_NUMBERED)
            skip = parameter.ndim <= 1 or is_position or name in undecayed
            (others if skip else decayed).append((name, parameter))
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "decayed": True, "lr_scale": lr_scale},
        {"params": others, "weight_decay": 0.0, "decayed": False, "lr_scale": lr_scale},
    ]
    return [group for group in groups if group["params"]]


def no_weight_decay_names(module: nn.Module) -> set[str]:
    """Collect the names that networks list in timm's ``no_weight_decay``.

    A listed name is a parameter or a submodule, such as Swin V2's ``cpb_mlp``.
    """
    names: set[str] = set()
    for path, part in module.named_modules():
        method = getattr(part, "no_weight_decay", None)
        if callable(method):
            listed: Any = method()
            parents = tuple(f"{name}." for name in listed)
            names |= {
                f"{path}.{name}" if path else name
                for name, _ in part.named_parameters()
                if name in listed or name.startswith(parents)
            }
    return names


def layers_of(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the named parameters from input to output, one list per layer: embedding, blocks, head."""
    from timm.models import group_parameters

    matcher = getattr(model, "group_matcher", None)
    depth_of: Any = {} if matcher is None else group_parameters(model, matcher(coarse=False), reverse=True)
    parameters = dict(model.named_parameters())
    layers = [
        [(name, parameters[name]) for name, depth in depth_of.items() if depth == wanted and name in parameters]
        for wanted in sorted(set(depth_of.values()))
    ]
    # LeViT and RepViT name modules that they do not have, so that no block matches.
    if len(layers) < 3:
        raise UserError(
            f"{type(model).__name__} does not define the order of its layers, which --freeze and "
            "--optimizer.layer-decay need. Leave these options out."
        )
    return layers


def layer_groups(model: nn.Module, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Make groups whose learning rate falls by ``layer_decay`` per layer, from the output to the input."""
    layers, undecayed = layers_of(model), no_weight_decay_names(model)
    last = len(layers) - 1
    groups: list[dict[str, Any]] = []
    for depth, layer in enumerate(layers):
        groups += decay_groups(layer, weight_decay, layer_decay ** (last - depth), undecayed)
    return groups


def merge_param_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal settings: the optimizer runs once per group."""
    merged: dict[tuple[float, bool, float], dict[str, Any]] = {}
    for group in groups:
        key = (group["weight_decay"], group["decayed"], group["lr_scale"])
        target = merged.setdefault(key, group | {"params": []})
        target["params"] = target["params"] + group["params"]
    return list(merged.values())


def remap_optimizer_state(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the moments of ``old`` under the parameter indices of ``new``; new parameters have none."""
    old_index, new_index = (
        {
            name: index
            for group in state["param_groups"]
            for name, index in zip(group["param_names"], group["params"], strict=True)
        }
        for state in (old, new)
    )
    state = old["state"]
    moments = {index: state[old_index[name]] for name, index in new_index.items() if old_index.get(name) in state}
    return {"state": moments, "param_groups": new["param_groups"]}


def freeze_first(model: nn.Module, count: int) -> int:
    """Freeze the embedding and the first ``count`` blocks; return the number of frozen parameters."""
    layers = layers_of(model)
    if count >= len(layers) - 1:
        raise UserError(f"--freeze {count} would freeze everything. The model has {len(layers) - 2} blocks: use fewer.")
    frozen = [parameter for layer in layers[: count + 1] for _, parameter in layer]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)
