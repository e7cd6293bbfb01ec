"""``fv.load``: a model with its preprocessing and class names."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import frugalvit as fv
from frugalvit.engine import hardware
from frugalvit.errors import UserError
from helpers.exported_models import CLASSES, made


def test_loaded_model_transforms_and_predicts(tmp_path: Path, photos: Path):
    folder, backbone = made(tmp_path, "vit")
    model = fv.load(str(folder))
    assert isinstance(model, torch.nn.Module) and not model.training
    assert model.classes == CLASSES
    path = photos / "0.jpg"
    with Image.open(path) as picture:
        pixels = np.asarray(picture)
        batch = model.transform([path, str(path), picture, pixels])
    assert batch.shape == (4, 3, 64, 64)
    assert all(torch.equal(batch[0], other) for other in batch)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch), backbone.model(batch))
        assert model.features(batch).grid.shape[:2] == (4, backbone.dim)
    best = model.predict(path, top=2)[0]
    assert len(best) == 2 and best[0][1] >= best[1][1] and {name for name, _ in best} < set(CLASSES)
    bare, _ = made(tmp_path / "bare", "vit", num_classes=0)
    features = fv.load(str(bare))
    assert features(batch).shape == (4, backbone.dim)
    with pytest.raises(UserError, match="no classifier"):
        features.predict(path)


def test_predictions_do_not_depend_on_mode_and_batch(tmp_path: Path, photos: Path):
    folder, _ = made(tmp_path, "resnet")
    model, paths = fv.load(folder), [photos / f"{index}.jpg" for index in (0, 2, 3, 4, 5)]
    expected = model.predict(paths)
    assert len(expected) == 5 and model.predict([]) == []
    model.train()
    model.backbone.model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sizes: list[int] = []
    model.backbone.register_forward_pre_hook(lambda _, images: sizes.append(len(images[0])))
    for prediction, other in zip(model.predict(paths, batch=2), expected, strict=True):
        assert dict(prediction) == pytest.approx(dict(other), abs=1e-5)
    assert sizes == [2, 2, 1]
    assert model.training and not model.backbone.model.training  # every module's mode is restored
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    rough = fv.load(folder).bfloat16()
    assert rough.transform(paths[0]).dtype == torch.bfloat16
    assert dict(rough.predict(paths[0])[0]) == pytest.approx(dict(expected[0]), abs=0.1)
    probabilities = [probability for _, probability in rough.predict(paths[0], top=1000)[0]]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5), "probabilities are not rounded"


def test_predictions_of_files_and_arrays_agree(tmp_path: Path):
    """A large JPEG is decoded at a reduced size."""
    noise = np.random.default_rng(0).normal(128, 60, (640, 480, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.jpg", quality=95)
    folder, _ = made(tmp_path, "vit")
    path, model = str(tmp_path / "large.jpg"), fv.load(folder)
    printed = fv.run("predict", str(folder), path, device="cpu")["predictions"][0]["predictions"]
    assert {guess["class"]: guess["probability"] for guess in printed} == pytest.approx(dict(model.predict(path)[0]))
    pixels = np.asarray(Image.open(path))
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    assert model.predict([tensor, tensor / 255]) == model.predict([pixels, pixels])


def test_predictions_of_paths_and_opened_pictures_agree(tmp_path: Path, data_root: Path):
    """Over 150 photographs of different sizes: the same classes with the same probabilities, to the bit."""
    paths = (
        sorted((data_root / "coco_mini").rglob("*.jpg"))[:100] + sorted((data_root / "flowers102").rglob("*.webp"))[:50]
    )
    folder, _ = made(tmp_path, "vit")
    model = fv.load(folder)
    assert len(paths) == 150
    assert model.predict(paths) == model.predict([Image.open(path) for path in paths])


@pytest.mark.parametrize("wrong", [{"top": 0}, {"top": 2.5}, {"batch": 0}], ids=str)
def test_invalid_numbers_are_errors(wrong: dict, tmp_path: Path, photos: Path):
    model = fv.load(made(tmp_path, "vit")[0])
    with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
        model.predict(photos / "0.jpg", **wrong)
    with pytest.raises(UserError, match="empty"):
        model.transform([])


def test_lists_of_images_of_every_type(tmp_path: Path, photos: Path):
    model = fv.load(made(tmp_path, "vit")[0])
    paths = [str(photos / f"{number}.jpg") for number in (0, 2)]
    expected = model.predict(paths, top=2, batch=1)
    several = {
        "tuple": tuple(paths),
        "array": np.array(paths),
        "objects": np.array(paths, dtype=object),
        "generator": (path for path in paths),
        "column": Column(paths),
        "bytes": [Path(path).read_bytes() for path in paths],
    }
    for kind, images in several.items():
        assert model.predict(images, top=np.int64(2), batch=np.int32(1)) == expected, kind
    assert model.predict(several["bytes"][0], top=2) == expected[:1]
    with Path(paths[0]).open("rb") as file, pytest.raises(UserError, match="BufferedReader"):
        model.predict(file)


class Column:
    """A column of a table, as in pandas."""

    def __init__(self, values: list[str]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def to_numpy(self) -> np.ndarray:
        return np.array(self.values)


@pytest.fixture
def onednn_is_slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor on which oneDNN is slow."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    before = torch.backends.mkldnn.enabled
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(hardware, "is_onednn_slow", lambda: True)
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = before


@pytest.mark.usefixtures("onednn_is_slow")
def test_load_restores_random_state_and_onednn(tmp_path: Path, photos: Path):
    folder, _ = made(tmp_path, "vit")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = fv.load(folder)
    assert torch.equal(torch.rand(3), expected) and torch.backends.mkldnn.enabled
    enabled: list[bool] = []
    model.backbone.register_forward_hook(lambda *_: enabled.append(torch.backends.mkldnn.enabled))
    model.predict(photos / "0.jpg")
    model.features(torch.zeros(1, 3, 64, 64))
    with pytest.raises(UserError, match="float"):
        model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert enabled == [False, False]
    assert torch.backends.mkldnn.enabled


def test_load_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "swin")
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert next(fv.load(folder, device="auto").parameters()).device.type == best
    model = fv.load(folder, device=torch.device("cpu"), img_size=[64, 96])
    assert model.backbone.img_size == (64, 96)
    assert repr(model).splitlines()[1].strip() == "name='model', img_size=(64, 96), num_classes=3"
    with pytest.raises(UserError, match="float"):
        model(Image.new("RGB", (64, 96)))
    with pytest.raises(UserError, match="img_size='64'"):
        fv.load(folder, img_size="64")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda:0", "gpu"):
        with pytest.raises(UserError, match=device.removesuffix(":0")):
            fv.load(folder, device=device)
