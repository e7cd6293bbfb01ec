"""Every network of ours: timm's interface, GridModel, any size, compile and export."""

import math

import pytest
import timm
import torch
import torch._inductor.config as inductor
from hypothesis import given
from hypothesis import strategies as st
from timm.models import group_parameters
from torch import nn

from frugalvit.backbones.base import GridModel
from frugalvit.engine.compile import prepare_compiler
from frugalvit.errors import UserError

TINY = {
    "swin_nano": {"patch_size": 4, "embed_dim": 8, "depths": (1, 1, 2), "num_heads": (1, 2, 2)},
    "cvt_13": {"embed_dim": (8, 12, 16), "depths": (1, 1, 2), "num_heads": (1, 1, 2), "head_dim": 8},
    "hybrid_nano": {"embed_dim": (8, 12, 16), "depths": (1, 1, 2), "head_dim": 8},
    "t2t_vit_14": {"embed_dim": 24, "depth": 2, "num_heads": 2, "token_dim": 8},
    "cvt_tiny_w7": {"embed_dim": 4, "depths": (1, 1, 1, 2)},
    "vil_tiny_w7": {"embed_dim": 8, "depths": (2, 1, 1, 1), "num_heads": (1, 2, 2, 4)},
}
# One block of every kind: tracing takes a second per block.
MICRO = {
    "swin_nano": {"embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2)},
    "cvt_13": {"embed_dim": (8, 8), "depths": (1, 1), "num_heads": (1, 2), "head_dim": 8},
    "hybrid_nano": {"embed_dim": (8, 8), "depths": (1, 1), "conv_stages": 1, "head_dim": 8},
    "t2t_vit_14": {"embed_dim": 8, "depth": 1, "num_heads": 2, "token_dim": 8},
    "cvt_tiny_w7": {"embed_dim": (8, 8), "depths": (1, 1), "num_heads": (1, 2)},
    "vil_tiny_w7": {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "sparse_stages": 1},
}
STRIDE = {"swin_nano": 16, "cvt_13": 16, "hybrid_nano": 16, "t2t_vit_14": 16, "cvt_tiny_w7": 32, "vil_tiny_w7": 32}
every_model = pytest.mark.parametrize("name", TINY)


def tiny(name: str, **keywords) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **{"num_classes": 5, **TINY[name], **keywords}).eval()


def images(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "keywords", "millions"),
    [
        ("cvt_13", {}, 19.94),
        ("hybrid_small", {"num_classes": 0}, 11.79),
        ("hybrid_tiny", {"num_classes": 0}, 7.06),
        ("hybrid_nano", {"num_classes": 0}, 0.59),
        ("t2t_vit_14", {}, 21.55),
        ("cvt_tiny_w7", {"num_classes": 0, "relative_bias": False}, 29.30),
        ("vil_tiny_w7", {"num_classes": 0}, 27.57),
        ("swin_tiny_w7", {"num_classes": 0}, 27.52),
        ("swin_tiny_w14", {"num_classes": 0}, 27.57),
        ("swin_small_w7", {"num_classes": 0}, 48.84),
        ("swin_base_w14", {"num_classes": 0}, 86.92),
    ],
)
def test_parameters_as_published(name, keywords, millions):
    with torch.device("meta"):
        model = timm.create_model(name, **keywords)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == millions


@every_model
@pytest.mark.parametrize("size", [(28, 28), (96, 96), (200, 312), (33, 71)])
def test_any_size(name, size):
    model = tiny(name)
    assert isinstance(model, GridModel)
    batch = images(2, 3, *size)
    with torch.no_grad():
        grid, pooled = model.forward_grid(batch)
        logits = model(batch)
        blocks = model.forward_grid_blocks(batch)
        attention = model.last_attention(batch)
    assert grid.shape[:2] == (2, model.num_features)
    if all(side % 4 == 0 for side in size):
        assert grid.shape[2:] == tuple(math.ceil(side / STRIDE[name]) for side in size)
    assert logits.isfinite().all()
    torch.testing.assert_close(model.get_classifier()(pooled), logits)
    torch.testing.assert_close(model.forward_head(model.forward_features(batch), pre_logits=True), pooled)

    assert len(blocks) == model.stage_ends[-1] + 1
    torch.testing.assert_close(model.final_norm(blocks[-1]), grid)
    torch.testing.assert_close(blocks[-1], model.forward_grid(batch, norm=False)[0])
    stages = [blocks[end] for end in model.stage_ends]
    assert [stage.shape[1] for stage in stages] == [info["num_chs"] for info in model.feature_info]
    assert all(model.get_submodule(info["module"]) for info in model.feature_info)

    tokens = grid.shape[2] * grid.shape[3] + (name == "t2t_vit_14")
    assert attention.shape[2:] == (tokens, tokens)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:3]))
    assert (attention >= 0).all()


@given(height=st.integers(16, 70), width=st.integers(16, 70), name=st.sampled_from(sorted(TINY)))
def test_images_of_a_batch_are_independent(height, width, name):
    model = tiny(name)
    batch = images(3, 3, height, width)
    with torch.no_grad():
        together = model.forward_grid(batch)[0]
        alone = model.forward_grid(batch[1:2])[0]
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)


@every_model
def test_every_weight_has_a_gradient(name):
    model = tiny(name).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # a hybrid's blocks start as the identity: their last scale is 0
            nn.init.ones_(module.weight)
    grid, pooled = model.forward_grid(images(2, 3, 96, 96))
    weights = images(*grid.shape, seed=2)
    ((grid * weights).sum() + model.get_classifier()(pooled).square().sum()).backward()
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter_name == "pos_embed" or parameter_name.endswith(".w"), parameter_name
            continue
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # Softmax ignores a bias of the keys; ViL's global token is dropped after the last block of a stage.
        is_dropped = "g2g" in parameter_name and not parameter_name.startswith("layer1.1.")
        if parameter.ndim > 1 and not is_dropped:
            assert parameter.grad.abs().sum() > 0, parameter_name


@every_model
def test_compiles_in_one_graph(name):
    model = tiny(name, **MICRO[name])
    batch = images(2, 3, 40, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch), model(batch))


@pytest.mark.parametrize(
    "name", [name if name == "vil_tiny_w7" else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
)
def test_exports_for_any_batch(name):
    model = tiny(name, **MICRO[name])
    with torch.no_grad():
        program = torch.export.export(
            model, (images(2, 3, 64, 64),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
        )
        batch = images(5, 3, 64, 64)
        torch.testing.assert_close(program.module()(batch), model(batch))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # warning of processors without bf16
@every_model
def test_bf16_is_close_to_fp32(name):
    model = tiny(name)
    batch = images(2, 3, 64, 96)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.forward_grid(batch)[0]
    with torch.no_grad():
        exact = model.forward_grid(batch)[0]
    assert (rough.float() - exact).abs().max() < 0.1 * exact.abs().max()


@every_model
def test_double_network_computes_in_double(name):
    """The grid is linear in a tiny step; rounding to single precision anywhere would hide the step."""
    model, batch = tiny(name).double(), images(2, 3, 64, 64).double()
    with torch.no_grad():
        before, half, full = (model.forward_grid(batch + step * batch.sin())[0] for step in (0, 5e-8, 1e-7))
    moved = full - before
    assert (2 * (half - before) - moved).abs().max() < 1e-3 * moved.abs().max()


@pytest.mark.gpu
@every_model
def test_bf16_on_a_device(name):
    model = tiny(name).cuda().train()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        grid, pooled = model.forward_grid(images(4, 3, 96, 96).cuda())
    (grid.float().square().mean() + pooled.float().mean()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.gpu
@every_model
@inductor.patch({"triton.mix_order_reduction": True})  # restores what prepare_compiler may change
def test_compiled_on_a_device(name):
    """At this size torch 2.11 would fuse several sums; gradients must keep their shapes and values."""
    torch.manual_seed(0)
    wide = {"embed_dim": (64, 64)} if name.startswith("cvt") else {}
    model = timm.create_model(name, num_classes=5, **MICRO[name] | wide).cuda().train()
    inputs, gradients = images(32, 3, 224, 224).cuda(), []
    prepare_compiler()
    for run in (model, torch.compile(model, dynamic=False)):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            run(inputs).float().square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@every_model
def test_gradient_checkpointing_changes_nothing(name):
    gradients = []
    for checkpointing in (False, True):
        model = tiny(name).train()
        model.set_grad_checkpointing(checkpointing)
        model(images(2, 3, 64, 64)).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, saved = gradients
    assert plain.keys() == saved.keys()
    for parameter_name, gradient in plain.items():
        torch.testing.assert_close(saved[parameter_name], gradient)


@every_model
def test_classifier_and_channels(name):
    model = tiny(name, in_chans=1, num_classes=0)
    batch = images(2, 1, 64, 64)
    torch.testing.assert_close(model(batch), model.forward_grid(batch)[1])
    model.reset_classifier(3)
    assert model(batch).shape == (2, 3)
    assert model.num_classes == 3


@every_model
def test_groups_for_layer_wise_learning_rates(name):
    model = tiny(name)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups.keys() == dict(model.named_parameters()).keys()
    blocks = model.stage_ends[-1] + 1
    assert len(set(groups.values())) == 1 + blocks + 1  # the first embedding, every block, the head
    assert next(group for key, group in groups.items() if key.startswith("head.")) == max(groups.values())


@every_model
def test_impossible_shapes_raise_user_error(name):
    wrong = {"num_heads": 5} if name == "t2t_vit_14" else {"depths": (1, 1)}
    with pytest.raises(UserError, match="depths" if name == "hybrid_nano" else "num_heads"):
        tiny(name, **wrong)
