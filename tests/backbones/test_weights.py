"""Every released format, made small from random models, must come back exactly; foreign sizes are resampled."""

from __future__ import annotations

import argparse
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.resnet import Bottleneck
from torch import Tensor, nn

from frugalvit.backbones.resample import resample_bias_table, resample_position_embedding
from frugalvit.backbones.weights import load_weights, read_heads, read_localization
from frugalvit.errors import UserError

SWIN = {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 16)}
VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3}


def swin(window: int = 7, num_classes: int = 10, **keywords) -> nn.Module:
    return randomised(
        timm.create_model(
            "swin_tiny_patch4_window7_224", window_size=window, num_classes=num_classes, **SWIN | keywords
        )
    )


def vit(img_size: int = 64, num_classes: int = 10, **keywords) -> nn.Module:
    return randomised(
        timm.create_model("vit_base_patch16_224", img_size=img_size, num_classes=num_classes, **VIT | keywords)
    )


def resnet(num_classes: int = 10, **keywords) -> nn.Module:
    return randomised(timm.models.ResNet(Bottleneck, (1, 1, 1, 1), num_classes=num_classes, channels=(8, 8, 8, 8)))


def randomised(model: nn.Module) -> nn.Module:
    """Everything random, norms too, so that a tensor in the wrong place is seen."""
    generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + 0.1)
    return model.eval()


def microsoft(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's Swin under Microsoft's names, with the buffers their files carry."""
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        renamed[name.replace("head.fc.", "head.")] = tensor
    renamed["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    renamed["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    return renamed


def projection_head(dim: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"mlp.0.weight": (20, dim), "mlp.2.weight": (20, 20), "mlp.4.weight": (8, 20)}
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    shapes |= {"last_layer.weight_g": (32, 1), "last_layer.weight_v": (32, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def esvit(state: dict[str, Tensor], prefix: str = "module.", wrapper: str = "", dense: bool = True) -> dict:
    """A training checkpoint as EsViT and DINO write it: teacher, student, optimiser with NumPy numbers, Namespace."""
    dim = 192
    bare = {wrapper + name: tensor for name, tensor in state.items() if not name.startswith(("head.", "fc."))}
    heads = {f"head.{name}": tensor for name, tensor in projection_head(dim, 1).items()}
    if dense:
        heads |= {f"head_dense.{name}": tensor for name, tensor in projection_head(dim, 2).items()}
    teacher = bare | heads
    centres = {"center": torch.full((1, 32), 0.5)} | ({"center_grid": torch.full((1, 32), 0.25)} if dense else {})
    return {
        "student": {
            prefix + name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in teacher.items()
        },
        "teacher": teacher,
        "optimizer": {"param_groups": [{"lr": np.float64(1e-3), "weight_decay": np.float32(0.5), "step": np.int64(3)}]},
        "epoch": 300,
        "args": argparse.Namespace(arch="swin_tiny", local_crops_number=[8]),
        "dino_loss": centres,
        "fp16_scaler": {"scale": 65536.0},
    }


def lucidrains(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's ViT (without attention bias) under the names of VTs-Drloc's ViT."""
    rules = [
        (r"^pos_embed$", "pos_embedding"),
        (r"^patch_embed\.proj\.", "to_patch_embedding.1."),
        (r"^blocks\.(\d+)\.norm1\.", r"transformer.layers.\1.0.norm."),
        (r"^blocks\.(\d+)\.attn\.qkv\.", r"transformer.layers.\1.0.fn.to_qkv."),
        (r"^blocks\.(\d+)\.attn\.proj\.", r"transformer.layers.\1.0.fn.to_out.0."),
        (r"^blocks\.(\d+)\.norm2\.", r"transformer.layers.\1.1.norm."),
        (r"^blocks\.(\d+)\.mlp\.fc1\.", r"transformer.layers.\1.1.fn.net.0."),
        (r"^blocks\.(\d+)\.mlp\.fc2\.", r"transformer.layers.\1.1.fn.net.3."),
        (r"^norm\.", "mlp_head.0."),
        (r"^head\.", "mlp_head.1."),
    ]
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if name == "to_patch_embedding.1.weight":
            tensor = tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1)
        renamed[name] = tensor
    return renamed | drloc("drloc.layers.")


def drloc(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{i}.{part}": torch.full((2, 2), float(i)) for i in (0, 2, 4) for part in ("weight", "bias")}


def drloc_resnet(state: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {"conv1": "model.0", "bn1": "model.1", **{f"layer{i}": f"model.{i + 3}" for i in range(1, 5)}}
    renamed = {}
    for name, tensor in state.items():
        first, _, rest = name.partition(".")
        renamed[f"{parts.get(first, first)}.{rest}"] = tensor
    return renamed | drloc("drloc.0.layers.")


def same(first: nn.Module, second: nn.Module, leave_out: str = " ") -> bool:
    mine, theirs = first.state_dict(), second.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine if not name.startswith(leave_out))


def save(content: dict, folder: Path, old_format: bool = False) -> Path:
    path = folder / "weights.data"  # a name that says nothing
    torch.save(content, path, _use_new_zipfile_serialization=not old_format)
    return path


FORMATS = {
    "timm swin": (swin, lambda s: s, "timm", 0),
    "timm swin in state_dict": (swin, lambda s: {"epoch": 3, "state_dict": s, "arch": "swin"}, "timm", 0),
    "timm, compiled and wrapped": (swin, lambda s: {f"_orig_mod.module.{n}": t for n, t in s.items()}, "timm", 0),
    "microsoft swin": (swin, lambda s: {"model": microsoft(s), "epoch": 1, "max_accuracy": 81.2}, "swin", 0),
    "vts-drloc swin": (swin, lambda s: {"model": microsoft(s) | drloc("drloc.0.layers.")}, "vts-drloc", 6),
    "deit": (vit, lambda s: {"model": s}, "timm", 0),
    "vts-drloc resnet": (resnet, lambda s: {"model": drloc_resnet(s)}, "vts-drloc", 6),
    "torchvision resnet": (resnet, lambda s: s, "torchvision", 0),
    "ema beside raw weights": (
        vit,
        lambda s: {
            "state_dict": {n: t + 1 for n, t in s.items()},
            "state_dict_ema": {f"module.{n}": t for n, t in s.items()},
        },
        "timm",
        0,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("old_format", [False, True])
def test_every_format_loads_exactly(name: str, old_format: bool, tmp_path: Path):
    make, disguise, kind, left_over = FORMATS[name]
    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    target = make()
    assert not same(source, target)
    report = load_weights(target, save(disguise(source.state_dict()), tmp_path, old_format))
    assert same(source, target)
    assert (report.kind, report.missing, len(report.unexpected)) == (kind, [], left_over)
    assert len(report.matched) == len(target.state_dict())


def test_safetensors_and_state_dicts(tmp_path: Path):
    torch.manual_seed(1)
    source, target = swin(), swin()
    torch.manual_seed(2)
    target = swin()
    path = tmp_path / "model.pth"  # the name lies; the content counts
    save_file({name: tensor.contiguous() for name, tensor in source.state_dict().items()}, path)
    assert load_weights(target, path).kind == "timm"
    assert same(source, target)
    assert load_weights(swin(), source.state_dict(), strict=True).missing == []
    save_file(source.state_dict(), path, metadata={"frugalvit": "0.1.0"})
    assert load_weights(target, path).kind == "frugalvit"


@pytest.mark.parametrize(
    ("prefix", "wrapper"), [("module.", ""), ("", ""), ("module.", "backbone."), ("", "backbone.backbone.")]
)
def test_esvit_checkpoints(prefix: str, wrapper: str, tmp_path: Path):
    torch.manual_seed(1)
    source = swin(num_classes=0)
    checkpoint = esvit(microsoft(source.state_dict()), prefix, wrapper)
    path = save(checkpoint, tmp_path)
    torch.manual_seed(2)
    target = swin(num_classes=0)
    report = load_weights(target, path, strict=True)
    assert same(source, target), "the teacher is preferred"
    assert report.kind == "esvit"
    assert report.missing == []
    assert len(report.unexpected) == 16
    assert any("heads" in note for note in report.notes)

    for network, shift in (("teacher", 0), ("student", 1)):
        heads = read_heads(path, network)
        for level, seed in ((heads.view, 1), (heads.region, 2)):
            expected = projection_head(192, seed)
            assert level.keys() == expected.keys()
            assert all(torch.equal(level[name], expected[name] + shift) for name in expected)
        assert heads.view_center is not None and heads.view_center.unique().tolist() == [0.5]
        assert heads.region_center is not None and heads.region_center.unique().tolist() == [0.25]

    del checkpoint["teacher"]
    load_weights(target, checkpoint)
    assert torch.equal(target.norm.weight, source.norm.weight + 1), "the student where there is no teacher"


@pytest.mark.parametrize(("make", "name"), [(vit, "ViT"), (resnet, "ResNet")])
def test_dino_checkpoints(make, name: str):
    torch.manual_seed(1)
    source = make(num_classes=0)
    torch.manual_seed(2)
    target = make(num_classes=0)
    report = load_weights(target, esvit(source.state_dict(), wrapper="backbone.", dense=False))
    assert same(source, target)
    assert (report.kind, report.missing) == ("dino", [])
    assert read_heads(esvit(source.state_dict(), dense=False)).region == {}


def test_vit_of_drloc_gives_the_same_features():
    torch.manual_seed(1)
    source = vit(qkv_bias=False)
    torch.manual_seed(2)
    target = vit()
    checkpoint = {"model": lucidrains(source.state_dict())}
    report = load_weights(target, checkpoint)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(target(images), source(images))
    assert report.kind == "vts-drloc"
    assert report.missing == []
    assert "2 attention biases the file does without set to zero" in report.notes
    assert read_localization(checkpoint).keys() == {f"layers.{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")}
    assert read_localization(source.state_dict()) == {}


def test_another_class_count_leaves_the_classifier_out():
    torch.manual_seed(1)
    source = swin(num_classes=1000)
    target = swin(num_classes=7)
    before = target.head.fc.weight.clone()
    report = load_weights(target, {"model": microsoft(source.state_dict())})
    assert torch.equal(target.head.fc.weight, before)
    assert report.missing == ["head.fc.weight", "head.fc.bias"]
    assert report.unexpected == ["head.weight", "head.bias"]
    assert "classifier of 1000 classes left out (this model has 7)" in report.notes
    with pytest.raises(UserError, match=r"missing head\.fc\.weight, head\.fc\.bias; left over head\.weight"):
        load_weights(target, microsoft(source.state_dict()), strict=True)
    assert "classifier of 1000 classes left out" in load_weights(swin(num_classes=0), source.state_dict()).notes


# Sizes


def cubic(distance: float, a: float = -0.75) -> float:
    x = abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def slow_bicubic(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """The textbook's bicubic interpolation, one output value after the other, edges repeated."""
    old_height, old_width = picture.shape
    out = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            y, x = (row + 0.5) * old_height / height - 0.5, (column + 0.5) * old_width / width - 0.5
            for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
                for j in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
                    value = picture[min(max(i, 0), old_height - 1), min(max(j, 0), old_width - 1)]
                    out[row, column] += value * cubic(y - i) * cubic(x - j)
    return out


@pytest.mark.parametrize(("old", "new"), [((3, 3), (7, 7)), ((13, 13), (5, 5)), ((5, 5), (3, 9)), ((3, 5), (5, 3))])
def test_bias_tables_are_resampled_per_head(old: tuple[int, int], new: tuple[int, int]):
    table = torch.randn(old[0] * old[1], 3, dtype=torch.float64)
    resized = resample_bias_table(table, new, old)
    for head in range(3):
        expected = slow_bicubic(table[:, head].reshape(old).numpy(), *new)
        np.testing.assert_allclose(resized[:, head].reshape(new).numpy(), expected, atol=1e-5)


def test_window_7_weights_serve_window_14():
    torch.manual_seed(1)
    source, target = swin(), swin(window=14)
    report = load_weights(target, {"model": microsoft(source.state_dict())})
    assert report.missing == []
    # stage 4 is 7 x 7 at 224 pixels: its window, and so its table, stays
    assert "6 relative bias tables resampled 7 -> 14" in report.notes
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    table, mine = source.state_dict()[name], target.state_dict()[name]
    torch.testing.assert_close(mine, resample_bias_table(table, (27, 27)))
    centre, old_centre = mine.reshape(27, 27, 2)[13, 13], table.reshape(13, 13, 2)[6, 6]
    torch.testing.assert_close(centre, old_centre)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_position_embeddings_keep_their_prefix(tokens: int):
    embedding = torch.randn(1, tokens + 49, 6)
    resized = resample_position_embedding(embedding, (5, 9), 1)
    assert resized is not None and resized.shape == (1, 46, 6)
    expected = embedding[:, 0] if tokens else torch.zeros(1, 6)
    torch.testing.assert_close(resized[:, 0], expected)
    assert resample_position_embedding(torch.randn(1, 44, 6), (5, 9), 1) is None


def test_vit_at_another_image_size():
    torch.manual_seed(1)
    source, target = vit(img_size=64), vit(img_size=96)
    report = load_weights(target, source.state_dict())
    assert report.missing == []
    assert "1 position embedding resampled to 6 x 6 tokens" in report.notes
    torch.testing.assert_close(target.pos_embed[:, 0], source.pos_embed[:, 0])
    resized = torch.nn.functional.interpolate(
        source.pos_embed[:, 1:].reshape(1, 4, 4, 48).permute(0, 3, 1, 2), (6, 6), mode="bicubic", antialias=True
    )
    torch.testing.assert_close(target.pos_embed[:, 1:], resized.flatten(2).transpose(1, 2))


def test_other_channels_and_patches():
    torch.manual_seed(1)
    source = swin()
    grey = swin(in_chans=1)
    load_weights(grey, source.state_dict())
    torch.testing.assert_close(grey.patch_embed.proj.weight[:, 0], source.patch_embed.proj.weight.sum(1))
    fine = swin(patch_size=2, img_size=112)
    report = load_weights(fine, source.state_dict())
    assert report.missing == []
    assert any("first convolution fitted from 24x3x4x4 to 24x3x2x2" in note for note in report.notes)


# Refusals


@pytest.mark.parametrize(
    ("target", "state", "words"),
    [
        (
            lambda: swin(embed_dim=32),
            lambda: microsoft(swin().state_dict()),
            r"Swin \(Microsoft's names\).*width 24, depths 2-2-2-2",
        ),
        (vit, lambda: swin().state_dict(), r"seems to be a Swin"),
        (swin, lambda: {"teacher": resnet().state_dict()}, r"seems to be a ResNet, teacher"),
        (resnet, lambda: {"a.weight": torch.zeros(3)}, r"a network of an unknown kind"),
    ],
)
def test_the_wrong_architecture_is_named(target, state, words: str):
    model = target()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=words) as caught:
        load_weights(model, state())
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "left untouched"


def test_a_dictionary_without_a_network():
    with pytest.raises(UserError, match=r"no network's weights \(its keys: epoch, lr\)"):
        load_weights(swin(), {"epoch": 1, "lr": 0.1})


# Ours


def test_our_own_run_checkpoints_and_folders(tmp_path: Path):
    torch.manual_seed(1)
    source = swin()
    plain = {f"backbone.model.{name}": tensor + 1 for name, tensor in source.state_dict().items()}
    average = {f"average.model.{name}": tensor for name, tensor in source.state_dict().items()}
    others = {"localization.mlp.0.weight": torch.zeros(2, 2)}
    checkpoint = {"step": 3, "task": plain | average | others, "optimizer": {"state": {}}}
    torch.manual_seed(2)
    target = swin()
    report = load_weights(target, save(checkpoint, tmp_path), strict=True)
    assert same(source, target), "the moving average is preferred"
    assert (report.kind, report.missing, report.unexpected) == ("frugalvit", [], [])
    load_weights(target, {"step": 3, "task": plain | others})
    assert torch.equal(target.norm.weight, source.norm.weight + 1)

    for folder in (tmp_path / "model", tmp_path):
        (tmp_path / "model").mkdir(exist_ok=True)
        save_file(source.state_dict(), tmp_path / "model" / "model.safetensors", metadata={"frugalvit": "0.1.0"})
        target = swin()
        assert load_weights(target, folder).kind == "frugalvit"
        assert same(source, target)


# The released code's numbers


def released(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name[2:]: torch.from_numpy(array).float() for name, array in arrays.items() if name.startswith("w.")}


GOLDEN = {
    "c_swin_w7": ("swin_tiny_w7", {**SWIN, "padding": "zeros"}, "swin"),
    "d_cvt_norpe": (
        "cvt_tiny_w7",
        {
            "embed_dim": (16, 32, 64, 128),
            "depths": (2, 2, 2, 2),
            "num_heads": (1, 2, 4, 8),
            "padding": "zeros",
            "relative_bias": False,
        },
        "esvit",
    ),
    "d_vil": (
        "vil_tiny_w7",
        {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 8), "bias_resize": "matrix"},
        "esvit",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_released_esvit_networks(name: str, golden, tmp_path: Path):
    from frugalvit import create_backbone

    model, keywords, kind = GOLDEN[name]
    backbone = create_backbone(model, **keywords).eval()
    arrays = golden(name)
    report = load_weights(backbone, released(arrays), strict=True)
    assert (report.kind, report.missing, report.unexpected) == (kind, [], [])
    for size in (224, 96):
        with torch.inference_mode():
            features = backbone(torch.from_numpy(arrays[f"img{size}"]).float())
        regions = features.grid.flatten(2).transpose(1, 2)
        np.testing.assert_allclose(features.pooled.numpy(), arrays[f"img{size}.view"], atol=1e-4)
        np.testing.assert_allclose(regions.numpy(), arrays[f"img{size}.region"], atol=1e-4)

    wrapped = save(esvit(released(arrays), "module."), tmp_path)
    again = create_backbone(model, **keywords)
    assert load_weights(again, wrapped, strict=True).kind == "esvit"
    assert same(again.model, backbone.model)


@pytest.mark.parametrize(
    ("name", "model", "keywords"),
    [
        ("f_drloc_cvt", "cvt_13", {"embed_dim": (16, 24, 32), "depths": (1, 1, 2), "num_heads": (1, 1, 1)}),
        ("f_drloc_t2t", "t2t_vit_14", {"embed_dim": 48, "depth": 2, "num_heads": 4, "token_dim": 16}),
    ],
)
def test_released_drloc_networks(name: str, model: str, keywords: dict, golden):
    from frugalvit import create_backbone

    backbone = create_backbone(model, num_classes=10, **keywords).eval()
    arrays = golden(name)
    checkpoint = {"model": released(arrays), "max_accuracy": 80.0, "epoch": 100}
    report = load_weights(backbone, checkpoint, strict=True)
    assert (report.kind, report.missing, len(report.unexpected)) == ("vts-drloc", [], 6)
    images = np.random.RandomState(zlib.crc32(b"dl.img")).standard_normal((2, 3, 224, 224)).astype(np.float16)
    with torch.inference_mode():
        logits = backbone.model(torch.from_numpy(images).float())
    np.testing.assert_allclose(logits.numpy(), arrays["logits"], atol=1e-4)
    assert [tensor.shape[0] for tensor in read_localization(checkpoint).values()] == [512, 512, 512, 512, 2, 2]


def test_t2t_files_hold_the_average_under_its_own_name():
    state = {"tokens_to_token.attention1.kqv.weight": torch.zeros(2, 2)}
    with pytest.raises(UserError, match="seems to be a T2T-ViT with"):
        load_weights(swin(), {"state_dict_ema": state})
