"""Published networks: names and files -> weights with the preprocessing of the network's own configuration."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights import published
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.backbones.weights.published import describe_file, find_published, is_published, to_tag
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model

NAME = "test_vit"  # mean and std 0.5, 160 px, crop 0.95
TAG = "test_vit.r160_in1k"


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return timm.create_model(NAME).eval()


@pytest.fixture
def write(network: torch.nn.Module, tmp_path: Path) -> Callable[..., Path]:
    def write_file(name: str = f"{NAME}.safetensors", **changes: torch.Tensor) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict() | changes, path)
        return path

    return write_file


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("FRUGALVIT_WEIGHTS", raising=False)


@pytest.mark.parametrize("model", [NAME, "test_efficientnet", "test_resnet"])
def test_bare_file_gives_timms_own_features(model: str, tmp_path: Path) -> None:
    """The oracle is timm's evaluation: its transform, its network."""
    reference = timm.create_model(model).eval()
    save_file(reference.state_dict(), tmp_path / f"{model}.safetensors")
    loaded = load_model(str(tmp_path / f"{model}.safetensors"))
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=reference))
    pixels = np.random.default_rng(0).integers(0, 256, (200, 260, 3), np.uint8)
    image = transform(Image.fromarray(pixels))[None]  # type: ignore[operator, index]
    with torch.no_grad():
        expected = reference.forward_head(reference.forward_features(image), pre_logits=True)
        features = loaded.backbone(loaded.transform.image(pixels))
        assert torch.allclose(features.pooled, expected, atol=1e-4)
        assert torch.allclose(loaded.backbone.classify(features.pooled), reference(image), atol=1e-4)
    assert loaded.classes is not None and loaded.classes[0] == "n01440764 tench, Tinca tinca"


def test_the_guess_is_printed(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(write()))
    assert f"taken for timm's {TAG}: 160 px, mean 0.5, std 0.5, bicubic, crop 0.95\n" in capsys.readouterr().err


def test_a_tag_is_chosen_by_the_classifier(tmp_path: Path) -> None:
    tags = {0: "dino", 1000: "augreg_in21k_ft_in1k", 21843: "augreg_in21k", 7: "augreg_in21k_ft_in1k"}
    for classes, tag in tags.items():
        head = {"head.weight": torch.ones(classes, 2)} if classes else {}
        save_file({"blocks.0.attn.qkv.weight": torch.ones(1), **head}, tmp_path / "vit_small_patch16_224.safetensors")
        found = describe_file(tmp_path / "vit_small_patch16_224.safetensors")
        assert found.tag == f"vit_small_patch16_224.{tag}" and found.keywords["num_classes"] == classes
        assert found.keywords["mean"] == ([0.485, 0.456, 0.406] if tag == "dino" else [0.5, 0.5, 0.5])
    found = describe_file(tmp_path / "vit_small_patch16_224.safetensors", "vit_small_patch16_224.dino")
    assert found.keywords["mean"] == [0.485, 0.456, 0.406]  # a tag of --backbone decides


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("resnet50-0676ba61.pth", "resnet50.tv_in1k"),  # torchvision's
        ("dino_deitsmall16_pretrain.pth", "vit_small_patch16_224.dino"),
        (f"{TAG}.pth", TAG),
        (f"{TAG}/weights.pth", TAG),
        (f"{NAME}.mine.pth", NAME),
        ("mine.pth", None),
    ],
)
def test_file_names_name_the_network(file: str, tag: str | None, tmp_path: Path) -> None:
    assert published.network_in_name(tmp_path / file) == tag


@pytest.mark.parametrize("kind", ["frugalvit", "esvit"])
def test_own_and_self_supervised_files_keep_imagenets_statistics(kind: str, tmp_path: Path) -> None:
    state = create_backbone("swin_nano", 32).model.state_dict()
    torch.save({"teacher": state} if kind == "esvit" else {"frugalvit": "1", "model": state}, tmp_path / "a.pth")
    found = describe_file(tmp_path / "a.pth", "swin_tiny_patch4_window7_224")
    assert found.tag is None and "mean" not in found.keywords


def test_names_of_published_networks() -> None:
    assert is_published(TAG) and is_published("hf-hub:a/b") and is_published("torchvision:resnet50")
    assert not is_published(NAME) and not is_published("photo.jpg") and not is_published("runs/a.b")
    assert to_tag(NAME) == TAG and to_tag("vit_base").startswith("vit_base_patch16_224.")
    assert to_tag("torchvision:resnet50") == "resnet50.tv2_in1k"
    for name, text in (("test_vit.r160", "Did you mean 'test_vit.r160_in1k'"), ("swin_nano", "no weights of 'swin_n")):
        with pytest.raises(UserError, match=text):
            to_tag(name)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (f"{NAME}.safetensors", NAME),
        (f"{NAME}.safetensors", TAG),
        (f"{TAG}.pth", NAME),
        (f"timm/{TAG}", TAG),
        ("someone/net", "hf-hub:someone/net"),
        ("models--someone--net/snapshots/0a", "hf-hub:someone/net"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_local_folder_works_like_a_hub(
    stored: str, name: str, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stored.endswith((".safetensors", ".pth")):
        write(f"mirror/{stored}")
    else:
        save_model_folder(load_model(str(write())).backbone, tmp_path / "mirror" / stored)
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", str(tmp_path / "mirror"))
    assert find_published(name) == tmp_path / "mirror" / stored
    model = load_model(name, pretrained=name == NAME)
    assert model.name == name and model.backbone.mean == (0.5, 0.5, 0.5) and model.backbone.img_size == (160, 160)


@pytest.mark.usefixtures("offline")
def test_offline_is_one_line_at_once(capsys: pytest.CaptureFixture[str], photos: Path) -> None:
    began = time.monotonic()
    assert cli.main(["probe", "knn", TAG, str(photos), "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"FOLDER/{TAG}/ and set FRUGALVIT_WEIGHTS=FOLDER" in message
    assert time.monotonic() - began < 10


def test_hub_is_read_through_its_cache(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the hub's cache is used without a connection."""
    import huggingface_hub

    folder = save_model_folder(load_model(str(write())).backbone, tmp_path / "hub")
    asked: list[tuple[str, str, bool]] = []

    def download(repository: str, file: str, local_files_only: bool) -> str:
        asked.append((repository, file, local_files_only))
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.delenv("FRUGALVIT_WEIGHTS", raising=False)
    assert find_published(TAG) == folder
    assert asked == [(f"timm/{TAG}", "model.safetensors", True), (f"timm/{TAG}", "config.json", True)]


def test_commands_take_published_names(
    write: Callable[..., Path], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", str(write().parent))
    monkeypatch.chdir(tmp_path)
    image, data = f"{photos}/val/cat/0.png", str(photos)
    commands = [
        ["probe", "knn", NAME, data, "--pretrained"],
        ["embed", TAG, data, "-o", "features.npz"],
        ["look", "attend", NAME, image, "--pretrained"],
        ["predict", NAME, image],
    ]
    for command in commands:
        assert cli.main([*command, "--device", "cpu", "--quiet"]) == 0, command
    assert cli.main(["probe", "knn", str(write()), data, "--pretrained"]) == 2
    assert "Drop --pretrained" in capsys.readouterr().err


def test_eval_matches_imagenets_folders(write: Callable[..., Path], tmp_path: Path) -> None:
    for folder in ("n01440764", "n01443537"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / folder / "a.png")
    out = str(tmp_path / "answers.csv")
    assert cli.main(["eval", str(write()), str(tmp_path / "images"), "--device", "cpu", "--quiet", "-o", out]) == 0
    assert ',"n01440764 tench, Tinca tinca",' in Path(out).read_text()


def test_create_backbone_reads_the_local_folder(
    write: Callable[..., Path], network: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", str(write().parent))
    backbone = create_backbone(NAME, 160, num_classes=3, pretrained=True)
    assert backbone.mean == (0.5, 0.5, 0.5)
    weights = backbone.model.state_dict()
    kept = [name for name in weights if not name.startswith("head.")]
    assert all(torch.equal(weights[name], network.state_dict()[name]) for name in kept)


@pytest.mark.skipif(not os.environ.get("FRUGALVIT_WEIGHTS"), reason="set FRUGALVIT_WEIGHTS to real weights")
def test_real_weights_know_their_classes(data_root: Path) -> None:
    model = load_model("vit_tiny_patch16_224", pretrained=True)
    image = np.asarray(Image.open(next(iter(sorted((data_root / "flowers102/test/001").iterdir())))).convert("RGB"))
    with torch.no_grad():
        best = model.backbone.classify(model.backbone(model.transform.image(image)).pooled).topk(5).indices[0]
    assert model.classes is not None and any("daisy" in model.classes[number] for number in best.tolist())
