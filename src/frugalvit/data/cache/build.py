"""Decode images once and cache them: on the device, in RAM, or in a shared file.

``build_store`` chooses the location ("auto" by size and free memory), decodes in threads, and names and leaves out
unreadable images. The batches of a run do not depend on the location. If decoding takes long, the images also go into a
file, named by the dataset's fingerprint. Later runs on unchanged data read this file.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.bad_images import UnreadableImage, check_unreadable, read_all
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import (
    CachedImages,
    CachedStore,
    CacheWriteError,
    Fill,
    ImageStore,
    open_file,
    write_file,
)
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import PHOTO
from frugalvit.data.image_size import probe_images
from frugalvit.data.paths import cache_root, local
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import CannotLock, FolderLock, remove_parts
from frugalvit.utils.system import available_memory, cap_workers, processes_here

Location = Literal["auto", "device", "ram", "disk", "off"]
_DESCRIPTIONS: dict[Location, str] = {
    "device": "on the device",
    "ram": "in RAM",
    "disk": "in a mapped file",
    "off": "not cached: workers decode them while training",
}
CACHE_LOCATIONS = tuple(_DESCRIPTIONS)  # the fastest first
_WORTH_WRITING = 8.0  # seconds of decoding that a file saves later runs
_DEVICE_SHARE, _RAM_SHARE = 0.4, 0.5
_MAX_LOGGED = 20  # unreadable images named in the log
_FAST_DECODE = 0.001  # seconds per image below which most of the decoding is Python, one thread at a time


def build_store(
    examples: ImageDataset,
    size: int | tuple[int, int],
    *,
    device: torch.device | str = "cpu",
    where: Location = "auto",
    stored: int | Literal["auto"] = "auto",
    cache_dir: str | Path | None = None,
    max_bad: float = 0.05,
    workers: int | Literal["auto"] = "auto",
    agree: Callable[[Location], Location] = lambda location: location,
    crop: CenterCrop | None = None,
) -> ImageStore:
    """Decode images for inputs of ``size`` and cache them where batches for ``device`` are fastest.

    Args:
        size: pixels of the network's input: one side, or (height, width).
        where: "auto" takes the device if the images fill less than 40 % of its free memory, else RAM (50 %), else a
            mapped file, else "off": worker processes decode while training.
        stored: shorter side of a cached image. "auto": 256/224 of the input, or the size that all images share.
        cache_dir: default ~/.cache/frugalvit, or FRUGALVIT_CACHE.
        max_bad: largest share of unreadable images; one is allowed unless it is 0. "off" counts them while training.
        workers: most decoding threads (processes for "off"); "auto": one per core of this process.
        agree: maps this process's choice for "auto" to the choice of all processes.
        crop: evaluation's crop; the store then holds its results, made from all pixels of the images.
    """
    if len(examples) == 0:
        raise UserError("There are no images to load.")
    device = torch.device(device)
    workers = cap_workers(workers, len(examples))
    size = (size, size) if isinstance(size, int) else size
    cached_size, seconds = probe_images(examples, size, stored, crop)
    threads, speedup = decoding_threads(seconds, max(1, workers))
    channels, dtype = examples.pixels.channels, getattr(torch, examples.pixels.type)
    volume = len(examples) * channels * cached_size[0] * cached_size[1] * dtype.itemsize
    folder = local(cache_dir) if cache_dir else cache_root()
    location = agree(choose_cache_location(volume, device, folder)) if where == "auto" else where
    if location == "device" and device.type == "cpu":
        location = "ram"
    console.info(
        f"cache: {'auto: ' if where == 'auto' else ''}{len(examples)} images as {cached_size[0]} x {cached_size[1]} "
        f"{examples.pixels.type}, {volume / 1e6:,.1f} MB, {_DESCRIPTIONS[location]}"
    )
    limit = int(max_bad * len(examples)) if max_bad * len(examples) >= 1 else int(max_bad > 0)
    if location == "off":
        return OnDemandStore(examples, cached_size, device, workers, limit, crop)
    fill = partial(decode_all, examples, cached_size, threads=threads, limit=limit, crop=crop)
    if location == "disk" or (seconds * len(examples) / speedup > _WORTH_WRITING and _has_space(folder, volume)):
        try:
            cached = _decode_to_file(examples, cached_size, folder, fill, limit, crop)
            return _make_store(examples, cached, location, device)
        except CacheWriteError as error:
            if location == "disk":
                raise
            console.warning(f"{error} Decoding for this run only.")
    images = torch.empty((len(examples), channels, *cached_size), dtype=dtype)
    cached = CachedImages(images, *fill(images))
    return _make_store(examples, cached, location, device)


def choose_cache_location(volume: int, device: torch.device, folder: Path) -> Location:
    """Choose the fastest location with enough space for ``volume`` bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if volume < _DEVICE_SHARE * free:
            return "device"
    if volume < _RAM_SHARE * memory_share():
        return "ram"
    return "disk" if _has_space(folder, volume) else "off"


def memory_share() -> int:
    """Return the bytes of RAM for this process: every process on this machine has its own copy."""
    return available_memory() // processes_here()


def _has_space(folder: Path, volume: int) -> bool:
    """True if the folder is writable and a tenth of the disk stays free."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is None or not os.access(existing, os.W_OK):
        return False
    usage = shutil.disk_usage(existing)
    return volume < usage.free - 0.1 * usage.total


def _decode_to_file(
    examples: ImageDataset, cached_size: tuple[int, int], folder: Path, fill: Fill, limit: int, crop: CenterCrop | None
) -> CachedImages:
    """Open the cache file; decode into it first if it is missing, damaged or made from another source."""
    fingerprint = examples.fingerprint(labels=False)
    kind = "" if crop is None else f"_{crop.interpolation}_{crop.crop_pct:g}{'_squashed' * crop.squash}"
    dtype, channels = examples.pixels
    kind += "" if examples.pixels == PHOTO else f"_{channels}x{dtype}"
    entry = folder / "images" / f"{fingerprint}_{cached_size[0]}x{cached_size[1]}{kind}"
    path = entry / "images.bin"
    try:
        entry.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheWriteError(
            f"Cannot write to the cache folder {folder} ({error.strerror}). Choose another --cache.folder."
        ) from None
    with ExitStack() as stack:
        console.info(f"image cache: {entry} (waits while another process decodes these images)")
        with suppress(CannotLock):  # an entry of another user, or no file locks: writing is atomic
            stack.enter_context(FolderLock(entry, wait=True))
            remove_parts(entry)  # left by killed processes
        cached = open_file(path, fingerprint)
        if cached is None or len(cached.unreadable) > limit:
            write_file(path, fingerprint, (len(examples), channels, *cached_size), fill, dtype)
            cached = open_file(path, fingerprint)
    if cached is None:
        raise UserError(f"Cannot read the cache file {path} back: the disk may be failing. Try --cache.location ram.")
    return cached


def _make_store(examples: ImageDataset, cached: CachedImages, location: Location, device: torch.device) -> CachedStore:
    images = cached.images[: len(cached.index)]
    if location == "device":
        images = images.to(device)
    elif location == "ram" and cached.mapped:
        images = images.clone()
    labels = None if examples.truth is None else torch.from_numpy(examples.truth)
    for name, reason in cached.unreadable[:_MAX_LOGGED]:
        console.warning(f"left out: {name}: {reason}")
    if len(cached.unreadable) > _MAX_LOGGED:
        console.warning(f"left out: {len(cached.unreadable) - _MAX_LOGGED} more unreadable images")
    return CachedStore(images, cached.sizes, labels, examples.names, cached.index, device, cached.unreadable)


def decoding_threads(seconds: float, threads: int) -> tuple[int, float]:
    """Return the threads for images that take ``seconds`` each to decode, and their speedup.

    Small images (CIFAR takes 0.2 ms) on two cores: 3,500 a second in one thread, 5,300 in four, 4,300 in sixteen. On
    sixteen cores: 2,000 a second in sixteen threads, 2,400 in four. More threads than four are slower for them.
    """
    return (min(4, threads), 0.5) if seconds < _FAST_DECODE else (threads, threads)


def decode_all(
    examples: ImageDataset,
    cached_size: tuple[int, int],
    images: Tensor,
    threads: int,
    limit: int,
    crop: CenterCrop | None = None,
) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """Decode into the first rows of ``images`` (N, C, S, S'). Returns sizes, indices, and unreadable images."""
    array = examples.images
    if array is not None and array.shape[1:3] == cached_size == (crop.resized(*cached_size) if crop else cached_size):
        pixels = torch.from_numpy(np.ascontiguousarray(array))
        images.copy_(pixels.view(len(examples), *cached_size, -1).permute(0, 3, 1, 2))  # grey fills three channels
        return torch.tensor([cached_size]).repeat(len(examples), 1), torch.arange(len(examples)), []

    def decode_one(i: int) -> tuple[int, int]:
        pixels, size = examples.read_sized(i, cached_size, crop)
        images[i] = torch.from_numpy(pixels).permute(2, 0, 1)
        return size

    sizes, index, unreadable = [], [], []
    for i, result in enumerate(read_all(decode_one, range(len(examples)), "decoding", threads)):
        if isinstance(result, UnreadableImage):
            unreadable.append((result.name, result.reason))
            check_unreadable(unreadable, limit, len(examples))
            continue
        if len(index) != i:
            images[len(index)] = images[i]
        index.append(i)
        sizes.append(result)
    if not index:
        raise UserError(f"None of the {len(unreadable)} images can be read; the first: {': '.join(unreadable[0])}.")
    return torch.tensor(sizes), torch.tensor(index), unreadable
