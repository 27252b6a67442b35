"""The command line: ``orion-hf COMMAND ...``. One file in ``orion_hf/commands/`` is one command."""

import argparse
import ast
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

from . import __version__, commands

_EXTRAS = {"scipy": "methods", "sklearn": "methods", "matplotlib": "plots"}  # module -> extra that installs it


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; with no command, list them.

    Expected failures (a wrong name, a missing file, an option out of range) are one line on standard error and exit
    code 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    available = command_help()
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, available))
        print("usage: orion-hf COMMAND [options]     (orion-hf COMMAND --help for its options)\n")
        print("\n".join(f"  {name:<{width}}  {summary}" for name, summary in available.items()))
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"orion-hf {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in available:
        print(f"orion-hf: no command {name!r}; the commands are: {', '.join(available)}", file=sys.stderr)
        return 2
    return run(name, rest)


def run(name: str, argv: list[str] | None = None) -> int:
    """Run ``orion_hf/commands/NAME.py`` and turn its expected errors into one line each."""
    try:
        return import_module(f"{commands.__name__}.{name}").main(argv)
    except BrokenPipeError:  # `| head` has read enough; what Python still wants to print at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"orion-hf {name}: {reason}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print(f"orion-hf {name}: {error}: pip install 'orion-hf[{_EXTRAS[error.name]}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"orion-hf {name}: interrupted", file=sys.stderr)
        return 130


def refuse_token(value: str) -> None:
    """An argparse type for options that look like they take a token."""
    raise argparse.ArgumentTypeError(
        "others can read command lines; set HF_TOKEN or use `hf auth login`, and revoke the token you gave"
    )


def command_help() -> dict[str, str]:
    """Command name -> first line of its module's docstring, read without importing the command."""
    summaries = {}
    for module in pkgutil.iter_modules(commands.__path__):
        source = (Path(commands.__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        summaries[module.name] = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    return summaries


if __name__ == "__main__":
    sys.exit(main())
