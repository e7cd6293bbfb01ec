"""Mixup and cutmix against loops and timm's distributions."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target

from frugalvit.config.data import MixingConfig
from frugalvit.data.augmentation.mixup import Blend, Mixing, soft_targets


def batch(count: int, size: int = 8, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, size, size, generator=generator)
    return images, torch.randint(0, classes, (count,), generator=generator)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("blend", [Blend(0.3), Blend(0.75, (2, 6, 1, 5)), Blend(1.0)])
def test_equals_the_loop(count: int, blend: Blend) -> None:
    images, labels = batch(count)
    before = images.clone()
    mixing = Mixing(MixingConfig(smoothing=0.1), 5)
    mixed, targets = mixing.apply(images, labels, blend)
    assert torch.equal(images, before), "the originals stay available"
    for i in range(count):
        j = i ^ 1 if (i ^ 1) < count else 0
        if blend.box is None:
            expected = blend.share * images[i] + (1 - blend.share) * images[j]
        else:
            top, bottom, left, right = blend.box
            expected = images[i].clone()
            expected[:, top:bottom, left:right] = images[j, :, top:bottom, left:right]
        torch.testing.assert_close(mixed[i], expected)
        own, other = ([0.92 if k == labels[row] else 0.02 for k in range(5)] for row in (i, j))
        expected_target = blend.share * torch.tensor(own) + (1 - blend.share) * torch.tensor(other)
        torch.testing.assert_close(targets[i], expected_target)
    torch.testing.assert_close(targets.sum(1), torch.ones(count))


def test_targets_equal_timms() -> None:
    labels = torch.tensor([3, 1])
    expected = mixup_target(labels, 4, lam=0.3, smoothing=0.1)  # timm's partner in a batch of two is the neighbour too
    _, targets = Mixing(MixingConfig(smoothing=0.1), 4).apply(torch.zeros(2, 3, 4, 4), labels, Blend(0.3))
    torch.testing.assert_close(targets, expected)
    torch.testing.assert_close(soft_targets(labels, 4), torch.nn.functional.one_hot(labels, 4).float())


def test_halves_mix_within_themselves() -> None:
    images, labels = batch(8)
    mixing, blend = Mixing(MixingConfig(), 5), Blend(0.6)
    full, targets = mixing.apply(images, labels, blend)
    for part in (slice(0, 4), slice(4, 8)):
        mixed, soft = mixing.apply(images[part], labels[part], blend)
        assert torch.equal(mixed, full[part]) and torch.equal(soft, targets[part])


def draws(config: MixingConfig, count: int = 2000, size: tuple[int, int] = (32, 48)) -> list[Blend]:
    generator = torch.Generator().manual_seed(0)
    mixing = Mixing(config, 10)
    return [mixing.draw(size, generator) for _ in range(count)]


def test_blend_distribution_is_timms() -> None:
    ours = draws(MixingConfig())
    cutmix = [blend.share for blend in ours if blend.box is not None]
    mixup = [blend.share for blend in ours if blend.box is None]
    assert len(cutmix) == pytest.approx(1000, abs=80)
    state = np.random.get_state()  # noqa: NPY002 - timm draws from numpy's global state
    np.random.seed(0)  # noqa: NPY002
    try:
        theirs_mixup, theirs_cutmix = [], []
        mixer = Mixup(0.8, 1.0, switch_prob=0.5, num_classes=10)
        for _ in range(2000):
            lam, use_cutmix = mixer._params_per_batch()
            if use_cutmix:
                theirs_cutmix.append(cutmix_bbox_and_lam((2, 1, 32, 48), lam)[1])
            else:
                theirs_mixup.append(lam)
    finally:
        np.random.set_state(state)  # noqa: NPY002
    assert ks_2samp(mixup, theirs_mixup).pvalue > 1e-3
    assert ks_2samp(cutmix, theirs_cutmix).pvalue > 1e-3


def test_switches() -> None:
    assert all(blend == Blend(1.0) for blend in draws(MixingConfig(prob=0.0), 50))
    assert all(blend == Blend(1.0) for blend in draws(MixingConfig(mixup=0, cutmix=0), 50))
    assert all(blend.box is None for blend in draws(MixingConfig(cutmix=0), 50))
    assert all(blend.box is not None for blend in draws(MixingConfig(mixup=0), 50))
    cut = sum(blend.box is not None for blend in draws(MixingConfig(switch_prob=0.2)))
    assert cut == pytest.approx(400, abs=70)
    mixed = sum(blend.share < 1 for blend in draws(MixingConfig(prob=0.4, cutmix=0)))
    assert mixed == pytest.approx(800, abs=90)


def test_box_area_is_the_partners_share() -> None:
    for blend in draws(MixingConfig(mixup=0), 200):
        assert blend.box is not None
        top, bottom, left, right = blend.box
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 48
        assert blend.share == pytest.approx(1 - (bottom - top) * (right - left) / (32 * 48))
