"""Options of ``frugalvit list``."""

from __future__ import annotations

from frugalvit.config.base import Config, option
from frugalvit.config.kinds import ROOT


class ModelsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?; without one, our own models", positional=True)


class DatasetsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)
    root: str | None = option(None, ROOT)


class RecipesConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)
