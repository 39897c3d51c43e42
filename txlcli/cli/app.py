"""The program without its commands."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from txlcli import __version__
from txlcli.cli.errors import Commands
from txlcli.report import Screen

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to the program as a command; its help is its docstring and the examples."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        lines = "\n".join(f"  {example}" for example in examples)
        # After \b click leaves line ends as they are.
        paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
        text = f"{paragraphs}\n\n\b\nExamples:\n{lines}"
        app.command(name, help=text)(function)
        return function

    return add


def _show_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    import platform

    from txlcli.attention import BACKENDS, Demands
    from txlcli.device import choose_device, environment, has_bf16

    device = choose_device("auto")
    facts = environment(device, "fp32")
    threads = f"{facts['threads']} CPU thread{'' if facts['threads'] == 1 else 's'}"
    bf16 = "bf16 in hardware" if has_bf16(device) else "no bf16 in hardware"
    refusals = {name: backend.refuses(Demands(device)) for name, backend in BACKENDS.items()}
    forms = (name if reason is None else f"no {name} ({reason})" for name, reason in refusals.items())
    Screen.of(sys.stdout).write(
        f"txl {__version__}\n"
        f"python {platform.python_version()} on {platform.platform()}\n"
        f"torch {facts['torch']}, {threads}\n"
        f"device {device}: {facts['processor']}, {bf16}\n"
        f"attention {', '.join(forms)}"
    )
    raise typer.Exit


_HELP = """Transformer-XL: train on any text, score it exactly, continue it.

\b
Two commands from a text file to a model and its text:
  txl train corpus.txt
  txl generate --prompt "Once upon a time"
"""


@app.callback(invoke_without_command=True, help=_HELP)
def txl(
    context: typer.Context,
    is_version_wanted: Annotated[
        bool,
        typer.Option(
            "--version",
            help="versions, device and backends, for bug reports",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Show the help where no command is named."""
    if context.invoked_subcommand is None:
        Screen.of(sys.stdout).write(context.get_help())
