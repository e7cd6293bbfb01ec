"""Convert typed configurations to command-line flags, and flags to configurations.

Every option becomes one flag (``localization.weight`` -> ``--localization.weight``). Flags are read as text and
validated by the configuration, so that Python, YAML and the command line share one set of rules.
"""

import argparse
import difflib
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from frugalvit.cli.help_layout import EXAMPLES, SHOWN_OPTIONS
from frugalvit.config.base import SYNONYMS, Config, flat_fields, flatten, merge, option_extras, set_dotted, with_file
from frugalvit.config.yaml import read_yaml, read_yaml_text
from frugalvit.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UserError`` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See '{self.prog} --help'.")


def parse(model: type[Config], argv: list[str], prog: str, about: str) -> tuple[Config, argparse.Namespace]:
    """Return the configuration of ``argv`` and its ``--config`` file, and the common flags. ``argv`` wins."""
    for number, word in enumerate(argv):
        if word in ("-h", "--help"):
            print(format_help(model, prog, about, everything=argv[number + 1 : number + 2] == ["all"]))
            raise SystemExit(0)
    parser = make_parser(model, prog, about)
    parsed, unknown = parser.parse_known_intermixed_args(_switched(parser, [_dashed(word) for word in argv]))
    positionals = [getattr(parsed, action.dest) for action in parser._actions if not action.option_strings]
    mistaken = [word for word in positionals if isinstance(word, str) and _meant_flag(parser, word)]
    if unknown or mistaken:
        raise UserError(_unknown_message(parser, [*unknown, *mistaken][0], prog))
    values: dict[str, Any] = {}
    flags: list[str] = []
    for name, field in flat_fields(model).items():
        value = getattr(parsed, name, None)
        if value is not None:
            set_dotted(values, name, _convert_text(value, field.annotation))
            flags += [name] if f"--{_dashes(name)}" in parser._option_string_actions else []
    from_file = read_yaml(parsed.config) if parsed.config else {}
    try:
        return model.parse(merge(from_file, values)), parsed
    except UserError as error:
        raise UserError(_add_source(str(error), flags, parsed.config, from_file)) from None


def _add_source(message: str, flags: list[str], file: str | None, from_file: dict[str, Any]) -> str:
    """Name the flag or the file of a wrong option; the configuration itself knows option names only."""
    match = re.match(r"(?:There is no option ')?([\w.]+)", message)
    name = match[1] if match else ""
    if name in flags:
        return f"--{_dashes(name)}{message.removeprefix(name)}"
    return with_file(message, file, from_file) if file else message


def format_help(model: type[Config], prog: str, about: str, *, everything: bool) -> str:
    """Return the help of a command: its most used options and examples, or ``everything``."""
    command = prog.removeprefix("frugalvit ")
    shown = None if everything else SHOWN_OPTIONS.get(command)
    text = make_parser(model, prog, about, shown).format_help()
    text += "".join(
        f"{start}  {line}\n" for start, line in zip(["\nexamples:\n", ""], EXAMPLES.get(command, ()), strict=False)
    )
    if shown is None:
        return text
    hidden = getattr(model, "unused", {})
    fields = {name: option_extras(field) for name, field in flat_fields(model).items() if name not in hidden}
    others = sum(
        not (extra.get("hidden") or extra.get("positional") or name in shown) for name, extra in fields.items()
    )
    return f"{text}\n{others} more options: {prog} --help all\n"


def make_parser(model: type[Config], prog: str, about: str, shown: Collection[str] | None = None) -> Parser:
    """Build the parser of one command from its configuration. ``shown``: options with a help text (default: all)."""
    parser = Parser(
        prog, description=about, allow_abbrev=False, argument_default=None, formatter_class=_Formatter, add_help=False
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # so that -1,0 is a value in --query -1,0
    arguments = parser.add_argument_group("arguments")
    groups: dict[str, Any] = {}
    positionals: list[str] = []
    unused = getattr(model, "unused", {})  # inherited options that this command refuses
    recipes = {recipe: flatten(values) for recipe, values in model.default_recipes().items()}
    for name, field in flat_fields(model).items():
        extra = option_extras(field)
        group = name.rpartition(".")[0]
        if group not in groups:
            groups[group] = parser.add_argument_group(group or "options")
        add = groups[group].add_argument
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        defaults = {recipe: values.get(name, default) for recipe, values in recipes.items()} or {"": default}
        is_hidden = extra.get("hidden") or name in unused
        is_hidden = is_hidden or (shown is not None and name not in shown and not extra.get("positional"))
        text = argparse.SUPPRESS if is_hidden else _help_text(field, defaults)
        many = typing.get_origin(_drop_none(field.annotation)) in (list, tuple)
        if extra.get("positional"):
            nargs = ("+" if field.is_required() else "*") if many else (None if field.is_required() else "?")
            action = arguments.add_argument(name, nargs=nargs, help=text, metavar=name.upper().replace("_", "-"))
            if text is not argparse.SUPPRESS:
                positionals.append(_usage(action))
            continue
        flags = [f"--{_dashes(name)}"]
        if extra.get("short"):
            flags.append(str(extra["short"]))
        if _drop_none(field.annotation) is bool:
            add(*flags, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            add(*flags, dest=name, nargs="+" if many else None, metavar=_metavar(field.annotation), help=text)
    # Set now: argparse changes nargs of the positionals while it parses intermixed flags such as --help.
    parser.usage = " ".join([prog, *positionals, "[options]"])
    common = parser.add_argument_group("everywhere")
    common.add_argument("-h", "--help", action="help", help="show this help; '--help all' shows every option")
    common.add_argument("--config", metavar="FILE", help="read options from a YAML file; flags override it")
    common.add_argument("--json", action="store_true", default=False, help="print the result or error as JSON")
    common.add_argument("--quiet", action="store_true", default=False, help="print warnings and errors only")
    return parser


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {usage}\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        is_on = "(default: yes)" in (action.help or "")  # only then --no-X is useful
        flags = [flag for flag in action.option_strings if is_on or not flag.startswith("--no-")]
        return ", ".join(flags) + (f" {action.metavar}" if action.metavar else "")


def _usage(action: argparse.Action) -> str:
    """Format a positional for the usage line: ``NAME``, ``[NAME]`` if optional, ``NAME …`` for several."""
    word = f"{action.metavar or action.dest}{' …' if action.nargs in ('+', '*') else ''}"
    return f"[{word}]" if action.nargs in ("?", "*") else word


def _help_text(field: Any, defaults: dict[str, Any]) -> str:
    """Format the help text of an option with its default for each default recipe."""
    (_, first), *others = defaults.items()
    text = field.description or ""
    if first not in (None, "", [], (), {}):
        values = [f"default: {_format(first)}", *(f"{name}: {_format(alt)}" for name, alt in others if alt != first)]
        text = f"{text} ({'; '.join(values)})"
    return text.replace("%", "%%")  # argparse formats help texts with %


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metavar(annotation: Any) -> str:
    """Describe the values of a flag: the choices of a Literal, or the type."""
    names: list[str] = []
    for part in _parts(annotation):
        if typing.get_origin(part) is typing.Literal:
            names += [str(choice) for choice in typing.get_args(part)]
        elif part is not type(None):
            names.append(_type_name(part))
    return "|".join(dict.fromkeys(names))


def _type_name(annotation: Any) -> str:
    """``N`` for integers, ``X`` for other numbers, ``X,X`` for a pair, ``TEXT …`` for a list of texts."""
    (plain,) = _parts(annotation) if typing.get_origin(annotation) is typing.Annotated else (annotation,)
    arguments = typing.get_args(plain)
    if typing.get_origin(plain) is list:
        return f"{_metavar(arguments[0])} …"
    if typing.get_origin(plain) is tuple:
        return f"{_metavar(arguments[0])} …" if ... in arguments else ",".join(map(_metavar, arguments))
    if typing.get_origin(plain) is dict:
        return "YAML"
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(plain, "VALUE")


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return _parts(typing.get_args(annotation)[0])
    return (annotation,)


def _drop_none(annotation: Any) -> Any:
    """Remove ``None`` from an annotation: ``list[str] | None`` -> ``list[str]``. Other unions stay."""
    parts = [part for part in _parts(annotation) if part is not type(None)]
    return parts[0] if len(parts) == 1 else annotation


def _convert_text(value: Any, annotation: Any) -> Any:
    """Convert text for the validator: ``1,2`` to a pair, ``none`` to None. File names keep their commas."""
    if isinstance(value, str) and typing.get_origin(annotation) is dict:
        return read_yaml_text(value)
    pairs = [part for part in _parts(annotation) if typing.get_origin(part) is tuple]
    if isinstance(value, list):
        return [part for text in value for part in text.split(",")] if pairs else value
    if isinstance(value, str) and pairs and "," in value:
        return value.split(",")
    if isinstance(value, str) and value.lower() in ("none", "null"):
        return None
    return value


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def _switched(parser: Parser, argv: list[str]) -> list[str]:
    """Write ``--rescue false`` as ``--no-rescue``."""
    words: list[str] = []
    for word in argv:
        action = parser._option_string_actions.get(words[-1]) if words and word in ("true", "false") else None
        if isinstance(action, argparse.BooleanOptionalAction):
            words[-1] = words[-1] if word == "true" else f"--no-{words[-1].removeprefix('--')}"
        else:
            words.append(word)
    return words


def _dashed(word: str) -> str:
    """``--img_size=3`` -> ``--img-size=3``."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return _dashes(flag) + equals + value


def _unknown_message(parser: Parser, word: str, prog: str) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    name = word.partition("=")[0]
    if not word.startswith("-"):
        meant = _meant_flag(parser, word)
        hint = f"is not an argument. Did you mean '{meant}'?" if meant else "is one argument too many."
        return f"'{word}' {hint} See '{prog} --help'."
    same = [f"--{ours}" for ours, theirs in SYNONYMS.items() if name.lstrip("-") in theirs and f"--{ours}" in flags]
    hint = f" Did you mean '{same[0]}'?" if same else _suggest_flags(name, flags)
    return f"There is no option '{name}'.{hint} See '{prog} --help'."


def _meant_flag(parser: Parser, word: str) -> str:
    """Return the flag that ``epochs=10`` means; an empty string for other words, and for files of that name."""
    name, equals, value = word.partition("=")
    is_option = bool(equals) and f"--{_dashes(name)}" in parser._option_string_actions
    return f"--{_dashes(name)} {value}" if is_option and not Path(word).exists() else ""


def _suggest_flags(word: str, flags: Collection[str]) -> str:
    """Suggest flags that equal the word but for their group (``--optimizer.clip``) or a typing mistake."""
    in_groups = [flag for flag in flags if flag.endswith(f".{word.lstrip('-')}")]
    if in_groups:
        return f" Did you mean {' or '.join(repr(flag) for flag in in_groups[:2])}?"
    # Without the dashes, which would make all flags alike.
    close = difflib.get_close_matches(word.lstrip("-"), [flag[2:] for flag in flags], n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(repr(f'--{flag}') for flag in close)}?" if close else ""
