"""What can be set for a comparison: everything a training takes, two or more settings, and how many seeds."""

from __future__ import annotations

import itertools
import re
from typing import Any, Self

import pydantic

from frugalvit.config.base import Config, merge, option, read_yaml_text, set_dotted
from frugalvit.config.run import RunConfig
from frugalvit.config.train import TrainConfig
from frugalvit.config.types import SEEDS
from frugalvit.errors import UserError


class Compared(RunConfig):
    """The same data, seeds and order under two or more settings; stands before the configuration of what is run."""

    with_settings: list[str] = option(
        default_factory=list, help="options of the first setting, e.g. init=runs/pretrained lr=0.001", short="--with"
    )
    without_settings: list[str] = option(
        default_factory=list, help="options of the second, e.g. init=none lr=0.001", short="--without"
    )
    settings: list[str] = option(
        default_factory=list, help="or any number of named settings: 'esvit: init=runs/esvit', 'random: init=none'"
    )
    seeds: int = option(3, "runs of each setting, with seeds seed, seed+1, …", ge=1)
    metric: str = option("top1", "what is compared")
    resume: str | None = option(None, hidden=True)
    redraw: bool = option(False, "write over a comparison of other settings, as 'reproduce' does", hidden=True)

    @pydantic.field_validator("resume")
    @classmethod
    def _goes_on_by_itself(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("a comparison is not resumed: the same command with the same --out goes on")
        return value

    @pydantic.model_validator(mode="after")
    def _has_seeds_enough(self) -> Self:
        """The seeds are counted on from the first: said of it, not of the one that nobody gave."""
        if self.seed + self.seeds > SEEDS:
            last = self.seed + self.seeds - 1
            raise ValueError(
                f"--seed {self.seed} --seeds {self.seeds}: the last seed would be {last}, more than {SEEDS - 1}; begin "
                "with a lower one"
            )
        return self

    def named_settings(self) -> dict[str, dict[str, Any]]:
        """Each setting's name and its (nested) values; the first is the baseline's rival, the last the baseline."""
        found: dict[str, dict[str, Any]] = {}
        for text in self.settings:
            name, colon, rest = text.partition(":")
            if not colon:
                raise UserError(f"--settings '{text}': write 'name: option=value option=value'.")
            words = re.findall(r"(?:\{[^}]*\}|\S)+", rest)  # parted by spaces, but for those within {…}
            _add(found, _folder_name(name.strip(), text), words)
        for name, words in (("with", self.with_settings), ("without", self.without_settings)):
            if words:
                _add(found, name, words)
        found = found or self.usual_settings()
        if len(found) < 2:
            raise UserError("A comparison wants two settings, e.g. --with lr=0.001 --without lr=0.0001.")
        same = next((pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]), None)
        if same is not None:
            raise UserError(f"'{same[0]}' and '{same[1]}' are the same setting: there is nothing to compare.")
        for name, values in found.items():
            if "recipe" in values:  # the common values are complete already: nothing of a recipe would get through
                raise UserError(f"'{name}' cannot change the recipe: write out the options in which the two differ.")
        return found

    def usual_settings(self) -> dict[str, dict[str, Any]]:
        """What is compared when nothing is named; by itself nothing."""
        return {}

    def run_values(self, setting: dict[str, Any], seed: int, out: str) -> dict[str, Any]:
        """The configuration of one training: the common values, the setting's on top."""
        own = set(Compared.model_fields) - set(RunConfig.model_fields)
        common = self.model_dump(mode="json", exclude=own)
        return merge(common, setting) | {"seed": seed, "out": out, "resume": None}


class CompareConfig(Compared, TrainConfig):
    """Trainings under two or more settings over several seeds, with a paired test; by itself with and without Drloc."""

    with_settings: list[str] = option(
        default_factory=list, help="options of the first setting, e.g. localization.weight=0.5", short="--with"
    )
    without_settings: list[str] = option(
        default_factory=list, help="options of the second, e.g. localization.weight=0", short="--without"
    )

    def usual_settings(self) -> dict[str, dict[str, Any]]:
        """With the loss as everything else has it, and without it."""
        if self.localization.weight == 0:
            raise UserError("--localization.weight 0 leaves nothing to compare: say what with --with and --without.")
        return {"with": {}, "without": {"localization": {"weight": 0.0}}}


def _add(found: dict[str, dict[str, Any]], name: str, words: list[str]) -> None:
    if name in found:
        raise UserError(f"--settings names '{name}' twice: give each setting a name of its own.")
    found[name] = assignments(words)


def _folder_name(name: str, text: str) -> str:
    """A setting's runs lie in a folder of its name: one that stays inside, and beside what the comparison writes."""
    taken = name.lower() in ("tensorboard", "report.html") or name.lower().startswith("comparison.")
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable() or taken:
        raise UserError(f"--settings '{text}': '{name}' cannot name the folder of its runs; choose a plain word.")
    return name


def assignments(words: list[str]) -> dict[str, Any]:
    """``["a.b=1", "c=x", "d={e: 2}"]`` as nested values."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"'{word}' should be option=value, e.g. localization.weight=0.5.")
        read = read_yaml_text(value) if value.startswith("{") else None if value.lower() == "none" else value
        set_dotted(values, name.replace("-", "_"), read)
    return values


class DemoConfig(Config):
    """The demonstration: a small transformer on scikit-learn's digits, with and without the loss."""

    out: str = option("runs/demo", "where the demonstration's data, runs and report go", short="-o")
    seeds: int = option(3, "runs of each setting", ge=1)
    epochs: int = option(80, "passes over the training images", ge=1)
    labels: int = option(20, "labelled images of each digit", ge=2)
