"""LoRA: starts from the network, learns little memory's worth of weights, and merges into plain matrices."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from frugalvit.backbones.lora import LowRank, add_lora, merge_lora, merged_tensors
from frugalvit.engine.param_groups import freeze_first, layer_groups
from frugalvit.errors import UserError


def optimizer_bytes(model: nn.Module) -> int:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def test_low_rank_is_the_papers_formula() -> None:
    matrix, images = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    change = LowRank(matrix, 2).double()
    nn.init.normal_(change.up)
    F.linear(images, change(matrix)).pow(2).sum().backward()
    up, down = (tensor.detach().clone().requires_grad_() for tensor in (change.up, change.down))
    slow = sum(((matrix @ x + 2 * up @ (down @ x)) ** 2).sum() for x in images)
    slow.backward()  # type: ignore[union-attr]
    assert up.grad is not None and change.up.grad is not None and torch.allclose(change.up.grad, up.grad)
    assert down.grad is not None and change.down.grad is not None and torch.allclose(change.down.grad, down.grad)


@pytest.mark.parametrize("name", ["test_vit", "swin_nano"])
def test_start_and_merge_do_not_change_the_network(name: str) -> None:
    model = timm.create_model(name, num_classes=3, img_size=64).eval()
    images, names = torch.randn(2, 3, 64, 64), set(model.state_dict())
    with torch.no_grad():
        before = model(images)
        add_lora(model, 4)
        assert torch.allclose(model(images), before, atol=1e-6)
        for change in (module for module in model.modules() if isinstance(module, LowRank)):
            nn.init.normal_(change.up, std=0.1)
        learned, average = model(images), copy.deepcopy(model)
        tensors = merged_tensors(model.state_dict())  # of a checkpoint
        merge_lora(average)
        assert tensors.keys() == names and all(torch.equal(tensors[k], v) for k, v in average.state_dict().items())
        assert not torch.allclose(learned, before, atol=1e-3)
        assert torch.allclose(average(images), learned, atol=1e-5) and set(average.state_dict()) == names


def test_optimizer_needs_a_fifth_of_the_memory() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=102)
    full = optimizer_bytes(model)
    add_lora(model, 8)
    assert optimizer_bytes(model) <= full / 5


def test_frozen_blocks_and_layer_decay() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    freeze_first(model, 3)
    add_lora(model, 4)
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not any(name.startswith(("patch_embed", "blocks.0.", "blocks.2.")) for name in learned)
    assert any("parametrizations.weight.0.up" in name for name in learned) and "head.weight" in learned
    groups = layer_groups(model, 0.05, 0.5)
    assert sorted(name for group in groups for name, _ in group["params"]) == sorted(learned)
    with pytest.raises(UserError, match="--lora 9999"):
        add_lora(timm.create_model("test_vit"), 9999)
