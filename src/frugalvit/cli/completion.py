"""``frugalvit completion SHELL``: print a completion script. shtab makes it from the commands and their options."""

import argparse
import re
from typing import Any, Literal, get_args, get_origin

from frugalvit.cli.commands import COMMANDS, Command
from frugalvit.cli.parser import make_parser
from frugalvit.config.recipes import all_recipes
from frugalvit.config.tools import CompletionConfig
from frugalvit.config.train import RunConfig
from frugalvit.utils.checkout import has_benchmarks, import_benchmark
from frugalvit.utils.tables import CommandResult

_PLACEHOLDER = re.compile(r"[A-Z]+(,[A-Z]+)*")  # N, TEXT, X,X: not a choice


def completion(config: CompletionConfig) -> CommandResult:
    import shtab

    script = shtab.complete(build_parser(), config.shell)
    return CommandResult({"shell": config.shell, "script": script}, [], [script])


def build_parser() -> argparse.ArgumentParser:
    """Build one parser with every command as a subparser, and with the choices of every option."""
    root = argparse.ArgumentParser("frugalvit")
    root.add_argument("--version", action="store_true", help="print the version")
    groups: dict[str, Any] = {"": root.add_subparsers()}
    for command in sorted(COMMANDS, key=lambda command: command.name.count(" ")):
        parent, _, name = command.name.rpartition(" ")
        if parent not in groups:
            owner = groups[""].choices.get(parent) or groups[""].add_parser(parent, help=f"{parent} …")
            groups[parent] = owner.add_subparsers()
        groups[parent].add_parser(name, help=command.help, add_help=False, parents=[_describe(command)])
    return root


def _describe(command: Command) -> argparse.ArgumentParser:
    """Build the parser of a command. Its actions have the choices that a shell offers."""
    import shtab

    from frugalvit.backbones.registry import MODEL_NAMES

    config, choices = command.load_config(), {"backbone": list(MODEL_NAMES)}
    if issubclass(config, RunConfig):
        choices["recipe"] = [recipe.name for recipe in all_recipes() if recipe.task == config.recipe_task]
    if command.name == "reproduce" and has_benchmarks():  # the wheel has no tables
        choices["table"] = import_benchmark("reproduce").list_tables()
    parser = make_parser(config, command.name, command.help)
    is_parent = any(other.name.startswith(f"{command.name} ") for other in COMMANDS)
    for action in list(parser._actions):
        field, words = config.model_fields.get(action.dest), str(action.metavar or "").removesuffix(" …").split("|")
        if not action.option_strings and is_parent:  # the subcommands replace it
            parser._remove_action(action)
        elif not action.option_strings and field is not None and get_origin(field.annotation) is Literal:
            action.choices = [str(choice) for choice in get_args(field.annotation)]
        elif offered := choices.get(action.dest) or [w for w in words if w and not _PLACEHOLDER.fullmatch(w)]:
            action.choices = offered  # auto|N in --help -> auto
        elif "TEXT" in str(action.metavar) or not action.option_strings or action.dest == "config":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
