"""Options of commands: dataclasses on the command line, over a YAML file, over their defaults.

A token never belongs on a command line, where everybody on the machine can read it, and what a parser does not know it
likes to print; so token options are refused unread, and unknown options are named without their values.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

import yaml
from transformers import HfArgumentParser

from .cli import refuse_token


def parse_dataclasses(
    kinds: Sequence[type], argv: Sequence[str], *, prog: str, description: str, config: bool = False
) -> tuple[Any, ...]:
    """One instance of each dataclass, from flags named as its fields.

    Args:
        kinds: the dataclasses, with ``help`` in the metadata of their fields.
        argv: the command line.
        prog, description: for ``--help``.
        config: offer ``--config FILE.yaml``; flags given beside it win.
    """
    parser = HfArgumentParser(kinds, prog=prog, description=description, allow_abbrev=False)  # type: ignore[arg-type]
    parser.add_argument("--token", "--hub_token", "--hf_token", type=refuse_token, help=argparse.SUPPRESS)
    if config:
        parser.add_argument("--config", help="YAML file of these options; flags given beside it win.")
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        path = finder.parse_known_args(argv)[0].config
        if path is not None:
            _set_defaults(parser, path)
    parsed = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True, look_for_args_file=False)
    unknown = [word.split("=")[0] for word in parsed[-1] if word.startswith("-")]
    if parsed[-1]:
        shown = ", ".join(unknown) or "a value that belongs to no option"
        raise ValueError(f"unknown option: {shown}; {prog} --help lists the options.")
    return parsed[: len(kinds)]


def _set_defaults(parser: argparse.ArgumentParser, path: str) -> None:
    """Make the values of a YAML file the defaults, checked as if they had been given as flags."""
    with open(path, encoding="utf-8") as file:
        try:
            values = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options as `name: value`, one a line.")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config", "token")}
    for name, value in values.items():
        if name not in actions:
            near = difflib.get_close_matches(str(name), list(actions), n=1)
            raise ValueError(f"{path}: no option {name!r}" + (f", did you mean {near[0]!r}?" if near else "."))
        try:
            parser.set_defaults(**{name: _checked(parser, actions[name], value)})
        except (argparse.ArgumentError, argparse.ArgumentTypeError, TypeError, ValueError) as error:
            reason = error.message if isinstance(error, argparse.ArgumentError) else str(error)
            raise ValueError(f"{path}: {name}: {value!r} will not do: {reason}") from None
        actions[name].required = False


def _checked(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if value is None:
        if action.default is None and not action.required:
            return None
        raise ValueError("a value is needed; leave the line out for the default")
    if action.nargs in ("+", "*"):
        return [_checked_word(parser, action, word) for word in (value if isinstance(value, list) else [value])]
    if value is True and action.const is not None and not isinstance(action.const, bool):
        return action.const  # an option that may stand without a value
    return _checked_word(parser, action, value)


def _checked_word(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if isinstance(value, (list, dict)):
        raise ValueError("one value is expected")
    # YAML reads a bare `no` as false.
    word = "no" if value is False and action.choices and "no" in action.choices else str(value)
    checked = parser._get_value(action, word)
    parser._check_value(action, checked)
    return checked
