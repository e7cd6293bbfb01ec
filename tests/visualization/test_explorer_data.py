"""The explorer's data, decoded again, against the model's own numbers."""

import base64
import json

import numpy as np
import pytest
import torch

from frugalvit.errors import UserError
from frugalvit.visualization import explorer_data
from frugalvit.visualization.attention import entropy
from frugalvit.visualization.correspondence import cosines
from frugalvit.visualization.model_views import model_input
from helpers.fake_backbones import PaddedPositions, PatchFeatures


def picture(name, height=64, width=80, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return explorer_data.Picture(name, np.kron(pixels, np.ones((8, 8, 1), dtype=np.uint8)))


def decode(text, kind, shape):
    return np.frombuffer(base64.b64decode(text), dtype=kind).reshape(shape)


def test_bytes_encode_similarities_and_attention():
    backbone = PatchFeatures((32, 48))
    data = explorer_data.gather([("m", backbone)], [picture("a"), picture("b", seed=1)], seed=3)
    data = json.loads(json.dumps(data))
    model = data["models"][0]
    assert model["grid"] == [4, 6] and len(data["images"]) == 2
    views = [explorer_data._View(p, False, 1.0, 3) for p in (picture("a"), picture("b", seed=1))]
    inputs = [model_input(backbone, view.render(backbone, (32, 48))[None]) for view in views]
    with torch.no_grad():
        grids = [backbone(x).grid for x in inputs]
        attention = backbone.attention(inputs[1])[0][:, 1:, 1:]
    exact = cosines(grids[0], grids[1])[0]
    stored = model["similarity"]["0-1"]
    levels = decode(stored["data"], np.uint8, (24, 24))
    decoded = stored["low"] + levels * (stored["high"] - stored["low"]) / 255
    assert np.abs(decoded - exact.numpy()).max() <= (stored["high"] - stored["low"]) / 500
    assert model["best"]["0-1"] == exact.argmax(1).tolist()
    assert model["best"]["1-0"] == exact.argmax(0).tolist()
    heads = model["heads"][1]
    weights = decode(heads["weights"], np.uint8, (3, 24, 24)) / 255 * decode(heads["peak"], "<f4", (3, 24, 1))
    assert np.abs(weights - attention.numpy()).max() < 1 / 255
    assert decode(heads["entropy"], "<f4", (3, 24)) == pytest.approx(entropy(attention).numpy(), abs=1e-4)


def test_second_views_are_added():
    data = explorer_data.gather([("m", PatchFeatures((32, 48)))], [picture("a")], second_views=True)
    assert [image["name"] for image in data["images"]] == ["a", "a (mirrored, grey)"]
    assert len(data["models"][0]["top"]["0-1"]) == 10


def test_fine_grids_are_averaged():
    backbone = PatchFeatures((64, 64), cell=2)
    data = explorer_data.gather([("m", backbone)], [picture("a")])
    model = data["models"][0]
    assert model["grid"] == [16, 16]
    assert "32x32" in model["notes"][0]
    assert model["extent"] == [1, 1]


def test_extent_of_padded_and_cut_grids():
    options = {"cell": 16, "heads": 1}
    padded = explorer_data.gather([("m", PaddedPositions((50, 60), **options))], [picture("a")])["models"][0]
    assert padded["grid"] == [4, 4] and padded["extent"] == pytest.approx([64 / 50, 64 / 60])
    cut = explorer_data.gather([("m", PatchFeatures((50, 60), **options))], [picture("a")])["models"][0]
    assert cut["grid"] == [3, 3] and cut["extent"] == pytest.approx([48 / 50, 48 / 60])
    averaged = explorer_data.gather([("m", PaddedPositions((99, 99), cell=2))], [picture("a")])["models"][0]
    assert averaged["grid"] == [13, 13] and averaged["extent"] == pytest.approx([100 / 99, 100 / 99])


@pytest.mark.parametrize(("full", "grid"), [((4, 6), (2, 3)), ((5, 5), (3, 3)), ((2, 2), (2, 2))])
def test_averaged_attention_sums_to_one(full, grid):
    tokens = full[0] * full[1]
    attention = torch.rand(2, tokens, tokens).softmax(-1)
    small = explorer_data.shrink_attention(attention, full, grid)
    assert small.shape == (2, grid[0] * grid[1], grid[0] * grid[1])
    assert torch.allclose(small.sum(-1), torch.ones(small.shape[:2]))
    if full == (4, 6):
        block = attention.view(2, 2, 2, 3, 2, 2, 2, 3, 2).mean(dim=(2, 4)).sum(dim=(4, 6)).reshape(2, 6, 6)
        assert torch.allclose(small, block, atol=1e-6)


def test_errors():
    with pytest.raises(UserError, match="at least one image"):
        explorer_data.gather([("m", PatchFeatures())], [])
    broken = PatchFeatures()
    torch.nn.init.constant_(broken.project, float("nan"))
    with pytest.raises(UserError, match="non-finite"):
        explorer_data.gather([("m", broken)], [picture("a")])
    with pytest.raises(UserError, match="1x1 grid"):
        explorer_data.gather([("m", PatchFeatures((8, 8)))], [picture("a")])
    with pytest.raises(UserError, match="aspect ratios"):
        explorer_data.gather([("m", PatchFeatures()), ("n", PatchFeatures((32, 48)))], [picture("a")])
