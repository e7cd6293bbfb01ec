"""A model folder loads with timm and with us, and computes the same."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from frugalvit import create_backbone
from frugalvit.backbones.base import default_crop
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import WEIGHT_FILES, class_names, timm_architecture
from frugalvit.backbones.weights.model_folder import load_model_folder, save_model_folder
from frugalvit.data.augmentation.transforms import EvalTransform
from frugalvit.errors import UserError

TINY = {"embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (2, 4, 8, 16)}
NARROW = {"embed_dim": 8, "depths": (1, 1, 1), "num_heads": (1, 2, 2)}
VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2}
SWIN = "swin_tiny_patch4_window7_224"
# The network, its options, and the architecture that config.json names.
MODELS = {
    "swin": ("swin_tiny_w7", {"img_size": 224, **TINY}, SWIN),
    "swin at 32 pixels": ("swin_tiny_w7", {"img_size": 32, **TINY}, SWIN),
    "swin with padding": ("swin_tiny_w7", {"img_size": 96, "patch_size": 4, "window_size": 7, **TINY}, "swin_tiny_w7"),
    "swin, grey": ("swin_nano", {"img_size": 64, "in_chans": 1}, SWIN),
    "swin, not square, five channels": ("swin_nano", {"img_size": (64, 96), "in_chans": 5}, "swin_nano"),
    "swin, not square": ("swin_nano", {"img_size": (64, 128)}, "swin_nano"),
    "cvt": (
        "cvt_13",
        {"img_size": 64, "embed_dim": (16, 24, 32), "depths": (1, 1, 1), "num_heads": (1, 1, 1)},
        "cvt_13",
    ),
    "t2t": ("t2t_vit_14", {"img_size": 64, "embed_dim": 48, "depth": 1, "num_heads": 4, "token_dim": 16}, "t2t_vit_14"),
    "vil": (
        "vil_tiny_w7",
        {"img_size": 64, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 4, 8, 8)},
        "vil_tiny_w7",
    ),
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, "vit_tiny_patch16_224"),
    "resnet": ("resnet10t", {"img_size": 224}, "resnet10t"),
    "resnet, small stem stride": ("resnet10t", {"img_size": 32}, "frugalvit_small_stem"),
}
HEADLESS = ("swin", "swin, not square, five channels", "vit")


def made(name: str, num_classes: int):
    torch.manual_seed(0)
    network, keywords, _ = MODELS[name]
    backbone = create_backbone(network, num_classes=num_classes, **keywords).eval()
    torch.manual_seed(1)
    for module in backbone.model.modules():
        if isinstance(module, torch.nn.LayerNorm | torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.weight, 1.0, 0.2)
    return backbone, torch.rand(2, backbone.in_chans, *backbone.img_size)


@pytest.mark.parametrize(("name", "num_classes"), [*((name, 3) for name in MODELS), *((name, 0) for name in HEADLESS)])
def test_saved_folder_loads_equally(name: str, num_classes: int, tmp_path: Path):
    backbone, images = made(name, num_classes)
    classes = ["a", "ü", "<b>"] if num_classes else None
    save_model_folder(backbone, tmp_path / "model", classes=classes, meta={"top1": 0.5, "data": "photos"})
    again, meta = load_model_folder(tmp_path / "model")
    with torch.inference_mode():
        torch.testing.assert_close(again(images).grid, backbone(images).grid)
        torch.testing.assert_close(again(images).pooled, backbone(images).pooled)
        expected = backbone.model(images)
    assert (meta["classes"], meta["top1"], meta["data"]) == (classes, 0.5, "photos")
    assert (again.mean, again.std, again.spec()) == (backbone.mean, backbone.std, backbone.spec())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architecture"] == MODELS[name][2]
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(images), expected, atol=1e-4, rtol=1e-4)
    assert loaded.pretrained_cfg["mean"] == list(backbone.mean)
    assert loaded.pretrained_cfg.get("label_names") == classes


def test_config_is_independent_of_autocast(tmp_path: Path):
    backbone = create_backbone("swin_nano", img_size=32, num_classes=3)
    plain = save_model_folder(backbone, tmp_path / "plain") / "config.json"
    with torch.autocast("cpu"):
        rounded = save_model_folder(backbone, tmp_path / "rounded") / "config.json"
    assert plain.read_text() == rounded.read_text()


@pytest.mark.parametrize("size", [32, 64, 96, 224])
def test_default_crop_is_that_of_evaluations(size: int):
    assert EvalTransform(size, **default_crop((size, size))).crop == EvalTransform(size).crop


def test_crop_and_interpolation_are_saved_again(tmp_path: Path):
    """A folder is loaded and saved again, as an export does."""
    crop = {"crop_pct": 0.95, "interpolation": "bilinear", "squash": True}
    backbone = create_backbone("test_vit", img_size=96, eval_crop=crop)
    save_model_folder(backbone, tmp_path / "theirs")
    again, meta = load_model_folder(tmp_path / "theirs")
    save_model_folder(again, tmp_path / "ours", meta=meta)
    again = load_model_folder(tmp_path / "ours")[0]
    assert again.eval_crop == backbone.eval_crop == crop
    with pytest.raises(UserError, match="eval_crop"):
        create_backbone("test_vit", eval_crop={"share": 0.9})


def test_folders_timm_wrote(tmp_path: Path):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4).eval()
    timm.models.save_for_hf(
        model, tmp_path, model_config={"label_names": ["a", "b", "c", "d"]}, safe_serialization=True
    )
    backbone, meta = load_model_folder(tmp_path)
    assert meta["classes"] == ["a", "b", "c", "d"]
    images = torch.rand(1, 3, *backbone.img_size)
    with torch.inference_mode():
        torch.testing.assert_close(backbone.model(images), model(images))


def test_wrong_number_of_class_names_is_an_error(tmp_path: Path):
    backbone, _ = made("resnet", 3)
    save_model_folder(backbone, tmp_path, classes=["a", "b", "c"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"label_names": ["a", "b"]}))
    with pytest.raises(UserError, match=r"config\.json has 2 label_names"):
        load_model_folder(tmp_path)
    with pytest.raises(UserError, match="2 class names"):
        save_model_folder(backbone, tmp_path, classes=["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json"),
        ("{", "is not readable JSON"),
        ("[]", "must hold a JSON object"),
        ('{"architecture": "hf-hub:somebody/something"}', "hf-hub:somebody"),
        ('{"architecture": "swin_tiny_w77"}', "swin_tiny_w7"),
        ('{"architecture": "resnet10t", "model_args": {"wings": 2}}', "wings"),
        ('{"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3]}}', "pretrained_cfg"),
        ('{"architecture": "resnet10t", "pretrained_cfg": "x"}', "pretrained_cfg"),
    ],
)
def test_damaged_folders_are_errors(text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=message) as caught:
        load_model_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_or_of_another_model(tmp_path: Path):
    backbone, _ = made("resnet", 3)
    save_model_folder(backbone, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        load_model_folder(tmp_path)
    other, _ = made("cvt", 0)
    save_model_folder(other, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="another architecture"):
        load_model_folder(tmp_path)


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    """The library writes metadata in a random order; resumed runs are compared by their bytes."""
    backbone = create_backbone("swin_nano", img_size=32, num_classes=3)
    files = {(save_model_folder(backbone, tmp_path / str(n)) / "model.safetensors").read_bytes() for n in range(8)}
    assert len(files) == 1
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    assert all(torch.equal(tensors[name], value) for name, value in backbone.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "keywords", "grid"), [("swin_nano", NARROW, 3), ("test_resnet", {}, 3), ("vit_base", VIT, 6)]
)
def test_trained_network_keeps_its_shape_at_small_sizes(name: str, keywords: dict, grid: int, tmp_path: Path):
    """Only new networks get smaller patches for small images; also after saving and loading again."""
    backbone = create_backbone(name, num_classes=3, **keywords).eval()
    save_model_folder(backbone, tmp_path / "224")
    small, _ = load_model_folder(tmp_path / "224", img_size=96)
    save_model_folder(small, tmp_path / "96")
    again, _ = load_model_folder(tmp_path / "96")
    images = torch.rand(1, 3, 96, 96)
    for loaded in (small, again):
        assert loaded.grid_size(96) == (grid, grid)
        assert loaded.notes == [
            f"{name} at 96x96: keeps the patch size of its weights and ends in {grid}x{grid} tokens"
        ]
        with torch.inference_mode():
            torch.testing.assert_close(loaded(images).pooled, backbone(images).pooled, atol=1e-5, rtol=1e-5)
    architecture, arguments = timm_architecture(small)
    assert "keep_patch_size" not in arguments and architecture != "frugalvit_small_stem"
    assert create_backbone(name, 96, **keywords).grid_size(96) > (grid, grid)


@pytest.mark.parametrize(
    ("name", "keywords", "old", "new"),
    [
        ("vit_base", VIT, (224, 112), (256, 128)),
        ("vit_base", VIT, (112, 448), (224, 224)),  # as many tokens on another grid
        ("swin_nano", NARROW, (64, 128), (128, 256)),
    ],
)
def test_tables_of_other_aspects_are_resampled(name: str, keywords: dict, old: tuple, new: tuple, tmp_path: Path):
    backbone = create_backbone(name, old, **keywords)
    table = next((t for n, t in backbone.model.named_parameters() if n == "pos_embed"), None)
    if table is not None:  # a slope from top to bottom stays one
        slope = torch.linspace(0, 1, old[0] // 16)[:, None].expand(-1, old[1] // 16)
        table.data[0, 1:] = slope.reshape(-1, 1)
    save_model_folder(backbone, tmp_path)
    again, _ = load_model_folder(tmp_path, img_size=new)
    assert again.grid_size(new) == (new[0] // 16, new[1] // 16)
    if table is not None:
        slope = again.model.pos_embed.data[0, 1:, 0].reshape(new[0] // 16, new[1] // 16)
        assert (slope.diff(dim=0) > 0).all() and slope.diff(dim=1).abs().max() < 1e-5


def test_folder_at_its_own_size_loads_bit_exact(tmp_path: Path):
    size = (32, 128)
    backbone = create_backbone("vit_base", size, patch_size=16, **VIT)
    grid = (size[0] // 16, size[1] // 16)
    rows = torch.randn(grid[0], 1, backbone.dim).expand(*grid, -1) + 0.1 * torch.randn(*grid, backbone.dim)
    backbone.model.pos_embed.data[0, 1:] = rows.flatten(0, 1)
    save_model_folder(backbone, tmp_path)
    again, _ = load_model_folder(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("size", [48, 16])
def test_image_sizes_below_the_window(size: int, tmp_path: Path):
    """Every map is smaller than the window. Depth 1, since shifts differ."""
    backbone = create_backbone("swin_nano", 64, **NARROW).eval()
    for name, table in backbone.named_parameters():
        if name.endswith("relative_position_bias_table"):
            torch.nn.init.normal_(table)
    save_model_folder(backbone, tmp_path)
    again, _ = load_model_folder(tmp_path, img_size=size)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(images).grid, backbone(images).grid)


def test_mean_and_std_of_a_folder_are_used(tmp_path: Path):
    theirs = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.4, 0.5)}
    model = timm.create_model("test_vit", num_classes=0)
    model.pretrained_cfg |= theirs
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    backbone, _ = load_model_folder(tmp_path)
    assert {key: tuple(backbone.architecture_kwargs()[key]) for key in theirs} == theirs
    assert (backbone.mean, backbone.std) == (theirs["mean"], theirs["std"])


def test_every_weights_file_name_is_found(tmp_path: Path):
    backbone = create_backbone("swin_nano", 224, 2, **NARROW)
    weight = backbone.model.head.fc.weight
    before = weight.detach().clone()
    folder = save_model_folder(backbone, tmp_path / "run" / "model", classes=["a", "b"])
    tensors = load_file(folder / "model.safetensors")
    for file in WEIGHT_FILES:
        if not (folder / file).exists():
            torch.save(tensors, folder / file)
        for path in (tmp_path / "run", folder, folder / file):
            weight.data.zero_()
            assert load_weights(backbone, path).missing == [] and torch.equal(weight, before)
            assert class_names(path) == ["a", "b"]
        assert load_model_folder(folder)[0].num_classes == 2
        (folder / file).unlink()
