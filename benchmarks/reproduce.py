"""``frugalvit reproduce TABLE``: run a table of docs/RESULTS.md again; finished runs are not repeated.

A table is a YAML file in ``benchmarks/tables/``, or anywhere else.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml

from frugalvit.config.base import Config, option
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import ReproduceConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.formats.named_catalog import dataset_status
from frugalvit.errors import UserError, did_you_mean
from frugalvit.runs import layout
from frugalvit.utils import console
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_markdown

TABLES = Path(__file__).parent / "tables"
_SUFFIX = ".yaml"


class TableSpec(Config):
    """One table: the data it needs, the options that all its runs share, and its settings."""

    about: str = option(help="what the table shows")
    data: str = option("", "the folder below --data")
    datasets: tuple[str, ...] = option((), "or named datasets in --data: the table is repeated for each that is there")
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
    """List the names of the tables in ``benchmarks/tables/``."""
    return sorted(path.stem for path in TABLES.glob(f"*{_SUFFIX}"))


def load_table(name: str, folder: Path | None = None) -> TableSpec:
    """Load a YAML file by its path, or a table by its name: from ``folder``, else from ``benchmarks/tables/``."""
    path = Path(name)
    if path.suffix != _SUFFIX:
        path = (folder or Path()) / f"{name}{_SUFFIX}"
        if folder is None or not path.is_file():
            path = TABLES / path.name
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


def reproduce(config: ReproduceConfig) -> CommandResult:
    """Run a table, or list the tables."""
    if config.table:
        spec = load_table(config.table)
        return _reproduce_datasets(config, spec.datasets) if spec.datasets else Reproduction(config).run()
    names = list_tables()
    specs = [load_table(name) for name in names]
    rows: list[list[object]] = [
        [name, spec.about, spec.data or "any of ten"] for name, spec in zip(names, specs, strict=True)
    ]
    return CommandResult({"tables": names}, [Table(["table", "what it shows", "data"], rows)])


def _reproduce_datasets(config: ReproduceConfig, names: tuple[str, ...]) -> CommandResult:
    """Run a table on each of these named datasets that is below --data; say how to get the others."""
    status = {name: dataset_status(name, config.data) for name in names}
    present = [name for name in names if status[name].state == "present"]
    if not present:
        raise UserError(
            f"{config.table} needs one of {', '.join(names)} in {config.data}: see 'frugalvit list datasets'."
        )
    results = {name: Reproduction(config, name).run() for name in present}
    tables = [
        Table(table.columns, table.rows, f"{name}, {table.title}") for name in present for table in results[name].tables
    ]
    notes = [f"{name} is missing: {status[name].instruction}" for name in names if name not in present]
    return CommandResult({name: result.data for name, result in results.items()}, tables, notes)


class Reproduction:
    """A table together with the user's options; ``dataset`` names one of its datasets."""

    def __init__(self, config: ReproduceConfig, dataset: str = "") -> None:
        path = Path(config.table)
        self.config, self.name = config, f"{path.stem}/{dataset}" if dataset else path.stem
        self._folder = path.parent if path.suffix else None
        self.spec = load_table(config.table)
        if dataset:
            self.spec = self.spec.model_copy(update={"data": dataset})

    def run(self) -> CommandResult:
        """Make the runs that are missing, then the table."""
        config, spec = self.config, self.spec
        for needed in (spec, *(self._load(table) for table, _ in spec.starts.values())):
            folder = Path(config.data) / needed.data
            if needed.data not in needed.datasets and not folder.is_dir():
                raise UserError(
                    f"{self.name} needs {folder.name}: there is no folder {folder}. Name its parent: --data."
                )
        settings = {name: _drop_length(text, config) for name, text in self._choose_settings().items()}
        if _used_starts(spec, settings.values()) and len(config.out.split()) != 1:
            raise UserError(
                f"--out {config.out!r} has spaces, and {self.name} names runs in it: choose another folder."
            )
        self._make_starts(spec, [text for name, text in settings.items() if not self._is_finished(name)])
        settings = {name: self._insert_starts(spec, text) for name, text in settings.items()}
        if spec.kind == "pretrain":
            return self._pretrain(settings)
        return self._compare(settings) if len(settings) > 1 else self._run_alone(*next(iter(settings.items())))

    def _load(self, table: str) -> TableSpec:
        return self.spec if table == self.name else load_table(table, self._folder)

    def _choose_settings(self) -> dict[str, str]:
        """Return the settings of --only, or all."""
        known, only = self.spec.settings, self.config.only
        for name in only:
            if name not in known:
                raise UserError(
                    f"--only '{name}' is not a setting.{did_you_mean(name, known)} Choose {', '.join(known)}."
                )
        return {name: text for name, text in known.items() if not only or name in only}

    def _runs(self, setting: str) -> Iterator[tuple[str, int, Path]]:
        """List backbone, seed and folder of every run of a setting."""
        for backbone in self._backbones():
            for seed in range(self.config.seeds):
                yield backbone, seed, self._run_folder(self.name, backbone, setting, seed)

    def _backbones(self) -> tuple[str, ...]:
        return (self.config.backbone,) if self.config.backbone else self.spec.backbones

    def _is_finished(self, setting: str) -> bool:
        return all((run / layout.SUMMARY).exists() for _, _, run in self._runs(setting))

    def _run_folder(self, table: str, backbone: str, setting: str, seed: int) -> Path:
        backbone = self.config.backbone or backbone
        return Path(self.config.out) / table / backbone / folder_name(setting) / f"seed_{seed}"

    # Runs that settings start from

    def _start_folder(self, table: str, setting: str) -> Path:
        return self._run_folder(table, self._load(table).backbones[0], setting, seed=0)

    def _insert_starts(self, spec: TableSpec, text: str) -> str:
        """Replace the names of starts in a setting by the folders of their runs."""
        return text.format(**{name: self._start_folder(*start) for name, start in _used_starts(spec, [text]).items()})

    def _make_starts(self, spec: TableSpec, settings: Iterable[str]) -> None:
        for start in _used_starts(spec, settings).values():
            self.make_start(*start)

    def make_start(self, table: str, setting: str) -> None:
        """Make the run of a table that settings start from (seed 0), unless it is finished."""
        from frugalvit.comparison.compare import find_difference, run_once

        spec, folder, config = self._load(table), self._start_folder(table, setting), self.config
        finished, text = (folder / layout.SUMMARY).exists(), spec.settings[setting]
        if not finished:
            self._make_starts(spec, [text])
        text = self._insert_starts(spec, text)
        if table != self.name:  # a row of this table is as long as the other rows
            # --epochs and --steps shorten a start; they do not make it longer than its own table says.
            lengths = {"epochs": spec.common.get("epochs"), "steps": self.spec.common.get("steps")}
            lengths |= {
                name: float(value) for name, value in parse_assignments(text.split()).items() if name == "epochs"
            }
            longer = [name for name, length in lengths.items() if length and (getattr(config, name) or 0) > length]
            config = config.model_copy(update=dict.fromkeys(longer))
        run_config, train = self._run_config(
            spec, _drop_length(text, config), folder, config, spec.backbones[0], seed=0
        )
        if not finished:
            console.info(f"making the run to start from: {table}, {setting}")
            run_once(run_config, train)
        elif difference := find_difference(folder, run_config):
            console.warning(f"{difference}: the table starts from the finished run; another --out makes a new one")

    # Configurations

    def _common_options(self, spec: TableSpec, config: ReproduceConfig, backbone: str) -> dict[str, Any]:
        """Return the options that all runs of a table share, with the user's changes."""
        options = {name: getattr(config, name) for name in ("epochs", "steps", "img_size")}
        changes = {name: value for name, value in options.items() if value is not None}
        if "epochs" in changes:
            changes.setdefault("steps", None)  # the table's steps would override them
        named = f"{spec.data}:{config.data}"
        data = named if spec.data in spec.datasets else str(Path(config.data) / spec.data)
        return spec.common | {"data": data, "device": config.device, "backbone": config.backbone or backbone} | changes

    def _run_config(
        self, spec: TableSpec, text: str, folder: Path, config: ReproduceConfig, backbone: str, seed: int
    ) -> tuple[Any, Any]:
        """Return the configuration of one run, as ``compare`` makes it, and the function that trains it."""
        options, common = parse_assignments(text.split()), self._common_options(spec, config, backbone)
        if spec.kind == "pretrain":
            from frugalvit.tasks.pretraining.train import pretrain

            return PretrainConfig.parse(common | options | {"seed": seed, "out": str(folder)}), pretrain
        compare_config, run_config, train, _ = _commands(spec)
        return run_config.parse(compare_config.parse(common).run_values(options, seed, str(folder))), train

    # Tables

    def _compare(self, settings: dict[str, str]) -> CommandResult:
        """Compare the settings, once for each backbone."""
        compare_config, _, _, compare = _commands(self.spec)
        named = [f"{folder_name(name)}: {text}" for name, text in settings.items()]
        folder, data, tables = Path(self.config.out) / self.name, {}, []
        for backbone in self._backbones():
            options = self._common_options(self.spec, self.config, backbone)
            options |= {"settings": named, "seeds": self.config.seeds, "metric": self.spec.metric}
            result = compare(compare_config.parse(options | {"out": str(folder / backbone), "redraw": True}))
            data[backbone] = result.data
            tables += [Table(table.columns, table.rows, backbone) for table in result.tables]
        return CommandResult({"run": str(folder), "table": data}, tables, [f"{folder}: one folder per backbone"])

    def _run_alone(self, setting: str, text: str) -> CommandResult:
        """Run a single setting; there is nothing to compare it with."""
        from frugalvit.comparison.compare import run_once

        rows: list[list[object]] = []
        for backbone, seed, folder in self._runs(setting):
            summary = run_once(*self._run_config(self.spec, text, folder, self.config, backbone, seed))
            rows.append([backbone, setting, seed, summary[self.spec.metric]])
        columns = ["backbone", "setting", "seed", self.spec.metric]
        note = "'reproduce' without --only writes the comparison"
        run = str(Path(self.config.out) / self.name)
        return CommandResult({"run": run, "rows": rows}, [Table(columns, rows)], [note])

    def _pretrain(self, settings: dict[str, str]) -> CommandResult:
        """Pre-train every backbone, setting and seed, and score each run with every probe."""
        from frugalvit.comparison.compare import run_once
        from frugalvit.comparison.pretraining import SCORES, probe_scores

        rows: list[dict[str, Any]] = []
        for backbone in self._backbones():
            for seed in range(self.config.seeds):
                for setting, text in settings.items():
                    run = self._run_folder(self.name, backbone, setting, seed)
                    run_config, train = self._run_config(self.spec, text, run, self.config, backbone, seed)
                    summary = run_once(run_config, train)
                    row = {"backbone": backbone, "objective": setting, "seed": seed}
                    scores = probe_scores(run, run_config.data, self.config.device)
                    row |= {name: scores[name] for name in SCORES if name in scores}
                    rows.append(row | {name: summary[name] for name in ("effective_rank", "health", "seconds")})
        columns = list(rows[0])
        cells = [[row[column] for column in columns] for row in rows]
        folder = Path(self.config.out) / self.name
        write_text(folder / "table.md", as_markdown(columns, cells))
        return CommandResult({"run": str(folder), "rows": rows}, [Table(columns, cells)], [f"{folder}/table.md"])


def folder_name(setting: str) -> str:
    """Name a setting's folder without spaces: ``L_V + L_R`` is ``L_V+L_R``, ``raw grid`` is ``raw_grid``."""
    return setting.replace(" + ", "+").replace(" ", "_")


def _drop_length(text: str, config: ReproduceConfig) -> str:
    """Remove a setting's own epochs and steps if the user chose a length."""
    if config.epochs is None and config.steps is None:
        return text
    return " ".join(part for part in text.split() if not part.startswith(("epochs=", "steps=")))


def _used_starts(spec: TableSpec, settings: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the starts of a table that occur in its settings."""
    text = " ".join(settings)
    return {name: start for name, start in spec.starts.items() if f"{{{name}}}" in text}


def _commands(spec: TableSpec) -> tuple[Any, Any, Any, Any]:
    """Return the configurations of a comparison and of one run, and the functions that run them."""
    from frugalvit.comparison.compare import compare
    from frugalvit.tasks.classification import train as classification
    from frugalvit.tasks.detection import commands as detection
    from frugalvit.tasks.segmentation import commands as segmentation

    if spec.kind == "detect":
        return DetectCompareConfig, DetectConfig, detection.train, compare
    if spec.kind == "segment":
        return SegmentCompareConfig, SegmentConfig, segmentation.train, compare
    return CompareConfig, TrainConfig, classification.train, compare
