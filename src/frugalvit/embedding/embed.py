"""``frugalvit embed``: write the features of images, or draw the nearest neighbours of one image.

``select.py`` selects images to label, ``duplicates.py`` finds near duplicates.
"""

import time
from pathlib import Path

import numpy as np
import torch
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
    """Write features, draw neighbours, select images to label, or find duplicates."""
    if config.engine == "ray":
        from frugalvit.embedding.ray_embed import embed_with_ray

        return embed_with_ray(config, lambda: _open_images(config))  # --select ignores held-out splits later
    began = time.monotonic()
    out, picture = _outputs(config)
    _check_outputs(config, out, picture)
    source, chosen = _open_images(config)
    if out is not None and picture is not None and _makes_table(config):
        command = duplicates if config.select is None else select
        return command(config, source, join(*chosen.values()), out, picture)
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    query = None if config.neighbours is None else read_pixels(config.neighbours, model.transform.pixels)
    features = extractor(join(*chosen.values()), source.name)
    # By position: one file may be in several splits.
    splits = [split for split, examples in chosen.items() for _ in range(len(examples))]
    data = facts(config, source, features) | {"shape": list(features.features.shape[1:])}
    tables: list[Table] = []
    neighbours = [] if query is None else _find_neighbours(extractor, features, query, config, probe_device(model))
    if out is not None:
        write_features(out, features, [splits[position] for position in features.positions], source.classes)
        data["out"] = str(out)
    if query is not None and picture is not None:
        tables.append(_draw_neighbours(picture, query, features, join(*chosen.values()), neighbours, source))
        data["neighbours"] = [
            dict(zip(("rank", "image", "class", "cosine"), row, strict=True)) for row in tables[0].rows
        ]
        data["picture"] = str(picture)
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


def _makes_table(config: EmbedConfig) -> bool:
    return config.select is not None or config.duplicates is not None


def _outputs(config: EmbedConfig) -> tuple[Path | None, Path | None]:
    """Return the path of the features or the table, and that of the figure."""
    if _makes_table(config):
        out = Path(config.out or ("duplicates.csv" if config.select is None else "to_label.csv"))
        return out, Path(config.picture or out.with_suffix(".png"))
    out = Path(config.out or "features.npz") if config.out or not config.neighbours else None
    return out, Path(config.picture or "neighbours.png") if config.neighbours else None


def _check_outputs(config: EmbedConfig, out: Path | None, picture: Path | None) -> None:
    """Raise errors about the outputs before the work."""
    if out is not None:
        check_new_file(out, (".csv",) if _makes_table(config) else FORMATS)
        if out.suffix.lower() == ".parquet":
            if config.features == "grid":
                raise UserError("--features grid does not fit a table: write a .npz file.")
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise UserError("Parquet needs pyarrow: pip install 'frugalvit[streams]', or write .npz.") from None
    if picture is not None:
        check_new_file(picture, PICTURES, "--picture")
        if _makes_table(config) and is_inside(picture, config.data):
            raise UserError(f"{picture} is inside {config.data}, and would become one of its images: use --picture.")
        if config.features == "grid":
            raise UserError("--features grid cannot be compared: use pooled or last_blocks.")


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


def _find_neighbours(
    extractor: FeatureExtractor, features: FeatureSet, query: np.ndarray, config: EmbedConfig, device: torch.device
) -> list[tuple[int, float]]:
    """Return rows and cosines of the images nearest to the query, without the query's own file."""
    assert config.neighbours is not None
    vector: Tensor = extractor.images(extractor.model.transform.image(query, extractor.device)).cpu()
    query_file = Path(config.neighbours).resolve()
    others = [row for row, name in enumerate(features.names) if Path(name).resolve() != query_file]
    if not others:
        raise UserError(f"--neighbours {config.neighbours} is the only image.")
    _, similarity, index = next(nearest(features.features[others], vector, config.count, device=device))
    return [(others[row], cosine) for row, cosine in zip(index[0].tolist(), similarity[0].tolist(), strict=True)]


def _draw_neighbours(
    picture: Path,
    query: np.ndarray,
    features: FeatureSet,
    examples: ImageDataset,
    neighbours: list[tuple[int, float]],
    source: DatasetSplits,
) -> Table:
    from frugalvit.probing.figures import neighbours_figure
    from frugalvit.utils.plotting import save

    images = [to_picture(examples.read(features.positions[row])) for row, _ in neighbours]
    classes = dict(enumerate(source.classes or ()))
    labels = ["" if features.labels is None else classes.get(int(features.labels[row]), "") for row, _ in neighbours]
    captions = [f"{label}\n{cosine:.3f}".strip() for label, (_, cosine) in zip(labels, neighbours, strict=True)]
    save(neighbours_figure(to_picture(query), images, captions), picture)
    rows: list[list[object]] = [
        [rank, features.names[row], label or None, cosine]
        for rank, (label, (row, cosine)) in enumerate(zip(labels, neighbours, strict=True), 1)
    ]
    return Table(["rank", "image", "class", "cosine"], rows, f"nearest neighbours, figure {picture}")
