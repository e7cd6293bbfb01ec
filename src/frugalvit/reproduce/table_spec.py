"""The specification of a table: a YAML file in the repository's ``benchmarks/tables/``, or anywhere else."""

from pathlib import Path
from typing import Any, Literal

import yaml

from frugalvit.config.base import Config, option
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.checkout import require_benchmarks

_SUFFIX = ".yaml"


class TableSpec(Config):
    """One table: the data it needs, the options that all its runs share, and its settings."""

    about: str = option(help="what the table shows")
    data: str = option(help="the folder below --data")
    common: dict[str, Any] = option(help="options of every run")
    settings: dict[str, str] = option(
        help="the options of each setting, as 'compare' reads them; the last setting is the baseline; "
        "{esvit} is replaced by the run that 'starts' calls esvit"
    )
    kind: Literal["train", "pretrain", "detect", "segment"] = option("train", "the command that makes the runs")
    backbones: tuple[str, ...] = option(("swin_tiny_w7",), "the runs are repeated for each")
    starts: dict[str, tuple[str, str]] = option(
        default_factory=dict, help="runs to start from: a table and one of its settings; missing ones are made"
    )
    metric: str = option("top1", "what is compared")


def list_tables() -> list[str]:
    """List the names of the tables in the checkout."""
    return sorted(path.stem for path in _tables_folder().glob(f"*{_SUFFIX}"))


def load_table(name: str, folder: Path | None = None) -> TableSpec:
    """Load a YAML file by its path, or a table by its name: from ``folder``, else from the checkout."""
    path = Path(name)
    if path.suffix != _SUFFIX:
        path = (folder or Path()) / f"{name}{_SUFFIX}"
        if folder is None or not path.is_file():
            path = _tables_folder() / path.name
        if not path.is_file():
            raise UserError(
                f"There is no table '{name}'.{did_you_mean(name, list_tables())} See 'frugalvit reproduce'."
            )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"Cannot read the table {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a table: it has no 'settings'.")
    try:
        return TableSpec.parse(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _tables_folder() -> Path:
    return require_benchmarks("'frugalvit reproduce' without the path of a table") / "tables"
