"""The store: decoding, what is left out, where it is kept, the shared file, and the worker path."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.config.data import AugmentConfig
from frugalvit.data import image_size
from frugalvit.data.augment.transforms import EvalTransform, TrainAugment
from frugalvit.data.cache import build, file_format
from frugalvit.data.cache.build import build_store, choose_cache_location, threads_for
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.dataset import ArrayExamples, FileExamples
from frugalvit.data.image_size import probe_images
from frugalvit.data.loader import Batches, eval_batches
from frugalvit.errors import UserError
from helpers.image_cache import no_decoding, only_file, store_of, write_images


def arrays(examples: FileExamples) -> torch.Tensor:
    return torch.stack([torch.tensor(examples.read(i)).permute(2, 0, 1) for i in range(len(examples))])


@pytest.mark.parametrize(
    ("seconds", "cores", "threads", "abreast"), [(0.0002, 16, 4, 0.5), (0.0002, 1, 1, 0.5), (0.005, 16, 16, 16)]
)
def test_few_threads_decode_small_images(seconds: float, cores: int, threads: int, abreast: float) -> None:
    assert threads_for(seconds, cores) == (threads, abreast)


@pytest.mark.parametrize("workers", [0, 7])
def test_processes_that_decode_are_as_many_as_asked_for(workers: int, tmp_path: Path) -> None:
    """Images as small as these are quick to decode; that is no reason for fewer processes, which share no lock."""
    store = build_store(write_images(tmp_path), 32, where="off", workers=workers)
    assert isinstance(store, OnDemandStore) and store.workers == workers


def test_auto_decodes_with_the_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cores", lambda: 3)
    store = build_store(write_images(tmp_path), 32, where="off")
    assert isinstance(store, OnDemandStore) and store.workers == 3


@pytest.mark.parametrize(("workers", "batches"), [(2, 5), (96, 105)])
def test_processes_do_not_decode_far_ahead(workers: int, batches: int, tmp_path: Path) -> None:
    """Each has a batch to work on; beyond that few lie ready, for every one takes memory."""
    store = lazy(write_images(tmp_path), workers=workers)
    given: list[list[int]] = []

    def submit(_: object, positions: list[int]) -> Future[Any]:
        given.append(positions)
        done: Future[Any] = Future()
        done.set_result(store.decoder(positions))
        return done

    store._pool = SimpleNamespace(submit=submit)  # type: ignore[assignment]
    store.fetcher(lambda _: torch.arange(1)).at(0)
    assert len(given) == batches


@pytest.mark.parametrize("where", ["ram", "disk", "device", "auto"])
def test_images_of_one_size_are_stored_as_they_are(where: str, tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", size=(40, 30))
    store = store_of(examples, where=where, cache_dir=tmp_path / "cache")
    assert torch.equal(store.images, arrays(examples))
    assert store.sizes.tolist() == [[40, 30]] * 6 and store.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert store.names == examples.names and store.bad == []


def test_larger_images_are_squeezed(tmp_path: Path) -> None:
    examples = write_images(tmp_path, size=(300, 400))
    store = store_of(examples, 56)
    assert store.images.shape == (6, 3, 64, 85) and store.sizes.tolist() == [[300, 400]] * 6
    theirs = Image.fromarray(examples.read(0)).resize((85, 64), Image.Resampling.BICUBIC)
    difference = store.images[0].permute(1, 2, 0).int() - torch.from_numpy(np.array(theirs)).int()
    assert difference.abs().float().mean() < 2


def test_the_rectangle_follows_the_images(tmp_path: Path) -> None:
    landscape = write_images(tmp_path / "a", size=(300, 400))
    portrait = write_images(tmp_path / "b", size=(400, 300))
    small = write_images(tmp_path / "c", size=(20, 20))
    assert probe_images(landscape, (224, 224))[0] == (256, 341)
    assert probe_images(portrait, (224, 224))[0] == (341, 256)
    assert probe_images(small, (224, 224))[0] == (20, 20)
    assert probe_images(landscape, (224, 224), stored=128)[0] == (128, 171)
    both = FileExamples(landscape.names[:5] + portrait.names[:1], None)
    assert probe_images(both, (224, 224))[0] == (341, 341)  # one in six stands upright, and keeps its height
    wide = write_images(tmp_path / "d", size=(50, 600))
    assert probe_images(FileExamples(landscape.names[:5] + wide.names[:1], None), (28, 28))[0] == (32, 64)
    mixed = FileExamples(landscape.names[:2] + small.names[:2] + portrait.names[:2], None)
    assert store_of(mixed, 28).sizes.tolist() == [[300, 400]] * 2 + [[20, 20]] * 2 + [[400, 300]] * 2


def test_arrays_need_no_decoding() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    store = store_of(ArrayExamples(pixels, np.arange(5), "digits"), 28)
    assert torch.equal(store.images, torch.from_numpy(pixels)[:, None].expand(5, 3, 28, 28))


def test_bad_images_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = write_images(tmp_path, count=10, bad=(0, 4, 9))
    store = store_of(examples, max_bad=0.3)
    good = [1, 2, 3, 5, 6, 7, 8]
    assert store.kept.tolist() == good and (len(store), store.readable) == (10, 7)
    assert torch.equal(store.images, arrays(examples.subset(good)))
    assert store.labels.tolist() == [i % 3 for i in range(10)] and store.names == examples.names
    fetched = store.fetcher(lambda _: torch.arange(10)).at(0)
    assert fetched.index.tolist() == [3, 1, 2, 3, 7, 5, 6, 7, 8, 3], "others of their class stand in for them"
    assert torch.equal(fetched.images, arrays(examples.subset(fetched.index.numpy())))
    assert [Path(name).name for name, _ in store.bad] == ["000.png", "004.png", "009.png"]
    assert "004.png" in capsys.readouterr().err


def test_too_many_bad_images_stop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"3 of 10 images cannot be read.*000\.png"):
        build_store(write_images(tmp_path / "a", count=10, bad=(0, 4, 9)), 32, max_bad=0.2)
    with pytest.raises(UserError, match="None of"):
        build_store(write_images(tmp_path / "b", count=3, bad=(0, 1, 2)), 32, max_bad=1.0)
    with pytest.raises(UserError, match="cannot be read"):
        build_store(write_images(tmp_path / "c", count=3, bad=(1,)), 32, max_bad=0.0)
    assert build_store(write_images(tmp_path / "d", count=3, bad=(1,)), 32).readable == 2, "one is always allowed"
    with pytest.raises(UserError, match="no images"):
        build_store(FileExamples([], None), 32)


def test_auto_takes_the_fastest_place_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_choice_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_store(write_images(tmp_path), 32)
    assert "cache: auto: 6 images as 40 x 30 uint8, 0.0 MB, in RAM" in capsys.readouterr().err


# The shared file


def test_the_file_is_read_again_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = write_images(tmp_path / "photos", count=8, bad=(3,))
    first = store_of(examples, where="disk", cache_dir=tmp_path / "cache", max_bad=0.2)
    monkeypatch.setattr(build, "decode_all", no_decoding)
    for where in ("disk", "ram"):
        monkeypatch.setattr(build, "_WORTH_WRITING", -1.0)  # as if decoding took long: RAM fills from the file too
        again = store_of(examples, where=where, cache_dir=tmp_path / "cache", max_bad=0.2)
        assert torch.equal(again.images, first.images) and again.bad == first.bad
        assert torch.equal(again.sizes, first.sizes) and torch.equal(again.kept, first.kept)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_changed_source_is_decoded_anew(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos")
    store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    Image.new("RGB", (30, 40), (9, 9, 9)).save(examples.names[2])
    os.utime(examples.names[2], (1, 1))
    store = store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    assert (store.images[2] == 9).all()


@pytest.mark.parametrize("damage", ["header", "pixels", "short", "long", "magic", "tables", "empty", "huge"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = write_images(tmp_path / "photos")
    good = store_of(examples, where="disk", cache_dir=tmp_path / "cache").images.clone()
    path = only_file(tmp_path / "cache")
    content = bytearray(path.read_bytes())
    place = {"header": 40, "pixels": len(content) - 5, "magic": 2, "tables": 600}.get(damage)
    if damage == "tables":
        place = content.index(b"}") + 5
    if place is not None:
        content[place] ^= 0xFF
    content = {"short": content[:-7], "long": content + b"x", "empty": bytearray()}.get(damage, content)
    if damage == "huge":
        content[8:16] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(content)
    again = store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    assert torch.equal(again.images, good)
    assert "damaged" in capsys.readouterr().err


def test_large_files_are_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "_WHOLE", 1000)
    monkeypatch.setattr(file_format, "_PIECE", 500)
    examples = write_images(tmp_path / "photos")
    images = store_of(examples, where="disk", cache_dir=tmp_path / "cache").images
    found = file_format.open_file(only_file(tmp_path / "cache"), examples.fingerprint())
    assert found is not None and torch.equal(found.images, images)


def test_another_fingerprint_is_not_taken(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos")
    store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    assert file_format.open_file(only_file(tmp_path / "cache"), "another") is None


def test_a_killed_writer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = write_images(tmp_path / "photos")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "decode_all", dies)
        with pytest.raises(KeyboardInterrupt):
            build_store(examples, 32, where="disk", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin")) and not list((tmp_path / "cache").rglob("*.part"))
    assert len(store_of(examples, where="disk", cache_dir=tmp_path / "cache")) == 6


def test_two_writers_decode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock is per open file, so two threads exclude each other as two processes do."""
    examples = write_images(tmp_path / "photos")
    decoded = []
    real = build.decode_all

    def slow(*arguments: Any) -> Any:
        decoded.append(1)
        threading.Event().wait(0.3)
        return real(*arguments)

    monkeypatch.setattr(build, "decode_all", slow)
    stores: list[ImageStore] = []
    work = [
        threading.Thread(target=lambda: stores.append(store_of(examples, where="disk", cache_dir=tmp_path / "cache")))
        for _ in range(3)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(30)
    assert len(stores) == 3 and len(decoded) == 1
    assert all(torch.equal(store.images, stores[0].images) for store in stores)


def test_a_lock_nobody_works_under_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = write_images(tmp_path / "photos")
    monkeypatch.setattr(build, "_PATIENCE", 0.3)

    class Refused:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> None:
            raise UserError("locks are not supported here")

    monkeypatch.setattr(build, "FolderLock", Refused)
    assert len(store_of(examples, where="disk", cache_dir=tmp_path / "cache")) == 6


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_folder_without_permission_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(UserError, match="cache"):
        build_store(write_images(tmp_path / "photos"), 32, where="disk", cache_dir=tmp_path / "cache")


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(UserError, match="cache folder"):
        build_store(write_images(tmp_path / "photos"), 32, where="disk", cache_dir=tmp_path / "cache")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_format, "_reserve", full)
    with pytest.raises(UserError, match="No space left"):
        build_store(write_images(tmp_path / "photos"), 32, where="disk", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.part"))


# Not kept at all: workers decode


def batches(store: Any, seed: int = 0) -> Batches:
    return Batches(store, 4, seed=seed, augment=TrainAugment(AugmentConfig(), 36))


def lazy(examples: FileExamples, workers: int = 0, **keywords: Any) -> OnDemandStore:
    store = build_store(examples, 36, where="off", workers=workers, **keywords)
    assert isinstance(store, OnDemandStore)
    return store


def test_workers_give_what_the_cache_gives(tmp_path: Path) -> None:
    examples = write_images(tmp_path, count=10, size=(90, 70))
    kept, streamed = batches(store_of(examples, 36)), batches(lazy(examples))
    for step in (0, 1, 2, 7, 3):
        mine, other = streamed.batch_at(step), kept.batch_at(step)
        assert torch.equal(mine.images, other.images) and torch.equal(mine.targets, other.targets)
    transform = EvalTransform(36)
    rounds = list(eval_batches(lazy(examples), transform, 4))
    assert torch.cat([index for _, _, index in rounds]).tolist() == list(range(10))


def test_lazy_stores_replace_bad_images(tmp_path: Path) -> None:
    """In training the next of its class stands in for an unreadable image; an evaluation leaves it out."""
    examples = write_images(tmp_path / "a", count=6, bad=(2,))
    store = lazy(examples, max_bad=0.2)
    assert store.fetcher(lambda _: torch.arange(6)).at(0).index.tolist() == [0, 1, 5, 3, 4, 5]
    assert [Path(name).name for name, _ in store.bad] == ["002.png"]
    rounds = list(eval_batches(store, EvalTransform(36), 3))
    assert [index.tolist() for _, _, index in rounds] == [[0, 1], [3, 4, 5]]
    kept = list(eval_batches(store_of(examples, 36, max_bad=0.2), EvalTransform(36), 6))
    assert torch.equal(torch.cat([images for images, _, _ in rounds]), kept[0][0])
    assert torch.cat([labels for _, labels, _ in rounds if labels is not None]).tolist() == kept[0][1].tolist()
    alone = lazy(write_images(tmp_path / "c", count=6, bad=(2,)), max_bad=0.2)
    assert [index.tolist() for _, _, index in eval_batches(alone, EvalTransform(36), 1)] == [[0], [1], [3], [4], [5]]
    with pytest.raises(UserError, match="cannot be read"):
        next(
            iter(
                eval_batches(
                    lazy(write_images(tmp_path / "b", count=6, bad=(1, 2, 3)), max_bad=0.2), EvalTransform(36), 6
                )
            )
        )


def test_spawned_workers_and_a_killed_one(tmp_path: Path) -> None:
    examples = write_images(tmp_path, count=12)
    streamed = batches(lazy(examples, workers=1))
    kept = batches(store_of(examples, 36))
    for step in (0, 1, 5):
        assert torch.equal(streamed.batch_at(step).images, kept.batch_at(step).images)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="was killed"):
        [streamed.batch_at(step) for step in range(6, 60)]


def test_evaluations_share_their_workers(tmp_path: Path) -> None:
    """Starting processes takes seconds: every further round over the same images finds them waiting."""
    store = lazy(write_images(tmp_path), workers=1)
    rounds = [[index.tolist() for _, _, index in eval_batches(store, EvalTransform(36), 4)] for _ in range(2)]
    assert rounds[0] == rounds[1] and len(store.pool()._processes) == 1
    store.close()


def test_photographs_that_are_kept_each_for_itself_have_few_shapes() -> None:
    """So that a GPU prepares many of them at once; small images stay as they are."""
    target = (256, 256)
    sizes = [(600 + 7 * number, 1000 + 13 * number) for number in range(100)]
    shapes = {image_size.cached_size_alone(size, target) for size in sizes}
    assert len(shapes) <= 6 and all(min(shape) >= 256 and max(shape) <= 512 for shape in shapes)
    assert image_size.cached_size_alone((28, 30), target) == (28, 30)
