"""Flags: one for each setting, and those that several commands share."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from txlcli import UserError, config


def option(
    *names: str,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    number: type[int] | type[float] | None = None,
    has_default: bool = False,
    may_be_empty: bool = False,
) -> Any:  # typer's own
    """Declare a flag of a command; without a metavar it is a yes/no.

    Args:
        names: The flag, and other names for it.
        help: A noun phrase with its unit.
        metavar: The word that stands for the value.
        panel: Title of its group.
        number: The value is a number of this type.
        has_default: Its default is a value to show.
        may_be_empty: An empty text is a value; else it is refused.
    """
    return typer.Option(
        *names,
        metavar=metavar or "",
        # In help text brackets are markup.
        help=help.replace("[", "\\["),
        rich_help_panel=panel,
        show_default=has_default,
        parser=None if metavar is None else _Parser(names[0], number, may_be_empty=may_be_empty),
    )


def argument(metavar: str, *, help: str, has_default: bool = False) -> Any:  # typer's own
    """Declare an argument of a command; empty it is refused."""
    return typer.Argument(metavar=metavar, help=help, show_default=has_default, parser=_Parser(metavar))


class _Parser:
    """Reads the text after a flag or a number out of it, with an error in our own words.

    An empty text is refused: as a path it would be the working folder.
    """

    __name__ = "value"  # typer asks for it

    def __init__(
        self, flag: str, number: type[int] | type[float] | None = None, *, may_be_empty: bool = False
    ) -> None:
        self.flag, self.number, self.may_be_empty = flag, number, may_be_empty

    def __call__(self, value: str | float) -> str | float:
        """Read it; a default is what it should be already."""
        if value == "" and not self.may_be_empty:
            raise UserError(f"{self.flag}: must not be empty; got ``")
        if self.number is None or not isinstance(value, str):
            return value
        number = config.read_number(value, self.number)
        if number is None:
            kind = "a whole number" if self.number is int else "a number"
            raise UserError(f"{self.flag}: must be {kind}; got `{value}`")
        return number


def _settings_parameters() -> list[inspect.Parameter]:
    """One flag for each setting; None where it is not given."""
    parameters = []
    for leaf in config.LEAVES:
        if leaf.flag is None:
            continue
        names = leaf.flag if leaf.negative_flag is None else f"{leaf.flag}/{leaf.negative_flag}"
        metavar = leaf.metavar if leaf.negative_flag is None else None
        flag = option(names, metavar=metavar, help=leaf.option_help, panel=leaf.panel)
        kind = {"bool": bool, "paths": list[str]}.get(leaf.kind, str)
        annotation = Annotated[kind | None, flag]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(leaf.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return parameters


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of its `**flags`, one flag for each setting."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *_settings_parameters()])  # type: ignore[attr-defined]
    return command


def setting(name: str, value: object) -> Any:  # Any: the setting's own type
    """Check a plain parameter that has the name and bounds of a setting; None where it was not given."""
    return None if value is None else config.parse(config.leaf(name), value, config.FLAG)


def parse_mem_lens(text: str) -> tuple[int, ...]:
    """Read `0,128,512`: memory lengths in the given order, spaces and repetitions allowed."""
    lengths = []
    for item in text.split(","):
        digits = item.strip()
        length = config.read_number(digits, int)
        if length is None or not 0 <= length <= 999_999_999:
            shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
            raise UserError(
                f"--mem-len: each length must be a whole number from 0 to 999999999; got `{shown}`;"
                " write such as 0,128,512"
            )
        lengths.append(int(length))
    return tuple(lengths)


MACHINE, SAMPLING, SCORING = "Machine", "Sampling", "Scoring"

RunFlag = Annotated[
    str | None, option("--run", metavar="DIR", help="the run; else the one under runs/ that saved last")
]
CheckpointFlag = Annotated[
    str,
    option("--checkpoint", metavar="best|last|STEP", help="which of the run's checkpoints", has_default=True),
]
DeviceFlag = Annotated[
    str,
    option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps", panel=MACHINE, has_default=True
    ),
]
PrecisionFlag = Annotated[
    str,
    option(
        "--precision",
        metavar="auto|fp32|bf16|fp16",
        help="arithmetic of matrix products",
        panel=MACHINE,
        has_default=True,
    ),
]
AttentionFlag = Annotated[
    str,
    option(
        "--attention",
        metavar="|".join(config.leaf("attention").choices),
        help=config.leaf("attention").help,
        panel=MACHINE,
        has_default=True,
    ),
]
ThreadsFlag = Annotated[str | None, option("--threads", metavar="N", help="CPU threads", panel=MACHINE)]
DeterministicFlag = Annotated[
    bool, option("--deterministic", help=config.leaf("deterministic").help, panel=MACHINE)
]
MosesFlag = Annotated[
    bool,
    option(
        "--moses",
        help="text is raw, as books are; split it into words as WikiText-103 is (newlines eos only)",
    ),
]
QuietFlag = Annotated[bool, option("--quiet", help="nothing on stderr but errors and warnings of damage")]
JsonFlag = Annotated[bool, option("--json", help="print JSON")]
