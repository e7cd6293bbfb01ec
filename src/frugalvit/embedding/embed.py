"""``frugalvit embed``: vectors of images in a file, and the nearest neighbours of one image as a picture.

What to label next and near duplicates are asked for here too, and answered in ``curate.py``.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, join, open_data
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import UnreadableImage, decode
from frugalvit.data.splits import add_missing_splits
from frugalvit.embedding import curate
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from frugalvit.probing.knn import nearest
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, utf8_safe, write_atomically
from frugalvit.utils.tables import CommandResult, Table

FORMATS = (".npz", ".parquet")
TABLES = (".csv",)
UNLABELLED = -1  # the label of an image that has none among images that have one


def embed(config: EmbedConfig) -> CommandResult:
    """Features of a dataset to a file, and/or the images most like a given one; or a table of images to act upon."""
    began = time.monotonic()
    out, picture = _outputs(config)
    _check_outputs(config, out, picture)
    source = open_data(config.data, split="given", root=config.root, labels=config.labels, loose=True)
    if config.split == "val" and "val" not in source.splits:
        source = add_missing_splits(source)  # as train has it
        console.info("--split train is what was given: it holds the images of this val, too")
    chosen = _chosen(source, config.split)
    if config.select is not None and "split" not in config.model_fields_set:
        chosen = _to_learn_from(chosen)
    if out is not None and picture is not None and _makes_table(config):
        answer = curate.duplicates if config.select is None else curate.select
        return answer(config, source, join(*chosen.values()), out, picture)
    if config.neighbours is not None:
        _check_others(config.neighbours, [name for examples in chosen.values() for name in examples.names])
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    query = None if config.neighbours is None else _read(config.neighbours, model.transform.min_size)
    found = extractor(join(*chosen.values()), source.name)
    # By position: one file may stand in several splits.
    splits = [split for split, examples in chosen.items() for _ in range(len(examples))]
    data = {
        "model": config.model,
        "data": source.name,
        "features": config.features,
        "images": len(found),
        "shape": list(found.features.shape[1:]),
        "bad": len(found.bad),
    }
    tables: list[Table] = []
    near = [] if query is None else _neighbours(extractor, found, query, config, probe_device(model))
    if out is not None:
        write_features(out, found, [splits[position] for position in found.positions], source.classes)
        data["out"] = str(out)
    if query is not None and picture is not None:
        tables.append(_draw(picture, query, found, join(*chosen.values()), near, source))
        data["neighbours"] = [
            dict(zip(("rank", "image", "class", "cosine"), row, strict=True)) for row in tables[0].rows
        ]
        data["picture"] = str(picture)
    data["seconds"] = round(time.monotonic() - began, 2)
    if out is not None:
        shape = "x".join(str(side) for side in found.features.shape[1:])
        tables.append(Table(["images", "vector", "file"], [[len(found), shape, str(out)]]))
    return CommandResult(data, tables, list(source.notes))


def write_features(path: Path, found: FeatureSet, splits: list[str], classes: tuple[str, ...] | None) -> None:
    """paths, splits, vectors and, where there are any, labels (numbers) with the names of the classes."""
    if path.suffix.lower() == ".npz":
        arrays: dict[str, np.ndarray] = {
            "paths": np.array(found.names),
            "splits": np.array(splits),
            "vectors": found.features.numpy(),
        }
        labels = found.labels if found.labels is not None else found.targets
        if labels is not None and classes is not None:
            arrays |= {"labels": labels.numpy(), "classes": np.array(classes)}
        write_atomically(path, lambda handle: np.savez(handle, **arrays))  # type: ignore[arg-type]
        return
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, object] = {"path": [utf8_safe(name) for name in found.names], "split": splits}
    if found.labels is not None and classes is not None:
        columns["label"] = [None if number == UNLABELLED else classes[number] for number in found.labels.tolist()]
    elif found.targets is not None and classes is not None:
        rows = found.targets.tolist()
        columns["label"] = [[name for name, mark in zip(classes, row, strict=True) if mark == 1] for row in rows]
    vectors = found.features.numpy()
    flat = pyarrow.array(vectors.reshape(-1))
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    table = pyarrow.table(columns)
    write_atomically(path, lambda handle: pyarrow.parquet.write_table(table, handle))


def _makes_table(config: EmbedConfig) -> bool:
    return config.select is not None or config.duplicates is not None


def _outputs(config: EmbedConfig) -> tuple[Path | None, Path | None]:
    """Where the features or the table go, and where the picture."""
    if _makes_table(config):
        out = Path(config.out or ("duplicates.csv" if config.select is None else "to_label.csv"))
        return out, Path(config.picture or out.with_suffix(".png"))
    features = Path(config.out or "features.npz") if config.out or not config.neighbours else None
    return features, Path(config.picture or "neighbours.png") if config.neighbours else None


def _check_outputs(config: EmbedConfig, out: Path | None, picture: Path | None) -> None:
    """All that can be known to be wrong before the work."""
    if out is not None:
        what, endings = ("the table goes", TABLES) if _makes_table(config) else ("features go", FORMATS)
        if out.suffix.lower() not in endings:
            raise UserError(f"{out}: {what} into a file that ends with {' or '.join(endings)}.")
        if out.exists():
            raise UserError(f"{out} is already there and is not overwritten; choose another name with -o.")
        make_folder(out.parent)
        if out.suffix.lower() == ".parquet":
            if config.features == "grid":
                raise UserError("A grid of tokens does not fit a table; write it to a .npz file.")
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise UserError("Parquet needs pyarrow: pip install 'frugalvit[streams]', or write .npz.") from None
    if picture is not None:
        from frugalvit.probing.figures import check_picture

        check_picture(picture)
        if _makes_table(config):
            curate.check_picture_place(picture, config.data)
        if config.features == "grid":
            raise UserError("Images are compared by one vector each: use --features pooled or last_blocks.")


def _chosen(source: DatasetSplits, split: str) -> dict[str, ImageDataset]:
    """The images by split; loose ones beside class folders are among them, with -1 where others have their label."""
    parts = dict(source.splits)
    for name, loose in source.loose.items():
        loose.labels = np.full(len(loose), UNLABELLED)
        parts[name] = join(parts[name], loose) if name in parts else loose
    if split == "all":
        return parts
    if split not in parts:
        why = " (one is made where there are labels)" if split == "val" and source.classes is None else ""
        raise UserError(f"{source.location} has no {split} split, only {', '.join(parts)}{why}.")
    return {split: parts[split]}


def _to_learn_from(parts: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    """What is labelled next is trained on: images kept for scores would flatter them."""
    kept = [split for split in ("val", "test") if split in parts]
    if not kept or len(kept) == len(parts):
        return parts
    console.info(f"{' and '.join(kept)} left out, since what is labelled is learned from; --split all takes all images")
    return {split: examples for split, examples in parts.items() if split not in kept}


def _read(path: str, enough: tuple[int, int]) -> np.ndarray:
    if not Path(path).is_file():
        raise UserError(f"There is no image {path}.")
    try:
        return decode(path, at_least=enough)
    except UnreadableImage as error:
        raise UserError(f"{path} cannot be read: {error.reason}.") from None


def _neighbours(
    extractor: FeatureExtractor, found: FeatureSet, query: np.ndarray, config: EmbedConfig, device: torch.device
) -> list[tuple[int, float]]:
    """Rows and cosines of the images most like the query, from near to far; the query's own file is no neighbour."""
    assert config.neighbours is not None
    asked: Tensor = extractor.images(extractor.model.transform.image(query, extractor.device)).cpu()
    _check_others(config.neighbours, found.names)
    own, looked_at = Path(config.neighbours).resolve(), config.count + 1
    while True:
        _, similarity, index = next(nearest(found.features, asked, looked_at, device=device))
        pairs = zip(index[0].tolist(), similarity[0].tolist(), strict=True)
        near = [(row, cosine) for row, cosine in pairs if Path(found.names[row]).resolve() != own]
        if len(near) >= config.count or looked_at >= len(found):
            return near[: config.count]
        looked_at *= 2  # the file itself stands in several splits


def _check_others(query: str, names: list[str]) -> None:
    """Refuse a query that is the only image."""
    own = Path(query).resolve()
    if names and all(Path(name).resolve() == own for name in names):
        raise UserError(f"{query} has no neighbours: there is no other image.")


def _class_of(row: int, found: FeatureSet, classes: tuple[str, ...] | None) -> str:
    """The name of an image's class, empty where it has none."""
    if found.labels is None or classes is None or found.labels[row] == UNLABELLED:
        return ""
    return classes[found.labels[row]]


def _draw(
    picture: Path,
    query: np.ndarray,
    found: FeatureSet,
    examples: ImageDataset,
    near: list[tuple[int, float]],
    source: DatasetSplits,
) -> Table:
    from frugalvit.probing.figures import neighbours_figure
    from frugalvit.utils.plotting import save

    images = [examples.read(found.positions[row]) for row, _ in near]
    labels = [_class_of(row, found, source.classes) for row, _ in near]
    captions = [f"{label}\n{cosine:.3f}".strip() for label, (_, cosine) in zip(labels, near, strict=True)]
    save(neighbours_figure(query, images, captions), picture)
    rows: list[list[object]] = [
        [rank, found.names[row], label or None, cosine]
        for rank, (label, (row, cosine)) in enumerate(zip(labels, near, strict=True), 1)
    ]
    return Table(["rank", "image", "class", "cosine"], rows, f"nearest neighbours, drawn in {picture}")
