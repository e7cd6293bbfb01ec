"""Every released format, made from small random models, loads exactly."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from frugalvit.backbones.weights.load import load_weights, read_heads
from frugalvit.errors import UserError
from helpers.released_checkpoints import drloc, esvit, microsoft, projection_head, resnet, same, save, swin, vit

FORMATS = {
    "timm swin": (swin, lambda s: s, "timm", 0),
    "timm swin in state_dict": (swin, lambda s: {"epoch": 3, "state_dict": s, "arch": "swin"}, "timm", 0),
    "timm, compiled and wrapped": (swin, lambda s: {f"_orig_mod.module.{n}": t for n, t in s.items()}, "timm", 0),
    **{
        f"timm under {prefix}*": (swin, lambda s, p=prefix: {p + n: t for n, t in s.items()}, "timm", 0)
        for prefix in ("model._orig_mod.", "model.module.", "student.module.", "module.backbone._orig_mod.module.")
    },
    "microsoft swin": (swin, lambda s: {"model": microsoft(s), "epoch": 1, "max_accuracy": 81.2}, "swin", 0),
    "vts-drloc swin": (swin, lambda s: {"model": microsoft(s) | drloc("drloc.0.layers.")}, "vts-drloc", 6),
    "deit": (vit, lambda s: {"model": s}, "timm", 0),
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
    path = tmp_path / "model.pth"  # the content decides, not the name
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
    assert same(source, target), "the teacher has priority"
    assert report.kind == "esvit"
    assert report.missing == []
    assert len(report.unexpected) == 16
    assert any("heads" in note for note in report.notes)

    heads = read_heads(path)
    for level, seed in ((heads.view, 1), (heads.region, 2)):
        expected = projection_head(192, seed)
        assert level.keys() == expected.keys()
        assert all(torch.equal(level[name], expected[name]) for name in expected)
    assert heads.view_center is not None and heads.view_center.unique().tolist() == [0.5]
    assert heads.region_center is not None and heads.region_center.unique().tolist() == [0.25]

    del checkpoint["teacher"]
    load_weights(target, checkpoint)
    assert torch.equal(target.norm.weight, source.norm.weight + 1), "the student without a teacher"


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


def test_classifier_of_other_classes_is_left_out():
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


@pytest.mark.parametrize(
    ("target", "state", "message"),
    [
        (lambda: swin(embed_dim=32), lambda: microsoft(swin().state_dict()), r"Swin \(Microsoft's names\)"),
        (vit, lambda: swin().state_dict(), r"seems to be a Swin"),
        (swin, lambda: {"teacher": resnet().state_dict()}, r"seems to be a ResNet"),
        (swin, lambda: {"state_dict_ema": {"tokens_to_token.attention1.kqv.weight": torch.zeros(2, 2)}}, "a T2T-ViT"),
        (resnet, lambda: {"a.weight": torch.zeros(3)}, r"a network of an unknown kind"),
    ],
)
def test_wrong_architecture_is_named(target, state, message: str):
    model = target()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message) as caught:
        load_weights(model, state())
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "left untouched"


def test_dictionary_without_a_network():
    with pytest.raises(UserError, match="its keys: epoch, lr"):
        load_weights(swin(), {"epoch": 1, "lr": 0.1})


NAME = "layers.0.blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to(torch.int8), "int8"),
        (lambda t: t.to(torch.complex64), "real"),
        (lambda t: t.to_sparse(), "dense"),
        (lambda t: t.index_fill(0, torch.tensor([0]), float("inf")), "non-finite"),
    ],
)
def test_other_numbers_than_floats_are_refused(change, message: str):
    target, state = swin(), swin().state_dict()
    before = target.norm.weight.clone()
    with pytest.raises(UserError, match=message) as caught:
        load_weights(target, state | {"norm.weight": before + 1, NAME: change(state[NAME].clone())})
    assert NAME in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(target.norm.weight, before), "left untouched"


def test_tensors_of_other_shapes_are_left_over():
    state = swin().state_dict() | {"head.weight": torch.tensor(1.0)}
    report = load_weights(swin(), {name: tensor for name, tensor in state.items() if "head.fc" not in name})
    assert report.unexpected == ["head.weight"] and len(report.missing) == 2


def test_two_classifiers_of_a_distilled_network():
    keywords = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    source = timm.create_model("deit_tiny_distilled_patch16_224", **keywords)
    target = timm.create_model("deit_tiny_distilled_patch16_224", **keywords)
    before = target.head_dist.weight.clone()
    report = load_weights(target, {"model": source.state_dict()}, classifier=False)
    assert torch.equal(target.head_dist.weight, before), "both classifiers are left out"
    assert report.left_over == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    assert report.notes == ["classifier of 10 classes left out"]
    assert not load_weights(target, {"model": source.state_dict()}).missing
    assert torch.equal(target.head.weight, source.head.weight)
    assert torch.equal(target.head_dist.weight, source.head_dist.weight)
    single = timm.create_model("deit_tiny_patch16_224", **keywords)
    report = load_weights(single, {"model": source.state_dict()})
    assert torch.equal(single.head.weight, source.head.weight), "the second does not replace the first"
    assert {"head_dist.weight", "head_dist.bias"} <= set(report.left_over)


def test_checkpoints_and_folders_of_runs(tmp_path: Path):
    torch.manual_seed(1)
    source = swin()
    plain = {f"backbone.model.{name}": tensor + 1 for name, tensor in source.state_dict().items()}
    average = {f"average.model.{name}": tensor for name, tensor in source.state_dict().items()}
    others = {"localization.mlp.0.weight": torch.zeros(2, 2)}
    checkpoint = {"step": 3, "task": plain | average | others, "optimizer": {"state": {}}}
    torch.manual_seed(2)
    target = swin()
    report = load_weights(target, save(checkpoint, tmp_path), strict=True)
    assert same(source, target), "the EMA has priority"
    assert (report.kind, report.missing, report.unexpected) == ("frugalvit", [], [])
    load_weights(target, {"step": 3, "task": plain | others})
    assert torch.equal(target.norm.weight, source.norm.weight + 1)

    for folder in (tmp_path / "model", tmp_path):
        (tmp_path / "model").mkdir(exist_ok=True)
        save_file(source.state_dict(), tmp_path / "model" / "model.safetensors", metadata={"frugalvit": "0.1.0"})
        target = swin()
        assert load_weights(target, folder).kind == "frugalvit"
        assert same(source, target)
