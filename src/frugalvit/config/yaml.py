"""Option values from YAML files and texts, loaded safely."""

from pathlib import Path
from typing import Any

import yaml

from frugalvit.config.base import merge, set_dotted
from frugalvit.errors import UserError
from frugalvit.utils.files import read_error_message, read_text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read nested options from a YAML file; names may be written as flags (``localization.lr-scale``)."""
    try:
        values = yaml.safe_load(read_text(path))
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise UserError(f"{path} must map option names to values, but holds a {type(values).__name__}.")
        return _nest(values, path)
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None


def read_yaml_text(text: str) -> Any:
    """Read a flag's value as YAML, e.g. ``{depths: [1, 1]}``; invalid YAML stays text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _nest(values: dict[Any, Any], path: str | Path) -> dict[str, Any]:
    """Convert flag names to nested options: ``a.b`` to group a, option b; dashes to underscores."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(f"{path}: {key!r} is not an option name.")
        entry: dict[str, Any] = {}
        set_dotted(entry, key.replace("-", "_"), _nest(value, path) if isinstance(value, dict) else value)
        nested = merge(nested, entry)
    return nested
