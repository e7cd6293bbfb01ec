"""``frugalvit completion SHELL``: print a completion script. shtab makes it from the commands and their options."""

import argparse
import re
from typing import Any, Literal, get_args, get_origin

from frugalvit.cli.commands import COMMANDS, Command
from frugalvit.cli.flags import make_parser
from frugalvit.config.recipes import all_recipes
from frugalvit.config.tools import CompletionConfig
from frugalvit.config.train import RunConfig
from frugalvit.utils import console
from frugalvit.utils.checkout import has_benchmarks, import_benchmark
from frugalvit.utils.tables import CommandResult

INSTALL = {
    "bash": "mkdir -p ~/.local/share/bash-completion/completions && "
    "frugalvit completion bash --quiet > ~/.local/share/bash-completion/completions/frugalvit",
    "zsh": "mkdir -p ~/.zfunc && frugalvit completion zsh --quiet > ~/.zfunc/_frugalvit && "
    "echo 'fpath=(~/.zfunc $fpath); autoload -Uz compinit; compinit' >> ~/.zshrc",
    "fish": "mkdir -p ~/.config/fish/completions && "
    "frugalvit completion fish --quiet > ~/.config/fish/completions/frugalvit.fish",
}
_PLACEHOLDER = re.compile(r"[A-Z]+(,[A-Z]+)*")  # N, TEXT, X,X: not a choice


def completion(config: CompletionConfig) -> CommandResult:
    """Print the script on standard output and the line that installs it on standard error."""
    import shtab

    script = shtab.complete(build_parser(), config.shell)
    console.info(f"to install it:  {INSTALL[config.shell]}")
    return CommandResult({"shell": config.shell, "install": INSTALL[config.shell], "script": script}, [], [script])


def build_parser() -> argparse.ArgumentParser:
    """Build one parser with every command as a subparser, and with the choices of every option."""
    root = argparse.ArgumentParser("frugalvit")
    root.add_argument("--version", action="store_true", help="print the version")
    groups: dict[str, Any] = {"": root.add_subparsers()}
    for command in sorted(COMMANDS, key=lambda command: command.name.count(" ")):
        parent, _, name = command.name.rpartition(" ")
        if parent not in groups:
            is_command = any(other.name == parent for other in COMMANDS)
            owner = groups[""].choices[parent] if is_command else groups[""].add_parser(parent, help=f"{parent} …")
            groups[parent] = owner.add_subparsers()
        groups[parent].add_parser(name, help=command.help, add_help=False, parents=[_describe(command)])
    return root


def _describe(command: Command) -> argparse.ArgumentParser:
    import shtab

    from frugalvit.backbones.registry import MODEL_NAMES

    config = command.load_config()
    choices = {"backbone": list(MODEL_NAMES)}
    if issubclass(config, RunConfig):
        choices["recipe"] = [recipe.name for recipe in all_recipes() if recipe.task == config.recipe_task]
    if command.name == "reproduce" and has_benchmarks():  # the wheel has no tables
        choices["table"] = import_benchmark("reproduce").list_tables()
    parser = make_parser(config, command.name, command.help)
    is_parent = any(other.name.startswith(f"{command.name} ") for other in COMMANDS)
    for action in list(parser._actions):
        field = config.model_fields.get(action.dest)
        if not action.option_strings and is_parent:  # the subcommands replace it
            parser._remove_action(action)
        elif not action.option_strings and field is not None and get_origin(field.annotation) is Literal:
            action.choices = [str(choice) for choice in get_args(field.annotation)]
        elif offered := choices.get(action.dest) or [  # auto|N in --help -> auto
            word
            for word in str(action.metavar or "").removesuffix(" …").split("|")
            if word and not _PLACEHOLDER.fullmatch(word)
        ]:
            action.choices = offered
        elif "TEXT" in str(action.metavar) or not action.option_strings or action.dest == "config":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
