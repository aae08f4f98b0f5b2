"""The ``harness`` command: its subcommands, and how errors become exit codes."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from harness.cli import (
    arm_commands,
    compare,
    data_commands,
    experiment_commands,
    list_commands,
    reward_commands,
)
from harness.errors import BAD_INPUT, CELL_FAILED, CellError, InputError

STOPPED = 130

app = typer.Typer(
    name="harness",
    help="Controlled benchmarking of PPO, GRPO and their relatives for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
experiment_commands.register(app)
compare.register(app)
list_commands.register(app)
arm_commands.register(app)
data_commands.register(app)
reward_commands.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; bad input ends in one line on stderr."""
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="harness", standalone_mode=False)
    except InputError as error:
        fail(error, BAD_INPUT)
    except CellError as error:
        fail(error, CELL_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        fail("stopped; the same command goes on from here", STOPPED)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(STOPPED)
    except OSError as error:
        fail(f"{error.filename or 'system'}: {error.strerror}", BAD_INPUT)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the command line itself
            fail(error.format_message(), BAD_INPUT)  # type: ignore[union-attr]
        raise
    else:
        if code == STOPPED:  # typer's own reading of Ctrl-C
            fail("stopped; the same command goes on from here", STOPPED)
        sys.exit(code if isinstance(code, int) else 0)


def fail(error: object, code: int) -> None:
    """One line on stderr, and out."""
    line = " ".join(str(error).split())
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
