"""Options of a comparison: those of a training, two or more settings, and the seeds."""

import itertools
import re
from typing import Any

import pydantic

from frugalvit.config.base import Config, merge, option, set_dotted
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.config.types import Seed
from frugalvit.config.yaml import read_yaml_text
from frugalvit.errors import UserError


class Compared(RunConfig):
    """Mixin for a comparison: the same data and seeds under two or more settings."""

    with_settings: list[str] = option([], "options of the first setting, e.g. localization.weight=0.5", short="--with")
    without_settings: list[str] = option([], "options of the second, e.g. localization.weight=0", short="--without")
    settings: list[str] = option([], "any number of named settings: 'esvit: init=runs/esvit' 'random: init=none'")
    seeds: int = option(3, "runs of each setting, with seeds seed, seed+1, …", ge=1)
    metric: str = option("auto", "metric to compare; auto: the main score")
    resume: str | None = option(None, hidden=True)
    redraw: bool = option(False, "overwrite a comparison of other settings; used by 'reproduce'", hidden=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_auto_resume(cls, values: Any) -> Any:
        """Leave ``--resume auto`` as it is: a comparison refuses every --resume."""
        return values

    @pydantic.field_validator("resume")
    @classmethod
    def _check_resume(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("repeat the command with the same --out to continue a comparison")
        return value

    def named_settings(self) -> dict[str, dict[str, Any]]:
        """Return each setting's name and nested values; the last setting is the baseline."""
        settings: dict[str, dict[str, Any]] = {}
        for text in self.settings:
            name, colon, rest = text.partition(":")
            if not colon:
                raise UserError(f"--settings '{text}': write 'name: option=value option=value'.")
            assignments = re.findall(r"(?:\{[^}]*\}|\S)+", rest)  # separated by spaces outside of {…}
            _add_setting(settings, _check_folder_name(name.strip(), text), assignments)
        for name, assignments in (("with", self.with_settings), ("without", self.without_settings)):
            if assignments:
                _add_setting(settings, name, assignments)
        settings = settings or self.default_settings()
        if len(settings) < 2:
            raise UserError("A comparison needs two settings, e.g. --with lr=0.001 --without lr=0.0001.")
        for first, second in itertools.combinations(settings, 2):
            if settings[first] == settings[second]:
                raise UserError(f"'{first}' and '{second}' are the same setting: there is nothing to compare.")
        for name, values in settings.items():
            if "recipe" in values:  # the common values already contain those of the recipe
                raise UserError(f"'{name}' cannot change the recipe: list the options that differ.")
        return settings

    def default_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to compare if none are named."""
        return {}

    def run_values(self, setting: dict[str, Any], seed: int, out: str) -> dict[str, Any]:
        """Return the values of one run: the common values, overridden by those of the setting."""
        compare_only = set(Compared.model_fields) - set(RunConfig.model_fields)
        common = self.model_dump(mode="json", exclude=compare_only)
        requested = {name: value for name, value in self._requested.items() if name not in compare_only}
        if not self.is_set("recipe") and self.default_recipe(merge(requested, setting)) != self.recipe:
            common = requested  # the setting has another recipe, so its values replace those of the common one
        if "stem" in setting:  # the common one is also among these arguments
            common["backbone_args"] = {k: v for k, v in (common.get("backbone_args") or {}).items() if k != "stem"}
        return merge(common, setting) | {"seed": seed, "out": out, "resume": None}


class CompareConfig(Compared, TrainConfig):
    """Trainings under two or more settings over several seeds; by default with and without Drloc."""

    def default_settings(self) -> dict[str, dict[str, Any]]:
        if self.localization.weight == 0:
            raise UserError("--localization.weight 0 leaves nothing to compare: use --with and --without.")
        weight = "paper" if self.localization.weight == "auto" else self.localization.weight
        return {"with": {"localization": {"weight": weight}}, "without": {"localization": {"weight": 0.0}}}


class PretrainCompareConfig(Compared, PretrainConfig):
    """Pre-trainings under several settings and seeds, scored by frozen probes; by default L_V + L_R against L_V."""

    metric: str = option("knn", "metric to compare: knn, linear, logistic, match_accuracy, match_error_px, …")
    backbones: list[str] = option([], "networks: every setting runs with each of them; the last one is the baseline's")
    minutes: float | None = option(None, "minutes of each run, for equal time; a short run measures the steps", gt=0)

    def default_settings(self) -> dict[str, dict[str, Any]]:
        return {"L_V+L_R": {"matching": {"region_weight": 0.5}}, "L_V": {"matching": {"region_weight": 0.0}}}

    def named_settings(self) -> dict[str, dict[str, Any]]:
        settings = super().named_settings()
        if not self.backbones:
            return settings
        return {
            f"{backbone}_{name}": merge(values, {"backbone": backbone})
            for backbone in self.backbones
            for name, values in settings.items()
        }

    def run_values(self, setting: dict[str, Any], seed: int, out: str) -> dict[str, Any]:
        values = super().run_values(setting, seed, out)
        return {name: value for name, value in values.items() if name in PretrainConfig.model_fields}


def _add_setting(settings: dict[str, dict[str, Any]], name: str, assignments: list[str]) -> None:
    if name in settings:
        raise UserError(f"--settings names '{name}' twice: use different names.")
    settings[name] = parse_assignments(assignments)


def _check_folder_name(name: str, text: str) -> str:
    """Check that a setting's name is a valid folder name, and not that of a file of the comparison."""
    is_taken = name.lower() == "report.html" or name.lower().startswith("comparison.")
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable() or is_taken:
        raise UserError(f"--settings '{text}': '{name}' cannot name a folder; choose a plain word.")
    return name


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Convert ``["a.b=1", "c=x", "d={e: 2}"]`` to nested values."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"'{assignment}' should be option=value, e.g. localization.weight=0.5.")
        value = read_yaml_text(text) if text.startswith("{") else None if text.lower() == "none" else text
        set_dotted(values, name.replace("-", "_"), value)
    return values


class DemoConfig(Config):
    """Few labels on scikit-learn's digits: pre-train without labels, then learn from 200."""

    out: str = option("runs/demo", "folder for the data, the runs and the report", short="-o")
    labels: int = option(20, "labelled images of each digit", ge=2)
    pretrain_epochs: int = option(4, "passes over all digits without labels", ge=1)
    epochs: int = option(32, "passes over all digits, with and without labels", ge=1)
    drloc_epochs: int = option(20, "passes of each run with and without Drloc", ge=1)
    seeds: int = option(2, "runs of each setting with and without Drloc", ge=1)
    seed: Seed = option(0, "of the labelled digits, the weights and the batches")
