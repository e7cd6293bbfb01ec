"""The workers of ``embed --engine ray``: Ray Data gives them parts, one worker a GPU, on all machines of a cluster."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from frugalvit.config.probe import EmbedConfig
from frugalvit.data.webdataset.remote import describe_error
from frugalvit.data.webdataset.stream import SHARD_ERRORS
from frugalvit.embedding.feature_table import ROWS, make_table
from frugalvit.embedding.partition import Part
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.probing.splits import make_extractor, open_model
from frugalvit.utils import console
from frugalvit.utils.files import write_atomically
from frugalvit.utils.system import cores
from frugalvit.utils.text import short_message, truncate_list

_STORE = 256 << 20  # bytes of Ray's shared memory: only descriptions of parts pass through it
Bad = list[tuple[str, str]]  # names of unreadable images, and reasons


def embed_part(extractor: FeatureExtractor, part: Part, path: Path) -> Bad:
    """Write the features of a part, and return its unreadable images; the file appears when it is complete."""
    import pyarrow.parquet

    bad: Bad = []

    def write(handle: Any) -> None:
        writer = None
        for examples, labels in part.read():
            features = extractor(examples, path.name)
            bad.extend(features.bad)
            chosen: Any = None if labels is None else [labels[row] for row in features.positions]
            table = make_table(features.names, [part.split] * len(features), chosen, features.features.numpy())
            writer = writer or pyarrow.parquet.ParquetWriter(handle, table.schema)
            writer.write_table(table, row_group_size=ROWS)
        if writer is None:
            raise UserError(f"{part.identity[0]} has no images: remove it.")
        writer.close()

    write_atomically(path, write)
    return bad


class Embedder:
    """A worker: it opens the model once and embeds one part after the other."""

    def __init__(self, config: EmbedConfig, folder: Path) -> None:
        os.chdir(folder)  # names of images may be relative
        console.set_quiet(True)
        settings = config.model_copy(update={"cache": False})
        self.extractor = make_extractor(open_model(config.model, config), settings, config.features, config.blocks)

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        """Embed a part; return its unreadable images, or its error."""
        try:
            return {"bad": json.dumps(embed_part(self.extractor, row["part"], row["path"])), "error": ""}
        except UserError as error:
            return {"bad": "[]", "error": str(error)}
        except SHARD_ERRORS as error:
            return {"bad": "[]", "error": f"{row['part'].identity[0]}: {describe_error(error)}"}


def embed_parts(parts: Sequence[tuple[Part, Path]], config: EmbedConfig) -> Bad:
    """Write the features of each part to its path; return the unreadable images."""
    import ray.data
    import ray.exceptions

    bad: Bad = []
    errors: list[str] = []
    with _cluster(config) as (workers, resources):
        rows = ray.data.from_items(
            [{"part": part, "path": path.absolute()} for part, path in parts], override_num_blocks=len(parts)
        )
        pool = ray.data.ActorPoolStrategy(size=min(workers, len(parts)))
        done = rows.map(cast(Any, Embedder), compute=pool, fn_constructor_args=(config, Path.cwd()), **resources)
        try:
            for row in console.progress(done.iter_rows(), len(parts), "embedding parts"):
                bad += [(name, reason) for name, reason in json.loads(row["bad"])]
                errors += [row["error"]] if row["error"] else []
        except ray.exceptions.RayError as error:
            raise UserError(
                f"Ray stopped ({short_message(error)}). Finished parts stay: run the command again to continue."
            ) from error
    if errors:
        raise UserError(
            f"{len(errors)} of {len(parts)} parts failed: {truncate_list(errors, 3)}. The others are finished: fix "
            "these and run the command again."
        )
    return bad


@contextmanager
def _cluster(config: EmbedConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    """Connect to the cluster in RAY_ADDRESS, or start Ray on this machine.

    Yields the number of workers and what each takes: a GPU, or a core if there is no GPU.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # this command prints the progress itself
    import ray
    import ray.data

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not os.environ.get("RAY_ADDRESS"):
        count = cores() if config.actors == "auto" else config.actors
        options |= {"num_cpus": count + 1, "object_store_memory": _STORE, "include_dashboard": False}
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}, **options)
    try:
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        found = ray.cluster_resources()
        gpus = int(found.get("GPU", 0)) if config.device in ("auto", "cuda") else 0
        available = gpus or max(1, int(found["CPU"]) - 1)
        yield available if config.actors == "auto" else config.actors, {"num_gpus": 1} if gpus else {"num_cpus": 1}
    finally:
        ray.shutdown()
