"""Options of ``frugalvit data`` and ``frugalvit data pack``."""

from __future__ import annotations

from typing import Literal

from frugalvit.config.base import option
from frugalvit.config.kinds import Auto, Opened, Seed, Splitting


class DataConfig(Opened):
    """What to look at, and how closely."""

    decode: Literal["auto", "all", "sample", "headers"] = option(
        "auto",
        "which images to decode in full; auto: all when that takes seconds, else a sample of 2,000; headers: none",
    )
    duplicates: bool = option(True, "look for files with the same content")


class PackConfig(Opened):
    """What to pack, and into what."""

    out: str = option(help="folder for the shards; it must not exist, or be empty", positional=True)
    split: Splitting = option("given", "as in train; given packs what is there")
    seed: Seed = option(0, "decides a made val (train always uses 0), and the order of shuffled examples")
    shard_megabytes: float = option(256.0, "size at which a new shard begins", gt=0)
    shuffle: bool = option(True, "mix the classes, as reading in passing needs; the order follows from the seed")
    decoded: bool = option(True, "write the images decoded too, so that training on the shards begins at once")
    img_size: int | Auto = option(
        "auto", "input size that the decoded images are made for; auto: what train would take on this machine"
    )
