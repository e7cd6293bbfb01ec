"""``frugalvit embed``: write the features of images, or draw the nearest neighbours of one image.

``select.py`` selects images to label, ``duplicates.py`` finds near duplicates.
"""

import time
from pathlib import Path

import numpy as np
from torch import Tensor

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, join, open_data
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import read_pixels, to_picture
from frugalvit.data.paths import is_inside
from frugalvit.data.splits import add_missing_splits
from frugalvit.embedding.duplicates import duplicates
from frugalvit.embedding.feature_table import UNLABELLED, label_names, make_table
from frugalvit.embedding.image_table import drop_held_out, facts
from frugalvit.embedding.select import select
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from frugalvit.probing.knn import nearest
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils import console
from frugalvit.utils.files import PICTURES, check_new_file, write_atomically
from frugalvit.utils.tables import CommandResult, Table

FORMATS = (".npz", ".parquet")


def embed(config: EmbedConfig) -> CommandResult:
    if config.engine == "ray":
        from frugalvit.embedding.ray_embed import embed_with_ray

        return embed_with_ray(config, lambda: _open_images(config))  # --select ignores held-out splits later
    began = time.monotonic()
    makes_table = config.select is not None or config.duplicates is not None
    out, picture = _outputs(config, makes_table)
    source, chosen = _open_images(config)
    if out is not None and picture is not None and makes_table:
        command = duplicates if config.select is None else select
        result = command(config, source, join(*chosen.values()), out, picture)
        result.data["seconds"] = round(time.monotonic() - began, 2)
        return result
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    query = None if config.neighbours is None else read_pixels(config.neighbours, model.transform.pixels)
    features = extractor(join(*chosen.values()), source.name)
    # By position: one file may be in several splits.
    splits = [split for split, examples in chosen.items() for _ in range(len(examples))]
    data = facts(config, source, features) | {"shape": list(features.features.shape[1:])}
    tables: list[Table] = []
    if query is not None and picture is not None:
        tables.append(_neighbours(config, extractor, features, query, join(*chosen.values()), source.classes, picture))
        columns = ("rank", "image", "class", "cosine")
        data["neighbours"] = [dict(zip(columns, row, strict=True)) for row in tables[0].rows]
        data["picture"] = str(picture)
    if out is not None:
        write_features(out, features, [splits[position] for position in features.positions], source.classes)
        data["out"] = str(out)
    data["seconds"] = round(time.monotonic() - began, 2)
    if out is not None:
        shape = "x".join(str(side) for side in features.features.shape[1:])
        tables.append(Table(["images", "vector", "file"], [[len(features), shape, str(out)]]))
    return CommandResult(data, tables, list(source.notes))


def _open_images(config: EmbedConfig) -> tuple[DatasetSplits, dict[str, ImageDataset]]:
    """Open the data, and return it with the images to embed by split."""
    source = open_data(config.data, split="given", root=config.root, labels=config.label_source, loose=True)
    if config.split == "val" and "val" not in source.splits:
        source = add_missing_splits(source)  # as 'train' makes it
        console.info("val is made from train: --split train contains its images too")
    chosen = _choose_splits(source, config.split)
    if config.select is not None and "split" not in config.model_fields_set and config.engine == "memory":
        chosen = drop_held_out(chosen)
    return source, chosen


def write_features(path: Path, features: FeatureSet, splits: list[str], classes: tuple[str, ...] | None) -> None:
    """Write paths, splits, vectors and, if there are any, labels and class names to .npz or .parquet."""
    if path.suffix.lower() == ".npz":
        arrays: dict[str, np.ndarray] = {
            "paths": np.array(features.names),
            "splits": np.array(splits),
            "vectors": features.features.numpy(),
        }
        labels = features.labels if features.labels is not None else features.targets
        if labels is not None and classes is not None:
            arrays |= {"labels": labels.numpy(), "classes": np.array(classes)}
        write_atomically(path, lambda handle: np.savez(handle, **arrays))  # type: ignore[arg-type]
        return
    import pyarrow.parquet

    numbers, marks = (None if part is None else part.numpy() for part in (features.labels, features.targets))
    table = make_table(features.names, splits, label_names(numbers, marks, classes), features.features.numpy())
    write_atomically(path, lambda handle: pyarrow.parquet.write_table(table, handle))


def _outputs(config: EmbedConfig, makes_table: bool) -> tuple[Path | None, Path | None]:
    """Return the path of the features or the table, and that of the figure; errors come before the work."""
    if makes_table:
        out: Path | None = Path(config.out or ("duplicates.csv" if config.select is None else "to_label.csv"))
        picture: Path | None = Path(config.picture or out.with_suffix(".png"))
    else:
        out = Path(config.out or "features.npz") if config.out or not config.neighbours else None
        picture = Path(config.picture or "neighbours.png") if config.neighbours else None
    if out is not None:
        check_new_file(out, (".csv",) if makes_table else FORMATS)
        if out.suffix.lower() == ".parquet":
            if config.features == "grid":
                raise UserError("--features grid does not fit a table: write a .npz file.")
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise UserError("Parquet needs pyarrow: pip install 'frugalvit[streams]', or write .npz.") from None
    if picture is not None:
        check_new_file(picture, PICTURES, "--picture")
        if makes_table and is_inside(picture, config.data):
            raise UserError(f"{picture} is inside {config.data}, and would become one of its images: use --picture.")
        if config.features == "grid":
            raise UserError("--features grid cannot be compared: use pooled or last_blocks.")
    return out, picture


def _choose_splits(source: DatasetSplits, split: str) -> dict[str, ImageDataset]:
    """Return the images by split, including unlabelled ones beside class folders."""
    parts = dict(source.splits)
    for name, loose in source.loose.items():
        loose.labels = np.full(len(loose), UNLABELLED)
        parts[name] = join(parts[name], loose) if name in parts else loose
    if split == "all":
        return parts
    if split not in parts:
        raise UserError(f"{source.location} has no {split} split, only {', '.join(parts)}.")
    return {split: parts[split]}


def _neighbours(
    config: EmbedConfig,
    extractor: FeatureExtractor,
    features: FeatureSet,
    query: np.ndarray,
    examples: ImageDataset,
    classes: tuple[str, ...] | None,
    picture: Path,
) -> Table:
    """Draw and list the images nearest to the query, without the query's own file."""
    from frugalvit.probing.figures import neighbours_figure
    from frugalvit.utils.plotting import save

    assert config.neighbours is not None
    vector: Tensor = extractor.images(extractor.model.transform.image(query, extractor.device)).cpu()
    query_file = Path(config.neighbours).resolve()
    others = [row for row, name in enumerate(features.names) if Path(name).resolve() != query_file]
    if not others:
        raise UserError(f"--neighbours {config.neighbours} is the only image.")
    _, (cosines,), (index,) = next(
        nearest(features.features[others], vector, config.count, device=probe_device(extractor.model))
    )
    names, rows = dict(enumerate(classes or ())), [others[row] for row in index.tolist()]
    labels = ["" if features.labels is None else names.get(int(features.labels[row]), "") for row in rows]
    captions = [f"{label}\n{cosine:.3f}".strip() for label, cosine in zip(labels, cosines.tolist(), strict=True)]
    images = [to_picture(examples.read(features.positions[row])) for row in rows]
    save(neighbours_figure(to_picture(query), images, captions), picture)
    lines: list[list[object]] = [
        [rank, features.names[row], label or None, cosine]
        for rank, (row, label, cosine) in enumerate(zip(rows, labels, cosines.tolist(), strict=True), 1)
    ]
    return Table(["rank", "image", "class", "cosine"], lines, f"nearest neighbours, figure {picture}")
