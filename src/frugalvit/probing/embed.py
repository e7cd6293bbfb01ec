"""``frugalvit embed``: vectors of images in a file, and the nearest neighbours of one image as a picture."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DataSource, join, open_data
from frugalvit.data.decode import BadImage, decode
from frugalvit.data.examples import Examples
from frugalvit.errors import UserError
from frugalvit.files import make_folder, storable, write_atomically
from frugalvit.probing.extract import Embedded, Extractor
from frugalvit.probing.knn import nearest
from frugalvit.probing.prepare import make_extractor, open_model, probe_device
from frugalvit.results import Result, Table

FORMATS = (".npz", ".parquet")


def embed(config: EmbedConfig) -> Result:
    """Features of a dataset to a file, and/or the images most like a given one."""
    began = time.monotonic()
    out = Path(config.out or "features.npz") if config.out or not config.neighbours else None
    picture = Path(config.picture) if config.neighbours else None
    _check_outputs(config, out, picture)
    source = open_data(config.data, split="given", root=config.root)
    chosen = _chosen(source, config.split)
    if config.neighbours is not None:
        _check_others(config.neighbours, [name for examples in chosen.values() for name in examples.names])
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    query = None if config.neighbours is None else _read(config.neighbours)
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
    return Result(data, tables, list(source.notes))


def write_features(path: Path, found: Embedded, splits: list[str], classes: tuple[str, ...] | None) -> None:
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

    columns: dict[str, object] = {"path": [storable(name) for name in found.names], "split": splits}
    if found.labels is not None and classes is not None:
        columns["label"] = [classes[number] for number in found.labels.tolist()]
    elif found.targets is not None and classes is not None:
        rows = found.targets.tolist()
        columns["label"] = [[name for name, mark in zip(classes, row, strict=True) if mark == 1] for row in rows]
    vectors = found.features.numpy()
    flat = pyarrow.array(vectors.reshape(-1))
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    table = pyarrow.table(columns)
    write_atomically(path, lambda handle: pyarrow.parquet.write_table(table, handle))


def _check_outputs(config: EmbedConfig, out: Path | None, picture: Path | None) -> None:
    """All that can be known to be wrong before the work."""
    if out is not None:
        if out.suffix.lower() not in FORMATS:
            raise UserError(f"{out}: features go into a file that ends with {' or '.join(FORMATS)}.")
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
        if config.features == "grid":
            raise UserError("Neighbours are those of one vector an image: use --features pooled or last_blocks.")


def _chosen(source: DataSource, split: str) -> dict[str, Examples]:
    if split == "all":
        return dict(source.splits)
    if split not in source.splits:
        raise UserError(f"{source.location} has no {split} split, only {', '.join(source.splits)}.")
    return {split: source.splits[split]}


def _read(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise UserError(f"There is no image {path}.")
    try:
        return decode(path)
    except BadImage as error:
        raise UserError(f"{path} cannot be read: {error.reason}.") from None


def _neighbours(
    extractor: Extractor, found: Embedded, query: np.ndarray, config: EmbedConfig, device: torch.device
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


def _draw(
    picture: Path,
    query: np.ndarray,
    found: Embedded,
    examples: Examples,
    near: list[tuple[int, float]],
    source: DataSource,
) -> Table:
    from frugalvit.figures import save
    from frugalvit.probing.figures import neighbours_figure

    images = [examples.read(found.positions[row]) for row, _ in near]
    labels = [
        "" if found.labels is None or source.classes is None else source.classes[found.labels[row]] for row, _ in near
    ]
    captions = [f"{label}\n{cosine:.3f}".strip() for label, (_, cosine) in zip(labels, near, strict=True)]
    save(neighbours_figure(query, images, captions), picture)
    rows: list[list[object]] = [
        [rank, found.names[row], label or None, cosine]
        for rank, (label, (row, cosine)) in enumerate(zip(labels, near, strict=True), 1)
    ]
    return Table(["rank", "image", "class", "cosine"], rows, f"nearest neighbours, drawn in {picture}")
