"""``frugalvit embed --engine ray``: features in Parquet files, and tables from them.

The tables equal those of ``embed.py``, ``select.py`` and ``duplicates.py``, but no step holds all features.
"""

import hashlib
import importlib.util
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import join, open_data
from frugalvit.data.decode import decode
from frugalvit.data.paths import is_inside
from frugalvit.embedding.cluster_index import ClusterIndex
from frugalvit.embedding.feature_table import ROWS, FeatureParts, as_vectors
from frugalvit.embedding.image_table import distinct_files, drop_held_out, path_from_table
from frugalvit.embedding.partition import OpenImages, divide
from frugalvit.embedding.ray_workers import embed_parts
from frugalvit.errors import UserError
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

TABLES = {"neighbours": "neighbours.csv", "select": "to_label.csv", "duplicates": "duplicates.csv"}


def embed_with_ray(config: EmbedConfig, open_images: OpenImages) -> CommandResult:
    """Write the features of all images in parts; then answer --neighbours, --select or --duplicates.

    The name of a part contains a hash of its images, the model and the options: a part that exists is finished.
    """
    began, folder = time.monotonic(), Path(config.out or "features")
    if missing := [name for name in ("ray", "faiss", "pyarrow") if importlib.util.find_spec(name) is None]:
        raise UserError(f"--engine ray needs {' and '.join(missing)}: pip install 'frugalvit[scale]'.")
    output = next((folder / TABLES[name] for name in TABLES if getattr(config, name) is not None), None)
    if folder.suffix or (folder.exists() and not folder.is_dir()) or is_inside(folder, config.data):
        raise UserError(f"--out {folder} must be a folder outside {config.data}, without an ending (--engine ray).")
    if output and output.exists():
        raise UserError(f"{output} already exists: move it, or choose another folder with --out.")
    query = None if config.neighbours is None else decode(config.neighbours)
    partition = divide(config.data, config.split, open_images)
    if config.select is not None and not partition.has_files:
        raise UserError(f"--select writes a table of files, but the images of {config.data} are not files.")
    model = open_model(config.model, config)  # a mistake is reported before the workers start
    extractor = make_extractor(model, config, config.features, config.blocks)
    digests = [_digest(part.split, *part.identity, extractor.settings()) for part in partition.parts]
    paths = [folder / f"part-{number:06d}-{digest}.parquet" for number, digest in enumerate(digests)]
    if others := set(make_folder(folder).glob("part-*.parquet")) - set(paths):
        raise UserError(
            f"{min(others)} holds features of other images, another model or other options: choose another --out."
        )
    waiting = [(part, path) for part, path in zip(partition.parts, paths, strict=True) if not path.exists()]
    bad = embed_parts(waiting, config) if waiting else []
    for name, reason in bad:
        console.warning(f"left out: {name}: {reason}")
    parts = FeatureParts(paths)
    data: dict[str, Any] = {"model": config.model, "data": partition.name, "features": config.features}
    data |= {"images": len(parts), "bad": len(bad), "out": str(folder), "parts": len(paths), "computed": len(waiting)}
    cells: list[object] = [len(parts), len(paths), len(waiting), str(folder)]
    answer = CommandResult(data, [Table(["images", "parts", "computed now", "folder"], [cells])], list(partition.notes))
    if output:
        if query is not None:
            vector = extractor.images(model.transform.image(query, extractor.device))[0]
            columns, lines = _neighbours(config, parts, vector, answer)
        else:
            name = f"index-{_digest(config.seed, *(path.name for path in paths))}"
            index = ClusterIndex(parts, folder / name, config.seed, probe_device(model))
            if config.select is not None:
                known = None if config.known is None else join(*open_data(config.known, split="given").splits.values())
                vectors = None if known is None else extractor(known, "known images").features
                chosen = _select(config, parts, index, [] if known is None else known.names, vectors)
                columns, lines = ["path", "label"], [[path_from_table(output, name), ""] for name in chosen]
                data |= {"known": 0 if known is None else len(known), "chosen": chosen}
            else:
                columns, lines = _duplicates(config, parts, index, output, partition.has_files, answer)
        write_text(output, as_csv(columns, lines))
        data["table"] = str(output)
        answer.notes.append(f"table {output}")
    data["seconds"] = round(time.monotonic() - began, 2)
    return answer


def _digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _neighbours(
    config: EmbedConfig, parts: FeatureParts, query: Tensor, answer: CommandResult
) -> tuple[list[str], list[list[Any]]]:
    """List the images nearest to the query, without the query's own file: one pass over all vectors."""
    own, unit = Path(str(config.neighbours)).resolve(), F.normalize(query.cpu().float(), dim=0)
    label = ["label"] if "label" in parts.dataset.schema.names else []
    best: list[tuple[float, dict[str, Any]]] = []
    for _, batch in parts.batches(["path", "vector", *label]):
        cosines = F.normalize(as_vectors(batch), dim=1) @ unit
        cells = batch.select(["path", *label])
        order = cosines.argsort(descending=True, stable=True).tolist()
        found = ((float(cosines[row]), cells.slice(row, 1).to_pylist()[0]) for row in order)
        best += itertools.islice((pair for pair in found if Path(pair[1]["path"]).resolve() != own), config.count)
        best = sorted(best, key=lambda entry: -entry[0])[: config.count]
    if not best:
        raise UserError(f"--neighbours {config.neighbours} is the only image.")
    columns = ["rank", "image", "class", "cosine"]
    lines = [[rank, cell["path"], cell.get("label"), cosine] for rank, (cosine, cell) in enumerate(best, 1)]
    answer.data["neighbours"] = [dict(zip(columns, line, strict=True)) for line in lines]
    answer.tables.append(Table(columns, lines, "nearest neighbours"))
    return columns, lines


def _select(
    config: EmbedConfig, parts: FeatureParts, index: ClusterIndex, known: list[str], known_vectors: Tensor | None
) -> list[str]:
    """Choose the images to label, as ``select`` does."""
    assert config.select is not None
    splits = parts.dataset.to_table(columns=["split"])["split"].to_numpy()
    by_split = {split: np.flatnonzero(splits == split) for split in np.unique(splits)}
    by_split = by_split if "split" in config.model_fields_set else drop_held_out(by_split)
    allowed = _distinct_rows(parts, np.sort(np.concatenate([*by_split.values()])), known)
    if config.select > (count := int(allowed.sum())):
        raise UserError(f"--select {config.select}: there are only {pluralize(count, 'image')} to choose from.")
    return parts.names(index.representatives(config.select, allowed, known_vectors, seed=config.seed))


def _duplicates(
    config: EmbedConfig, parts: FeatureParts, index: ClusterIndex, output: Path, has_files: bool, answer: CommandResult
) -> tuple[list[str], list[list[Any]]]:
    """Group images as ``duplicates`` does."""
    assert config.duplicates is not None
    rows = np.arange(len(parts))
    allowed = _distinct_rows(parts, rows) if has_files else np.ones(len(parts), bool)
    first = index.group_duplicates(config.duplicates, allowed)
    sizes = np.bincount(first[allowed], minlength=len(parts))
    rows = rows[allowed & (sizes[first] > 1)]
    rows = rows[np.argsort(first[rows], kind="stable")]
    leaders, numbers = np.unique(first[rows], return_inverse=True)
    names = [path_from_table(output, name) if has_files else name for name in parts.names(rows)]
    cosines = [index.cosines(rows[i : i + ROWS], first[rows[i : i + ROWS]]) for i in range(0, len(rows), ROWS)]
    lines = zip((numbers + 1).tolist(), names, np.concatenate([[], *cosines]).round(6).tolist(), strict=True)
    inside, total = len(rows), int(allowed.sum())
    answer.data |= {"threshold": config.duplicates, "groups": len(leaders), "inside": inside}
    answer.notes.append(
        f"{pluralize(len(leaders), 'group')} of {inside:,} images with a cosine of {config.duplicates:g} or more, "
        f"directly or through others; with one of each, {total - inside + len(leaders):,} of {total:,} images remain."
    )
    return ["group", "path", "similarity"], [list(line) for line in lines]


def _distinct_rows(parts: FeatureParts, rows: np.ndarray, excluded: Sequence[str] = ()) -> np.ndarray:
    """Return a mask (N,) of the first of these rows for each file, without the excluded files."""
    allowed = np.zeros(len(parts), bool)
    allowed[rows[[*distinct_files(parts.names(rows), excluded)]]] = True
    return allowed
