"""A stream, what it can show, and how text gets there."""

import io
import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from txlcli.report.text import escape_controls, escape_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_PIPE_WIDTH = 200
"""Columns where no window limits them."""

_LEGEND_WIDTH = 100
"""Columns of what explains a table, where no window limits them."""

# Our own decoration in ASCII, for streams that are not Unicode.
_ASCII = str.maketrans(
    {"·": "-", "×": "x", "–": "-", "…": "...", "→": "->", "»": ">", "─": "-", "━": "-", "═": "=", "│": "|"}
    | dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╶╴╺╸", "+")
)


@dataclass(frozen=True)
class Screen:
    """A stream and what it can show.

    Attributes:
        stream: stdout or stderr.
        is_terminal: Somebody looks at it.
        is_animated: Lines may be drawn over: a terminal that is not `dumb`.
        has_color: Colour is welcome: animated, and no NO_COLOR in the environment (no-color.org).
        is_unicode: Its encoding holds every character.
        width: Columns; a wide fixed number where it is no terminal.
        is_quiet: Nothing is written but warnings.
    """

    stream: TextIO
    is_terminal: bool
    is_animated: bool
    has_color: bool
    is_unicode: bool
    width: int
    is_quiet: bool = False

    @classmethod
    def of(cls, stream: TextIO, *, is_quiet: bool = False) -> "Screen":
        """Look at a stream and the environment."""
        is_terminal = stream.isatty()
        is_animated = is_terminal and os.environ.get("TERM", "") != "dumb"
        return cls(
            stream=stream,
            is_terminal=is_terminal,
            is_animated=is_animated,
            has_color=is_animated and not os.environ.get("NO_COLOR"),
            is_unicode=(stream.encoding or "").lower().replace("-", "").startswith("utf"),
            width=shutil.get_terminal_size().columns if is_terminal else _PIPE_WIDTH,
            is_quiet=is_quiet,
        )

    def write(self, text: str) -> None:
        """Write lines of our own, as far as the stream's encoding can show them."""
        if not self.is_quiet:
            self.stream.write(self.fit(text) + "\n")
            self.stream.flush()

    def write_text(self, source: bytes) -> None:
        """Write text of a model or user as it is, in UTF-8; on a terminal with its control codes escaped."""
        if self.is_terminal:
            source = escape_controls(source.decode("utf-8", "replace")).encode()
        self.stream.flush()
        self.stream.buffer.write(source)
        self.stream.buffer.flush()

    def note(self, text: str) -> None:
        """Write a line about something that the user should know."""
        self.write(self.noted(text))

    def warn(self, text: str) -> None:
        """Write a line about something that was lost, also where all else is quiet."""
        replace(self, is_quiet=False).write(f"{self.style('warning', 'yellow')}: {escape_line(text)}")

    def noted(self, text: str) -> str:
        """Return the line that `note` writes."""
        return f"{self.style('note', 'yellow')}: {escape_line(text)}"

    def aside(self, text: str) -> None:
        """Write a line that need not be read."""
        self.write(self.style(escape_line(text), "dim"))

    def draw(self, renderable: "RenderableType") -> None:
        """Write a table or styled text."""
        self.write(self.render(renderable))

    def explain(self, rows: Iterable[tuple[str, str]]) -> None:
        """Write what results rest on as a block of names and values, no wider than the window.

        Where there is none, lines end at a space before column 100, so that no word is broken.
        """
        rows = list(rows)
        if not self.is_terminal:
            width = _LEGEND_WIDTH - max((len(name) for name, _ in rows), default=0) - 2
            rows = [(name, _wrap(value, width)) for name, value in rows]
        self.draw(facts_table(rows))

    def render(self, renderable: "RenderableType") -> str:
        """Return what `draw` writes, without line ends at its end."""
        from rich.console import Console

        file = io.StringIO()
        console = Console(
            file=file,
            width=self.width,
            force_terminal=self.has_color,
            color_system="standard" if self.has_color else None,
            legacy_windows=False,
            markup=False,
            highlight=False,
            emoji=False,
        )
        console.print(renderable)
        return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))

    def fit(self, text: str) -> str:
        """Replace what the stream's encoding cannot show."""
        if self.is_unicode:
            return text.encode("utf-8", "replace").decode()
        encoding = self.stream.encoding or "ascii"
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)

    def style(self, text: str, style: str) -> str:
        """Dress a text of one line, where colour is welcome: `bold`, `dim`, `red`, `green`, `yellow`."""
        codes = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
        return f"\x1b[{codes[style]}m{text}\x1b[0m" if self.has_color else text


def _wrap(text: str, width: int) -> str:
    """Break lines at spaces alone; a word that is wider stays whole."""
    lines = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join(part for parts in lines for part in parts or [""])


def facts_table(rows: Iterable[tuple[str, str]], *, style: str = "dim") -> "Table":
    """A block of names and values in two columns; long values fold under themselves."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(escape_controls(value)))
    return table


def results_table(names: Sequence[str], *, left: Sequence[str] = (), whole: Sequence[str] = ()) -> "Table":
    """An empty table of results; numbers to the right, the columns of `left` to the left.

    Only the columns of `left` that are not `whole` are folded where the window is narrow.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False
    )
    for name in names:
        is_left = name in left
        is_whole = not is_left or name in whole
        table.add_column(name, justify="left" if is_left else "right", no_wrap=is_whole, overflow="fold")
    return table
