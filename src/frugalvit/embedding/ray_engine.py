"""Embed the parts of a dataset with Ray Data: one worker a GPU, on all machines of a Ray cluster."""

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
from frugalvit.embedding.parts import Part, PartResult, embed_part, part_path
from frugalvit.errors import UserError
from frugalvit.probing.extractor import MAX_UNREADABLE, too_many_unreadable
from frugalvit.probing.splits import make_extractor, open_model
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.text import short_message, truncate_list

_STORE = 256 << 20  # bytes of Ray's shared memory: only descriptions of parts pass through it


class Embedder:
    """A worker: it opens the model once and embeds one part after the other."""

    def __init__(self, config: EmbedConfig, folder: Path, here: Path) -> None:
        os.chdir(here)  # names of images may be relative
        console.set_quiet(True)
        model, settings = open_model(config.model, config), config.model_copy(update={"cache": False})
        self.extractor, self.folder = make_extractor(model, settings, config.features, config.blocks), folder

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        """Embed ``row["part"]``; return its result, or its error, as JSON."""
        try:
            return {
                "result": json.dumps(embed_part(self.extractor, row["part"], part_path(self.folder, row["number"])))
            }
        except UserError as error:
            return {"result": json.dumps(str(error))}
        except SHARD_ERRORS as error:
            return {"result": json.dumps(f"{part_path(self.folder, row['number']).name}: {describe_error(error)}")}


def embed_parts(parts: Sequence[Part], config: EmbedConfig, folder: Path, images: int | None) -> list[PartResult]:
    """Write the features of all parts that are not finished yet.

    images: their number in all parts, if it is known
    """
    import ray
    import ray.data
    import ray.exceptions

    results: list[PartResult] = []
    errors: list[str] = []
    with _cluster(config) as (workers, resources):
        rows = ray.data.from_items(
            [{"number": number, "part": part} for number, part in enumerate(parts)], override_num_blocks=len(parts)
        )
        arguments = {"fn_constructor_args": (config, folder.absolute(), Path.cwd()), **resources}
        done = rows.map(
            cast(Any, Embedder), compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))), **arguments
        )
        bar = console.ProgressBar(images or len(parts), "embedding", unit="images" if images else "parts")
        try:
            for row in done.iter_rows():
                value = json.loads(row["result"])
                if isinstance(value, str):
                    errors.append(value)
                else:
                    results.append(PartResult(value[0], [(name, reason) for name, reason in value[1]], value[2]))
                seen = sum(result.rows + len(result.bad) for result in results)
                bar.show(seen if images else len(results) + len(errors))
        except ray.exceptions.RayError as error:
            raise UserError(
                f"Ray stopped ({short_message(error)}). Finished parts stay: run the command again to continue."
            ) from error
        finally:
            bar.close()
    if errors:
        raise UserError(
            f"{len(errors)} of {len(parts)} parts failed: {truncate_list(errors, 3)}. The others are finished; fix "
            "these and run the command again."
        )
    _check_unreadable(results)
    return results


def _check_unreadable(results: Sequence[PartResult]) -> None:
    bad = [entry for result in results for entry in result.bad]
    images = sum(result.rows for result in results) + len(bad)
    if len(bad) > max(1, int(MAX_UNREADABLE * images)) or len(bad) == images:
        raise too_many_unreadable(len(bad), images, bad)
    for name, reason in bad:
        console.warning(f"left out: {name}: {reason}")


@contextmanager
def _cluster(config: EmbedConfig) -> Iterator[tuple[int, dict[str, int]]]:
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
