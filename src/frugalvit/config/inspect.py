"""Options of ``frugalvit data`` and ``frugalvit data pack``."""

from __future__ import annotations

from typing import Literal

from frugalvit.config.base import Config, option


class DataConfig(Config):
    """What to look at, and how closely."""

    data: str = option(help="a folder, a table, shards, or the name of a dataset", positional=True)
    split: Literal["auto", "given", "train+val", "remake"] = option(
        "auto", "as in train: auto makes a missing val; given shows only what is there"
    )
    val_fraction: float = option(0.1, "share of train held out where a val is made", gt=0, lt=1)
    seed: int = option(0, "decides which images a made val holds")
    labels: Literal["auto", "folders", "ignore"] = option(
        "auto", "folders: folder names are classes; ignore: no labels"
    )
    classes: str | None = option(None, "file with the classes to keep, one name per line")
    root: str | None = option(None, "where datasets with a name lie (default: FRUGALVIT_DATASETS, or the cache)")
    decode: Literal["auto", "all", "sample", "headers"] = option(
        "auto",
        "which images to decode in full; auto: all when that takes seconds, else a sample of 2,000; headers: none",
    )
    duplicates: bool = option(True, "look for files with the same content")


class PackConfig(Config):
    """What to pack, and into what."""

    data: str = option(help="a folder, a table, shards, or the name of a dataset", positional=True)
    out: str = option(help="folder for the shards; it must not exist, or be empty", positional=True)
    split: Literal["auto", "given", "train+val", "remake"] = option("given", "as in train; given packs what is there")
    val_fraction: float = option(0.1, "share of train held out where a val is made", gt=0, lt=1)
    seed: int = option(0, "decides a made val, and the order of shuffled examples")
    labels: Literal["auto", "folders", "ignore"] = option(
        "auto", "folders: folder names are classes; ignore: no labels"
    )
    classes: str | None = option(None, "file with the classes to keep, one name per line")
    root: str | None = option(None, "where datasets with a name lie (default: FRUGALVIT_DATASETS, or the cache)")
    shard_megabytes: float = option(256.0, "size at which a new shard begins", gt=0)
    shuffle: bool = option(True, "mix the classes, as reading in passing needs; the order follows from the seed")
    decoded: bool = option(True, "write the images decoded too, so that training on the shards begins at once")
    img_size: int | Literal["auto"] = option(
        "auto", "input size that the decoded images are made for; auto: what train would take on this machine"
    )
