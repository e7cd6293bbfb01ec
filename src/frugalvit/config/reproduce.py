"""What can be set for rerunning the tables of docs/RESULTS.md."""

from __future__ import annotations

from frugalvit.config.base import Config, option
from frugalvit.config.kinds import Device


class ReproduceConfig(Config):
    """Rerun a table from data in a folder; what is finished is not done again."""

    table: str = option("", "a table's name; without one, the tables there are", positional=True)
    data: str = option(".", "the folder that holds flowers102/, cifar100/, …")
    out: str = option("runs/reproduce", "where the runs and tables go", short="-o")
    only: list[str] = option(
        default_factory=list, help="only these of the table's settings; several machines can share a table so"
    )
    seeds: int = option(3, "runs of each setting", ge=1)
    epochs: float | None = option(
        None, "another length than the table's, for a trial; meant for the runs it begins from too", gt=0
    )
    steps: int | None = option(None, "the same in steps; counts instead of epochs", ge=1)
    backbone: str | None = option(None, "another backbone than the table's, in the runs it begins from too")
    img_size: int | None = option(None, "another input size than the table's, in the runs it begins from too", ge=8)
    device: Device = option("auto", "where to compute")
