"""Decode once, keep as uint8: on the device, in RAM, or mapped from a file that later runs and other processes share.

``build_store`` decides where ("auto" by size and free memory, said in one line), decodes in threads and leaves
unreadable images out by name. What a run learns from, and in which order, is the same at every place. Images whose
decoding takes long are written to the cache folder under the examples' fingerprint, so a changed source is decoded anew
and an unchanged one never again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.cache import file_format
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.dataset import ArrayExamples, ImageDataset
from frugalvit.data.decode import UnreadableImage, almost_black
from frugalvit.data.image_size import min_cached_size, probe_images, resize_to
from frugalvit.data.paths import cache_root, local
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import CannotLock, FolderLock, remove_parts
from frugalvit.utils.system import available_memory, cores, processes_here

Where = Literal["auto", "device", "ram", "disk", "off"]
CACHE_LOCATIONS: tuple[Where, ...] = ("device", "ram", "disk", "off")  # the fastest first
_WORTH_WRITING = 8.0  # seconds of decoding that later runs are spared
_DEVICE_SHARE, _RAM_SHARE = 0.4, 0.5
_PATIENCE = 30.0  # seconds to wait for a lock without seeing its holder write


def build_store(
    examples: ImageDataset,
    size: int | tuple[int, int],
    *,
    device: torch.device | str = "cpu",
    where: Where = "auto",
    stored: int | Literal["auto"] = "auto",
    cache_dir: str | Path | None = None,
    max_bad: float = 0.05,
    workers: int | Literal["auto"] = "auto",
    agree: Callable[[Where], Where] = lambda place: place,
) -> ImageStore | OnDemandStore:
    """Decode ``examples`` for inputs of ``size`` (height, width) and keep them where they serve ``device`` best.

    Args:
        examples: encoded images: of folders, tables, shards or memory.
        size: pixels of a network's input: one side, or height and width.
        device: what the batches are for; the images themselves lie there if ``where`` says so.
        where: "auto" takes the device if the images fill less than 40 % of its free memory, else RAM (50 %), else a
            mapped file, else decodes in worker processes ("off") while training.
        stored: shorter side of a stored image; "auto" is 256/224 of the input, or the native size where all images
            have the same, not much larger one.
        cache_dir: default ~/.cache/frugalvit, or FRUGALVIT_CACHE.
        max_bad: share of unreadable images (at least one) that are left out before it is an error; with "off" they
            are met, and counted, while training.
        workers: decoding threads at most (processes for "off"); auto: one for each core of this process.
        agree: what "auto" comes to where several processes have chosen, each for itself.
    """
    if len(examples) == 0:
        raise UserError("There are no images to load.")
    device = torch.device(device)
    workers = cores() if workers == "auto" else workers
    size = (size, size) if isinstance(size, int) else size
    packed = packed_images(examples, size, stored)
    if packed is not None:
        rectangle, seconds = (packed.images.shape[-2], packed.images.shape[-1]), 0.0
    else:
        rectangle, seconds = probe_images(examples, size, stored)
    threads, abreast = threads_for(seconds, max(1, workers))
    seconds *= len(examples) / abreast
    volume = len(examples) * 3 * rectangle[0] * rectangle[1]
    folder = local(cache_dir) if cache_dir else cache_root()
    place = agree(choose_cache_location(volume, device, folder)) if where == "auto" else where
    if place == "device" and device.type == "cpu":
        place = "ram"
    _say_choice(place, volume, len(examples), rectangle, where)
    limit = int(max_bad * len(examples)) if max_bad * len(examples) >= 1 else int(max_bad > 0)
    if place == "off":
        return OnDemandStore(examples, rectangle, device, workers, limit)

    if packed is not None:
        packed = packed if examples.split_rows is None else _these_rows(packed, examples)
        check_bad(packed.bad, limit, len(examples))
    if packed is not None and (place != "disk" or packed.mapped):
        found = packed
    elif place == "disk" or (seconds > _WORTH_WRITING and _writable(folder, volume)):
        try:
            found = _through_file(examples, rectangle, folder, threads, limit, packed)
        except file_format.CacheWriteError as error:
            if place == "disk":
                raise
            console.warning(f"{error} Decoding for this run alone.")
            found = _in_memory(examples, rectangle, threads, limit)
    else:
        found = _in_memory(examples, rectangle, threads, limit)
    return _as_store(examples, found, place, device)


def _in_memory(examples: ImageDataset, rectangle: tuple[int, int], threads: int, limit: int) -> file_format.Decoded:
    images = torch.empty((len(examples), 3, *rectangle), dtype=torch.uint8)
    return file_format.Decoded(images, *decode_all(examples, rectangle, images, threads, limit))


def packed_images(
    examples: ImageDataset, size: tuple[int, int], stored: int | Literal["auto"] = "auto"
) -> file_format.Decoded | None:
    """The decoded images that came with a packed dataset, where there are some for inputs of ``size``.

    Those of the whole split, of which ``examples`` may be a part.
    """
    if examples.decoded is None:
        return None
    paths = examples.decoded.for_input(min_cached_size(size, stored))
    for path in paths:
        found = file_format.open_file(path, examples.decoded.fingerprint)
        if found is not None and examples.split_rows is None and int(found.kept[-1]) >= len(examples):
            console.warning(f"{path} holds more images than the shards: decoding anew")
            continue
        if found is not None:
            console.info(f"decoded images came with the dataset: {path}")
            return found
    what = "other shards" if paths else "other sizes"
    console.info(f"the decoded images beside the shards are of {what}: decoding anew")
    return None


def _these_rows(found: file_format.Decoded, examples: ImageDataset) -> file_format.Decoded:
    """A part of the decoded images, copied into memory."""
    assert examples.split_rows is not None
    rows = torch.from_numpy(examples.split_rows)
    row_of = torch.full((max(int(rows.max()), int(found.kept.max())) + 1,), -1)
    row_of[found.kept] = torch.arange(len(found.kept))
    there = row_of[rows]
    kept = (there >= 0).nonzero()[:, 0]
    reasons = dict(found.bad)
    gone = [examples.names[i] for i in (there < 0).nonzero()[:, 0].tolist()]
    bad = [(name, reasons.get(name, "unreadable when it was packed")) for name in gone]
    if not len(kept):
        raise UserError(f"None of the {len(examples)} images can be read; the first: {': '.join(bad[0])}.")
    return file_format.Decoded(found.images[there[kept]], found.sizes[there[kept]], kept, bad)


def choose_cache_location(volume: int, device: torch.device, folder: Path) -> Where:
    """Where ``volume`` bytes go: the fastest place with room to spare."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if volume < _DEVICE_SHARE * free:
            return "device"
    if volume < _RAM_SHARE * memory_share():
        return "ram"
    return "disk" if _writable(folder, volume) else "off"


def memory_share() -> int:
    """Bytes of RAM that this process may take, where each of several here holds its own copy of the images."""
    return available_memory() // processes_here()


def _writable(folder: Path, volume: int) -> bool:
    """Whether the cache folder can take the images and leave a tenth of the disk free."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is None or not os.access(existing, os.W_OK):
        return False
    usage = shutil.disk_usage(existing)
    return volume < usage.free - 0.1 * usage.total


def _through_file(
    examples: ImageDataset,
    rectangle: tuple[int, int],
    folder: Path,
    threads: int,
    limit: int,
    packed: file_format.Decoded | None = None,
) -> file_format.Decoded:
    """The images from the cache file, decoded into it first where it is missing, damaged or of another source.

    With ``packed`` they are decoded already and only copied. A whole file is taken without the lock: its entry may
    belong to another person, who lets us read it and no more.
    """
    fingerprint = examples.fingerprint()
    place = folder / "images" / f"{fingerprint}_{rectangle[0]}x{rectangle[1]}"
    path = place / "images.bin"
    looked_at = _mark_of(path)
    if looked_at is not None and (found := _found(path, fingerprint, limit)) is not None:
        return found
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_format.CacheWriteError(
            f"The cache folder {folder} cannot be written ({error.strerror}); see --cache.folder."
        ) from None
    with _alone_in(place):
        if _mark_of(path) != looked_at and (found := _found(path, fingerprint, limit)) is not None:
            return found

        def fill(images: Tensor) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
            if packed is not None:
                images[: len(packed.kept)] = packed.images
                return packed.sizes, packed.kept, packed.bad
            return decode_all(examples, rectangle, images, threads, limit)

        file_format.write_file(path, fingerprint, (len(examples), 3, *rectangle), fill)
        found = file_format.open_file(path, fingerprint)
    if found is None:
        raise UserError(f"The cache file {path} cannot be read back; the disk may be failing. Try --cache.where ram.")
    console.info(f"decoded images kept for later runs in {place}")
    return found


def _found(path: Path, fingerprint: str, limit: int) -> file_format.Decoded | None:
    found = file_format.open_file(path, fingerprint)
    if found is None or len(found.bad) > limit:
        return None
    console.info(f"decoded images found in {path.parent}")
    return found


def _mark_of(path: Path) -> tuple[int, int] | None:
    """What changes when another file takes the place of this one; None where there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


@contextlib.contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    """Hold the entry's lock; wait while another process decodes into it.

    A lock that nobody works under (file systems without locks) is ignored after a while, and one that may not be
    touched at once: writing is atomic anyway.
    """
    lock, quiet_since = FolderLock(place), time.monotonic()
    parts = _parts_in(place)
    said = held = False
    while not held and time.monotonic() - quiet_since < _PATIENCE:
        try:
            lock.__enter__()
            held = True
        except CannotLock:
            break
        except UserError:
            before, parts = parts, _parts_in(place)
            if parts - before:  # a part that stays as it is was left by a killed process
                quiet_since = time.monotonic()
            if not said:
                console.info("another process is decoding these images; waiting for it")
                said = True
            time.sleep(0.1)
    try:
        if held:
            with contextlib.suppress(OSError):  # another person's
                remove_parts(place)
        yield
    finally:
        if held:
            lock.__exit__(None, None, None)


def _parts_in(place: Path) -> set[tuple[Path, int]]:
    """Half-written files with the time somebody last worked on them."""
    found = set()
    for part in place.glob(".*.part"):
        with contextlib.suppress(OSError):  # finished in this moment
            found.add((part, part.stat().st_mtime_ns))
    return found


def _as_store(examples: ImageDataset, found: file_format.Decoded, place: str, device: torch.device) -> ImageStore:
    kept = found.kept
    images = found.images[: len(kept)]
    if place == "device":
        images = _to_device(images, device)
    elif place == "ram" and found.mapped:
        images = images.clone()
    labels = None if examples.labels is None else torch.from_numpy(examples.labels)
    for name, reason in found.bad[:20]:
        console.warning(f"left out: {name}: {reason}")
    if len(found.bad) > 20:
        console.warning(f"left out: {len(found.bad) - 20} further unreadable images")
    if len(images) and (dark := almost_black(int(images[:: max(1, len(images) // 256)].max()))):
        console.warning(f"{examples.names[int(kept[0])]} and those beside it: {dark}")
    return ImageStore(images, found.sizes, labels, examples.names, kept, device, place, found.bad)


def _to_device(images: Tensor, device: torch.device, block: int = 1024) -> Tensor:
    """In blocks, so that no second copy of everything is ever pinned."""
    there = torch.empty(images.shape, dtype=torch.uint8, device=device)
    for start in range(0, len(images), block):
        there[start : start + block].copy_(images[start : start + block])
    return there


def _say_choice(place: str, volume: int, count: int, rectangle: tuple[int, int], where: str) -> None:
    words = {
        "device": "on the device",
        "ram": "in RAM",
        "disk": "in a file mapped into memory",
        "off": "nowhere: workers decode them while training",
    }
    reason = "auto: " if where == "auto" else ""
    size = f"{volume / 1e9:.2f} GB" if volume >= 1e8 else f"{volume / 1e6:.1f} MB"
    console.info(f"cache: {reason}{count} images as {rectangle[0]} x {rectangle[1]} uint8, {size}, {words[place]}")


QUICK = 0.001
"""Seconds of an image below which most of its decoding is Python, which runs one thread at a time."""


def threads_for(seconds: float, threads: int) -> tuple[int, float]:
    """Threads to decode images of so many seconds with, and how many of them get on at a time.

    Of small images (CIFAR's take 0.2 ms) two cores decoded 3,500 a second in one thread, 5,300 in four, 4,300 in
    sixteen; sixteen cores with as many threads no more than 2,000 and with four 2,400: threads that wait for each
    other get on like half of one.
    """
    return (min(4, threads), 0.5) if seconds < QUICK else (threads, threads)


def decode_all(
    examples: ImageDataset, rectangle: tuple[int, int], images: Tensor, threads: int, limit: int
) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """Decode into ``images`` (N, 3, S, S'), good ones moved to the front; (sizes, kept positions, bad ones)."""
    if isinstance(examples, ArrayExamples) and examples.images.shape[1:3] == rectangle:
        pixels = torch.from_numpy(np.ascontiguousarray(examples.images))
        images.copy_(pixels.view(len(examples), *rectangle, -1).permute(0, 3, 1, 2))  # grey spreads over three channels
        return torch.tensor([rectangle]).repeat(len(examples), 1), torch.arange(len(examples)), []

    def one(i: int) -> tuple[int, int] | UnreadableImage:
        try:
            pixels = examples.read(i, at_least=rectangle)
        except UnreadableImage as error:
            return error
        images[i] = torch.from_numpy(resize_to(pixels, rectangle)).permute(2, 0, 1)
        return pixels.shape[0], pixels.shape[1]

    sizes, kept, bad = [], [], []
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        results = (result for block in _blocks(len(examples)) for result in pool.map(one, block))
        for i, result in enumerate(console.progress(results, total=len(examples), label="decoding")):
            if isinstance(result, UnreadableImage):
                bad.append((result.name, result.reason))
                check_bad(bad, limit, len(examples))
                continue
            if len(kept) != i:
                images[len(kept)] = images[i]
            kept.append(i)
            sizes.append(result)
    if not kept:
        raise UserError(f"None of the {len(examples)} images can be read; the first: {bad[0][0]}: {bad[0][1]}.")
    return torch.tensor(sizes), torch.tensor(kept), bad


def _blocks(count: int, length: int = 1024) -> list[range]:
    return [range(start, min(start + length, count)) for start in range(0, count, length)]


def check_bad(bad: list[tuple[str, str]], limit: int, count: int) -> None:
    if len(bad) > limit:
        shown = "; ".join(f"{name}: {reason}" for name, reason in bad[:3])
        raise UserError(
            f"{len(bad)} of {count} images cannot be read, more than --cache.max-bad allows: {shown}. "
            "Mend or remove them ('frugalvit data' lists them all)."
        )
