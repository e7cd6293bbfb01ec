"""Option values from YAML files and texts, loaded safely."""

from pathlib import Path
from typing import Any

import yaml

from frugalvit.config.base import flatten, merge, set_dotted
from frugalvit.errors import UserError
from frugalvit.utils.files import read_error_message, read_text

_MAX_BRACKETS, _MAX_LENGTH = 500, 1_000_000


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read nested options from a YAML file; names may be written as flags (``localization.lr-scale``)."""
    try:
        values = _UniqueKeyLoader(_check_length(read_text(path))).get_single_data()
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise UserError(f"{path} must map option names to values, but holds a {type(values).__name__}.")
        return _nest(values, path)
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None


def _check_length(text: str) -> str:
    """Refuse a text that would take minutes to read, and then be nested too deeply."""
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError(f"it has more than {_MAX_BRACKETS:,} brackets")
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"it has more than {_MAX_LENGTH:,} characters")
    return text


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, which also refuses equal keys: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := sorted(key for key in set(keys) if keys.count(key) > 1):
            raise yaml.YAMLError(f"the key {twice[0]!r} is there twice. Delete one of the lines")
        return super().construct_mapping(node, deep)


def read_yaml_text(text: str) -> Any:
    """Read a flag's value as YAML, e.g. ``{depths: [1, 1]}``; invalid YAML stays text."""
    try:
        return yaml.safe_load(_check_length(text))
    except yaml.YAMLError:
        return text
    except (RecursionError, ValueError) as error:  # also a date such as 2024-99-99, a number of 5,000 digits
        raise UserError(f"{text[:40]} … is not readable YAML: {' '.join(str(error).split())}") from None


def _nest(values: dict[Any, Any], path: str | Path) -> dict[str, Any]:
    """Convert flag names to nested options: ``a.b`` to group a, option b; dashes to underscores."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(f"{path}: {key!r} is not an option name.")
        entry: dict[str, Any] = {}
        set_dotted(entry, key.replace("-", "_"), _nest(value, path) if isinstance(value, dict) else value)
        if twice := flatten(entry).keys() & flatten(nested).keys():
            raise UserError(f"{path} sets the option {min(twice)!r} twice. Delete one of the lines.")
        nested = merge(nested, entry)
    return nested
