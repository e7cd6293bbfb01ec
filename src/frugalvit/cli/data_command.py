"""``frugalvit data``: show what a dataset holds, or rank its labels. ``data/`` cannot import the models this needs."""

from frugalvit.config.data import DataConfig
from frugalvit.data import inspect
from frugalvit.utils.tables import CommandResult


def show_data(config: DataConfig) -> CommandResult:
    if config.suspicious is None:
        return inspect.command(config)
    from frugalvit.embedding.label_errors import find_label_errors

    return find_label_errors(config)
