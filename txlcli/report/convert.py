"""What became of another program's checkpoint."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from txlcli.report.screen import results_table
from txlcli.report.text import count_text, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from txlcli.convert import Converted, Row

_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)", re.ASCII)
_ROWS = re.compile(r"rows ([\d,]+) to ([\d,]+) of")
_NAMES = ["their tensor", "ours", "shape", "what was done"]
_DROPPED = "–"
_NEWLINES = {
    "keep": "a newline is a symbol",
    "drop": "newlines are left out of the text",
    "eos": "a newline is the word {newline}",
}
_TEXTS = {
    "byte": "bytes, {n_vocab:,} of the 256",
    "char": "{n_vocab:,} characters",
    "word": "{n_vocab:,} words, split at white space",
}


class _Line(NamedTuple):
    """A row of the table: texts of its cells."""

    source: str
    target: str
    shape: str
    what: str


def tensors_table(rows: Sequence["Row"], width: int) -> "RenderableType":
    """One row for each tensor, or for those of all layers; in a narrow window two lines for each.

    Args:
        rows: What became of each tensor.
        width: Columns of the window.
    """
    from rich.text import Text

    lines = list(_fold(rows))
    if (
        sum(max(map(len, (name, *cells))) + 2 for name, cells in zip(_NAMES, _columns(lines), strict=True))
        > width
    ):
        return Text("\n".join(_narrow(lines, width)))
    table = results_table(_NAMES, left=_NAMES)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _columns(lines: Sequence[_Line]) -> Iterable[tuple[str, ...]]:
    return zip(*lines, strict=True) if lines else [()] * len(_NAMES)


def _fold(rows: Iterable["Row"]) -> Iterable[_Line]:
    """Join the rows of layers that are treated alike."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        source, target = _LAYER.sub("N", row.source), _LAYER.sub("N", row.target or "")
        # Layers that fill one tensor of ours differ in which of its rows they fill.
        is_part = source != row.source and target == row.target
        what = _ROWS.sub("", row.what) if is_part else _LAYER.sub("N", row.what)
        groups.setdefault((source, target, row.shape, what), []).append(row)
    for group in groups.values():
        first, last = group[0], group[-1]
        yield _Line(
            source=_range(first.source, last.source),
            target=_range(first.target or _DROPPED, last.target or _DROPPED),
            shape=" × ".join(f"{n:,}" for n in first.shape),
            what=_range(_join_rows(first.what, last.what), last.what),
        )


def _range(first: str, last: str) -> str:
    """Write the layers of two names as a range: `layers.0–17.`."""
    number = _LAYER.search(last)
    if first == last or number is None:
        return first
    return _LAYER.sub(lambda match: f"{match[0]}–{number[0]}", first, count=1)


def _join_rows(first: str, last: str) -> str:
    """Write two stretches of rows as one, from the first's beginning to the last's end."""
    end = _ROWS.search(last)
    return (
        first if end is None else _ROWS.sub(lambda match: f"rows {match[1]} to {end[2]} of", first, count=1)
    )


def _narrow(lines: Sequence[_Line], width: int) -> Iterable[str]:
    """Their name on a line of its own, ours with shape and what was done below it."""
    n_name = max(len(line.target) for line in lines) + 2
    n_shape = max(len(line.shape) for line in lines)
    yield "their tensor"
    yield f"  {'ours':{n_name}}{'shape':{n_shape}}  what was done"
    yield "─" * width
    last = None
    for line in lines:
        if line.source != last:
            yield line.source
        last = line.source
        if line.target == _DROPPED:
            yield from _wrap(f"  {line.what}", width)
            continue
        head = f"  {line.target:{n_name}}{line.shape:{n_shape}}  "
        yield from _wrap(head + line.what, width, n_indent=len(head))


def _wrap(text: str, width: int, n_indent: int = 4) -> list[str]:
    """Break what is too long for the window between words; the first `n_indent` columns stay as they are."""
    head, rest = text[:n_indent], text[n_indent:]
    room = max(width - n_indent, 20)
    lines = textwrap.wrap(rest, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [head + lines[0], *(" " * n_indent + line for line in lines[1:])]


def converted_facts(converted: "Converted") -> list[tuple[str, str]]:
    """The conventions of the source that the run keeps, in named lines."""
    from txlcli.run import MAKERS

    model = converted.config.model
    starts = {"empty": "begins empty", "zeros": "begins as mem_len rows of zeros"}
    keys = {"off": "all keys before it", "mem_len": "mem_len keys", "mem_len+1": "mem_len + 1 keys"}
    clamp = "each has its own" if model.clamp_len is None else f"alike from clamp_len {model.clamp_len:,} on"
    place: str = model.norm
    if model.norm == "pre":
        place += " · one more after the last layer" if model.final_norm else " · none after the last layer"
    step = f" · step {converted.step:,}" if converted.step else ""
    return [
        ("source", f"{one_line(str(converted.source))} · {MAKERS[converted.kind]}{step}"),
        ("run", f"{one_line(str(converted.run.folder))} · {count_text(converted.n_parameters)} weights"),
        ("memory", f"{starts[model.memory_start]} · mem_len {model.mem_len:,} · tgt_len {model.tgt_len:,}"),
        ("keys", f"a query sees {keys[model.same_length]} · same_length {model.same_length}"),
        ("distances", clamp),
        ("norm", f"{place} · norm_eps {model.norm_eps:g}"),
        ("text", _text(converted)),
    ]


def _text(converted: "Converted") -> str:
    """What text the vocabulary reads, and how."""
    from txlcli.tokenizer import CorpusWordTokenizer

    data, tokenizer = converted.config.data, converted.tokenizer
    if tokenizer is None:
        return "no vocabulary: no text can be read or written"
    newline = tokenizer.newline if isinstance(tokenizer, CorpusWordTokenizer) else ""
    units = _TEXTS[data.tokenizer].format(n_vocab=converted.n_vocab)
    spaces = " · a space is an underscore" if data.spaces == "underscore" else ""
    return f"{units} · {_NEWLINES[data.newlines].format(newline=newline)}{spaces}"
