"""What can be set for a comparison: everything a training takes, two or more settings, and how many seeds."""

from __future__ import annotations

from typing import Any

from frugalvit.config.base import Config, merge, option, set_dotted
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError


class CompareConfig(TrainConfig):
    """The same data, seeds and order under two or more settings."""

    with_settings: list[str] = option(
        default_factory=list, help="options of the first setting, e.g. localization.weight=0.5", short="--with"
    )
    without_settings: list[str] = option(
        default_factory=list, help="options of the second, e.g. localization.weight=0", short="--without"
    )
    settings: list[str] = option(
        default_factory=list, help="or any number of named settings: 'wide: localization.hidden=1024 batch=64'"
    )
    seeds: int = option(3, "runs of each setting, with seeds seed, seed+1, …", ge=1)
    metric: str = option("top1", "what is compared")

    def named_settings(self) -> dict[str, dict[str, Any]]:
        """Each setting's name and its (nested) values; the first is the baseline's rival, the last the baseline."""
        found: dict[str, dict[str, Any]] = {}
        for text in self.settings:
            name, colon, rest = text.partition(":")
            if not colon:
                raise UserError(f"--settings '{text}': write 'name: option=value option=value'.")
            found[name.strip()] = assignments(rest.split())
        for name, words in (("with", self.with_settings), ("without", self.without_settings)):
            if words:
                found[name] = assignments(words)
        if len(found) < 2:
            raise UserError(
                "A comparison wants two settings: --with localization.weight=0.5 --without localization.weight=0."
            )
        return found

    def run_values(self, setting: dict[str, Any], seed: int, out: str) -> dict[str, Any]:
        """The configuration of one training: the common values, the setting's on top."""
        own = set(CompareConfig.model_fields) - set(TrainConfig.model_fields)
        common = self.model_dump(mode="json", exclude=own)
        return merge(common, setting) | {"seed": seed, "out": out, "resume": None}


def assignments(words: list[str]) -> dict[str, Any]:
    """``["a.b=1", "c=x"]`` as nested values."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"'{word}' should be option=value, e.g. localization.weight=0.5.")
        set_dotted(values, name.replace("-", "_"), None if value.lower() == "none" else value)
    return values


class DemoConfig(Config):
    """The demonstration: a small transformer on scikit-learn's digits, with and without the loss."""

    out: str = option("runs/demo", "where the demonstration's data, runs and report go", short="-o")
    seeds: int = option(3, "runs of each setting", ge=1)
    epochs: int = option(80, "passes over the training images", ge=1)
    labels: int = option(20, "labelled images of each digit", ge=2)
