"""Building the store: decoding, the cached size, unreadable images, and the location."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.data.cache import build
from frugalvit.data.cache.build import build_store, choose_cache_location
from frugalvit.data.dataset import ArrayExamples, FileExamples
from frugalvit.data.image_size import probe_images
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.errors import UserError
from helpers.image_cache import store_of, write_images


def arrays(examples: FileExamples) -> torch.Tensor:
    return torch.stack([torch.tensor(examples.read(i)).permute(2, 0, 1) for i in range(len(examples))])


@pytest.mark.parametrize("where", ["ram", "disk", "device", "auto"])
def test_images_of_one_size_are_cached_at_it(where: str, tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", size=(40, 30))
    store = store_of(examples, where=where, cache_dir=tmp_path / "cache")
    assert torch.equal(store.images, arrays(examples))
    assert store.sizes.tolist() == [[40, 30]] * 6 and store.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert store.names == examples.names and store.unreadable == []


def test_larger_images_are_resized(tmp_path: Path) -> None:
    examples = write_images(tmp_path, size=(300, 400))
    store = store_of(examples, 56)
    assert store.images.shape == (6, 3, 64, 85) and store.sizes.tolist() == [[300, 400]] * 6
    theirs = Image.fromarray(examples.read(0)).resize((85, 64), Image.Resampling.BICUBIC)
    difference = store.images[0].permute(1, 2, 0).int() - torch.from_numpy(np.array(theirs)).int()
    assert difference.abs().float().mean() < 2


def test_the_cached_size_covers_nine_tenths(tmp_path: Path) -> None:
    landscape = write_images(tmp_path / "a", size=(300, 400))
    portrait = write_images(tmp_path / "b", size=(400, 300))
    small = write_images(tmp_path / "c", size=(20, 20))
    assert probe_images(landscape, (224, 224))[0] == (256, 341)
    assert probe_images(portrait, (224, 224))[0] == (341, 256)
    assert probe_images(small, (224, 224))[0] == (20, 20)
    assert probe_images(landscape, (224, 224), stored=128)[0] == (128, 171)
    both = FileExamples(landscape.names[:5] + portrait.names[:1], None)
    assert probe_images(both, (224, 224))[0] == (341, 341)  # one in six is upright, and keeps its height
    wide = write_images(tmp_path / "d", size=(50, 600))
    assert probe_images(FileExamples(landscape.names[:5] + wide.names[:1], None), (28, 28))[0] == (32, 64)
    mixed = FileExamples(landscape.names[:2] + small.names[:2] + portrait.names[:2], None)
    assert store_of(mixed, 28).sizes.tolist() == [[300, 400]] * 2 + [[20, 20]] * 2 + [[400, 300]] * 2


def test_each_crop_has_its_own_file(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", size=(60, 90))
    crops = [CenterCrop((28, 28)), CenterCrop((28, 28), squash=True), CenterCrop((28, 28), 1.0)]
    for crop in crops:
        store = store_of(examples, 28, where="disk", cache_dir=tmp_path / "cache", crop=crop)
        assert torch.equal(store.images[0], torch.from_numpy(crop(examples.read(0))).permute(2, 0, 1))


def test_arrays_need_no_decoding() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    store = store_of(ArrayExamples(pixels, np.arange(5), "digits"), 28)
    assert torch.equal(store.images, torch.from_numpy(pixels)[:, None].expand(5, 3, 28, 28))


def test_unreadable_images_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = write_images(tmp_path, count=10, bad=(0, 4, 9))
    store = store_of(examples, max_bad=0.3)
    good = [1, 2, 3, 5, 6, 7, 8]
    assert store.index.tolist() == good and (len(store), store.readable) == (10, 7)
    assert torch.equal(store.images, arrays(examples.subset(good)))
    assert store.labels.tolist() == [i % 3 for i in range(10)] and store.names == examples.names
    fetched = store.fetcher(lambda _: torch.arange(10)).at(0)
    assert fetched.index.tolist() == [3, 1, 2, 3, 7, 5, 6, 7, 8, 3], "substitutes of the same class"
    assert torch.equal(fetched.images, arrays(examples.subset(fetched.index.numpy())))
    assert [Path(name).name for name, _ in store.unreadable] == ["000.png", "004.png", "009.png"]
    assert "004.png" in capsys.readouterr().err


def test_too_many_unreadable_images_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"3 of 10 images .*--cache\.max-bad.*000\.png"):
        build_store(write_images(tmp_path / "a", count=10, bad=(0, 4, 9)), 32, max_bad=0.2)
    with pytest.raises(UserError, match="None of"):
        build_store(write_images(tmp_path / "b", count=3, bad=(0, 1, 2)), 32, max_bad=1.0)
    with pytest.raises(UserError, match=r"--cache\.max-bad"):
        build_store(write_images(tmp_path / "c", count=3, bad=(1,)), 32, max_bad=0.0)
    assert build_store(write_images(tmp_path / "d", count=3, bad=(1,)), 32).readable == 2, "one is always allowed"
    with pytest.raises(UserError, match="no images"):
        build_store(FileExamples([], None), 32)


def test_auto_takes_the_fastest_location_with_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(build, "available_memory", lambda: 10_000)
    assert choose_cache_location(300, gpu, tmp_path) == "device"
    assert choose_cache_location(800, gpu, tmp_path) == "ram"
    assert choose_cache_location(4_000, cpu, tmp_path) == "ram"
    assert choose_cache_location(6_000, cpu, tmp_path) == "disk"
    assert choose_cache_location(1 << 60, cpu, tmp_path) == "off"
    assert build.available_memory() == 10_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # each of four processes holds its own copy in RAM, and has its own GPU
    assert choose_cache_location(300, gpu, tmp_path) == "device"
    assert choose_cache_location(1_200, cpu, tmp_path) == "ram"
    assert choose_cache_location(4_000, cpu, tmp_path) == "disk"
