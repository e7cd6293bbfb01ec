"""``frugalvit embed --engine ray``: features in Parquet parts, and tables from an index on disk.

The tables equal those of ``embed.py`` and ``curate.py``, but no step holds all features or names.
"""

import csv
import hashlib
import importlib.util
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import join, open_data
from frugalvit.data.dataset import FileExamples
from frugalvit.data.decode import decode
from frugalvit.data.paths import is_inside
from frugalvit.embedding.cluster_index import ClusterIndex
from frugalvit.embedding.contact_sheet import COLUMNS, make_thumbnail, sheet_figure
from frugalvit.embedding.curate import DRAWN_GROUPS, LISTED_GROUPS, MAX_DRAWN, path_from_table
from frugalvit.embedding.parts import FeatureParts, OpenFiles, part_path, plan_parts
from frugalvit.embedding.ray_engine import embed_parts
from frugalvit.errors import UserError
from frugalvit.probing.figures import check_figure_path
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils.files import make_folder, write_atomically
from frugalvit.utils.plotting import save
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

TABLES = {"neighbours": "neighbours.csv", "select": "to_label.csv", "duplicates": "duplicates.csv"}
Groups = list[list[tuple[str, str]]]  # files and captions of a picture


def embed_at_scale(config: EmbedConfig, open_files: OpenFiles) -> CommandResult:
    """Write the features of all images as Parquet parts; then answer --neighbours, --select or --duplicates."""
    began, folder = time.monotonic(), Path(config.out or "features")
    if missing := [name for name in ("ray", "faiss", "pyarrow") if importlib.util.find_spec(name) is None]:
        raise UserError(f"--engine ray needs {' and '.join(missing)}: pip install 'frugalvit[scale]'.")
    question = next((name for name in TABLES if getattr(config, name) is not None), None)
    table = folder / TABLES.get(question or "", "")
    if folder.suffix or (folder.exists() and not folder.is_dir()) or is_inside(folder, config.data):
        raise UserError(f"--out {folder} must be a folder outside {config.data}, without an ending (--engine ray).")
    if question and table.exists():
        raise UserError(f"{table} already exists: move it, or choose another folder with --out.")
    picture = Path(config.picture or table.with_suffix(".png")) if question else None
    if picture is not None:
        check_figure_path(picture)
    query = None if config.neighbours is None else decode(config.neighbours)
    plan = plan_parts(config.data, config.split, open_files)
    if config.select is not None and not plan.files:
        raise UserError(f"--select writes a table of files, but the images of {config.data} are not files.")
    model = open_model(config.model, config)  # a mistake is found before the workers start
    make_folder(folder)
    if part_path(folder, len(plan.parts)).exists():
        raise UserError(f"{folder} holds more parts than {config.data} has: choose another --out.")
    results = embed_parts(plan.parts, config, folder, plan.images)
    parts = FeatureParts([part_path(folder, number) for number in range(len(plan.parts))])
    new = sum(result.is_new for result in results)
    data: dict[str, Any] = {"model": config.model, "data": plan.name, "features": config.features}
    data |= {"images": len(parts), "bad": sum(len(result.bad) for result in results), "out": str(folder)}
    data |= {"parts": len(results), "computed": new}
    tables = [Table(["images", "parts", "computed now", "folder"], [[len(parts), len(results), new, str(folder)]])]
    answer = CommandResult(data, tables, list(plan.notes))
    if picture is not None:
        index = ClusterIndex.open(parts, folder / "index", seed=config.seed, device=probe_device(model))
        extractor = make_extractor(model, config, config.features, config.blocks)
        if query is not None:
            vector = extractor.images(model.transform.image(query, extractor.device))[0]
            drawn = _neighbours(config, parts, index, vector, table, answer)
        elif config.select is not None:
            known = None if config.known is None else join(*open_data(config.known, split="given").splits.values())
            vectors = None if known is None else extractor(known, "known images").features
            drawn = _select(config, parts, index, () if known is None else known.names, vectors, table, answer)
        else:
            drawn = _duplicates(config, parts, index, plan.files, table, answer)
        if drawn and plan.files:
            sheet = [[make_thumbnail(FileExamples([name], None), 0, text) for name, text in group] for group in drawn]
            save(sheet_figure(sheet), picture)
            data["picture"] = str(picture)
        note = f", figure {picture}" if "picture" in data else "" if plan.files else "; no figure: no image is a file"
        answer.notes.append(f"table {table}{note}")
    data["seconds"] = round(time.monotonic() - began, 2)
    return answer


def _neighbours(
    config: EmbedConfig, parts: FeatureParts, index: ClusterIndex, vector: Any, table: Path, answer: CommandResult
) -> Groups:
    """List the images nearest to the query, without the query's own file."""
    own, wanted = Path(str(config.neighbours)).resolve(), config.count + 1
    while True:
        near = index.nearest(vector, wanted)
        cells = parts.look_up([row for row, _ in near], ["path", *(["label"] if parts.has_labels else [])])
        others = [(cells[row], cosine) for row, cosine in near if Path(cells[row]["path"]).resolve() != own]
        if len(others) >= config.count or len(near) < wanted:
            break
        wanted *= 2  # the query's file may be in several splits
    if not others:
        raise UserError(f"--neighbours {config.neighbours} is the only image.")
    columns, found = ["rank", "image", "class", "cosine"], enumerate(others[: config.count], 1)
    rows: list[list[Any]] = [[rank, cell["path"], cell.get("label"), cosine] for rank, (cell, cosine) in found]
    answer.data["neighbours"] = [dict(zip(columns, row, strict=True)) for row in rows]
    answer.tables.append(Table(columns, rows, "nearest neighbours"))
    _write_csv(table, columns, rows)
    return [[(row[1], f"{row[0]}: {row[3]:.3f}")] for row in rows]


def _select(
    config: EmbedConfig,
    parts: FeatureParts,
    index: ClusterIndex,
    known: Sequence[str],
    known_vectors: Any,
    table: Path,
    answer: CommandResult,
) -> Groups:
    """Choose the images to label, as ``curate.select`` does: by default those of train only."""
    assert config.select is not None
    allowed = _distinct_files(parts, known, only_train="split" not in config.model_fields_set)
    if config.select > (count := int(allowed.sum())):
        raise UserError(f"--select {config.select}: there are only {pluralize(count, 'image')} to choose from.")
    rows = index.representatives(config.select, allowed, known_vectors, seed=config.seed)
    cells = parts.look_up(rows, ["path"])
    names = [cells[row]["path"] for row in rows]
    _write_csv(table, ["path", "label"], ([path_from_table(table, name), ""] for name in names))
    answer.data |= {"known": len(known), "chosen": names, "table": str(table)}
    return [[(name, str(rank))] for rank, name in enumerate(names[:MAX_DRAWN], 1)]


def _duplicates(
    config: EmbedConfig, parts: FeatureParts, index: ClusterIndex, files: bool, table: Path, answer: CommandResult
) -> Groups:
    """Group images as ``curate.duplicates`` does; the lines have the order of the images, not of the groups."""
    assert config.duplicates is not None
    allowed = _distinct_files(parts) if files else np.ones(len(parts), bool)
    first = index.group_duplicates(config.duplicates, allowed).numpy()
    sizes = np.bincount(first[allowed], minlength=len(parts))
    leaders = np.flatnonzero(sizes > 1)
    shown: dict[int, list[tuple[str, str]]] = defaultdict(list)

    def lines() -> Iterable[list[object]]:
        for start, batch in parts.batches(["path"]):
            rows = np.arange(start, start + batch.num_rows)
            rows = rows[allowed[rows] & (sizes[first[rows]] > 1)]
            cosines = (index.vectors(rows) * index.vectors(first[rows])).sum(1).clamp(max=1).tolist()
            groups = (np.searchsorted(leaders, first[rows]) + 1).tolist()
            for group, name, cosine in zip(
                groups, batch.column(0).take(rows - start).to_pylist(), cosines, strict=True
            ):
                if group <= DRAWN_GROUPS and len(shown[group]) < COLUMNS:
                    shown[group].append((name, f"{cosine:.3f}" if shown[group] else f"group {group}"))
                yield [group, path_from_table(table, name) if files else name, round(cosine, 6)]

    _write_csv(table, ["group", "path", "similarity"], lines())
    inside, total = int(sizes[leaders].sum()), int(allowed.sum())
    answer.data |= {"threshold": config.duplicates, "groups": len(leaders), "inside": inside, "table": str(table)}
    listed = [[number, int(sizes[row]), shown[number][0][0]] for number, row in enumerate(leaders[:LISTED_GROUPS], 1)]
    answer.tables += [Table(["group", "images", "first"], listed)] if listed else []
    answer.notes.append(
        f"{pluralize(len(leaders), 'group')} of {inside:,} images with a cosine of {config.duplicates:g} or more, "
        f"directly or through others; with one of each, {total - inside + len(leaders):,} of {total:,} images remain."
    )
    return [shown[number] for number in sorted(shown)]


def _distinct_files(parts: FeatureParts, excluded: Sequence[str] = (), *, only_train: bool = False) -> np.ndarray:
    """Return a mask of rows (N,): the first row of each file, without the excluded files and held-out splits."""

    def digest(name: str) -> bytes:  # 16 bytes a row: the names would not fit into memory
        return hashlib.blake2b(bytes(Path(name).resolve()), digest_size=16).digest()

    digests, is_train = np.empty(len(parts), "S16"), np.zeros(len(parts), bool)
    for start, batch in parts.batches(["path", "split"]):
        rows = slice(start, start + batch.num_rows)
        digests[rows] = [digest(name) for name in batch.column(0).to_pylist()]
        is_train[rows] = np.array(batch.column(1).to_pylist()) == "train"
    candidates = np.flatnonzero(is_train if only_train and is_train.any() else np.ones_like(is_train))
    candidates = candidates[np.unique(digests[candidates], return_index=True)[1]]
    allowed = np.zeros(len(parts), bool)
    allowed[candidates] = ~np.isin(digests[candidates], np.array([digest(name) for name in excluded], "S16"))
    return allowed


def _write_csv(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    def write(handle: Any) -> None:
        text = TextIOWrapper(handle, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
        text.detach()  # flushes

    write_atomically(path, write)
