"""The commands of ``pp-offload``, and what is said when one is used wrongly.

Whatever a user gives that cannot be right is a ``typer.BadParameter``: one message, which says what
was found, what was expected and what to do, and exit code 2.
"""

from __future__ import annotations

import platform
from typing import Annotated

import torch
import typer

from pp_offload import __version__
from pp_offload.cli.compare import compare
from pp_offload.cli.doctor import doctor
from pp_offload.cli.plan import plan
from pp_offload.cli.profile import profile
from pp_offload.cli.simulate import simulate
from pp_offload.cli.sweep import sweep
from pp_offload.cli.trace import trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, which can be pasted
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(simulate)
app.command()(profile)
app.command()(plan)
app.command()(sweep)
app.command()(trace)
app.command()(compare)
app.command()(doctor)


def version_line() -> str:
    """The versions that a bug report needs first."""
    return (
        f"pp_offload {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print versions, and exit."
        ),
    ] = False,
) -> None:
    """Activation offload for PyTorch: what it costs, what is to leave, what happened in a step."""
