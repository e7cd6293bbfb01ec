"""Options of ``frugalvit list``."""

from __future__ import annotations

from frugalvit.config.base import Config, option


class ModelsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?; without one, our own models", positional=True)


class DatasetsConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)
    root: str | None = option(None, "where datasets lie (default: FRUGALVIT_DATASETS or ~/.cache/frugalvit/datasets)")


class RecipesConfig(Config):
    pattern: str = option("", "part of a name, with * and ?", positional=True)
