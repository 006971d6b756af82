"""The command `memtrain-cl`. Each command lives in a module of its own, imported only when it is called or listed.

A command module imports typer and the standard library at its top and the rest inside its functions, so that
`memtrain-cl --help` loads no torch. Exit codes: 0 well, 1 a check failed, 2 input that cannot be used (one sentence on
stderr), 130 interrupted.
"""

from __future__ import annotations

import importlib
import keyword
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import memtrain_cl
from memtrain_cl.errors import MemtrainError
from memtrain_cl.runtimes import share_cores

#: Command -> module of memtrain_cl.cli that holds a function of the command's name ("import_" for a name that Python
#: keeps to itself), in the order of --help.
COMMANDS = {
    "train": "train",
    "generate": "generate",
    "budget": "budget",
    "inspect": "files",
    "export": "files",
    "import": "importing",
    "doctor": "devices",
    "devices": "devices",
    "verify": "verify",
}


class LazyGroup(TyperGroup):
    """A command group that imports a command's module when that command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        function = getattr(importlib.import_module(f"memtrain_cl.cli.{module}"), name)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(function)
        return typer.main.get_command(single)


app = typer.Typer(cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memtrain-cl {memtrain_cl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models whose linear weights are 6-bit counters, on any OpenCL device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code. Unusable input is one sentence
    on stderr.
    """
    share_cores()
    # Some drivers talk about every program that they build; failed builds raise errors of their own.
    warnings.filterwarnings("ignore", message="Non-empty compiler output encountered")
    logging.basicConfig(level=logging.WARNING, format="memtrain-cl: %(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        result = typer.main.get_command(app).main(args=arguments, prog_name="memtrain-cl", standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        print(f"memtrain-cl: {sentence}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


def _sentence(error: Exception) -> str | None:
    """What to tell the user of an error about their input; None for an error that is ours."""
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own usage errors; their class has another home in each version of typer
        return str(format_message())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename is not None else "")
    if isinstance(error, (MemtrainError, ValueError, OSError)):
        return str(error)
    return None
