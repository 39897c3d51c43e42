"""Results as tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from txlcli.report.screen import results_table
from txlcli.report.text import escape_controls, escape_line, number_text, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from txlcli.config import Settings
    from txlcli.evaluate import Score, WindowScore
    from txlcli.run import RunSummary


def eval_table(scores: Sequence["Score"], mem_lens: Sequence[int], width: int) -> "Table":
    """One row for each memory length; `*`: longer than in training.

    Units that nobody knows are left out, and lesser columns where the window is narrow.

    Args:
        scores: The results.
        mem_lens: The memory lengths as asked for.
        width: Columns of the window.
    """
    through, per_word, per_character = "through\nlayers", "perplexity\n/word", "bits\n/char"
    marks = ["*" if score.is_beyond_training else " " for score in scores]
    columns = {
        "mem_len ": [f"{length:,}{mark}" for length, mark in zip(mem_lens, marks, strict=True)],
        "tgt_len": [f"{score.lengths.tgt_len:,}" for score in scores],
        "context": [_range(score.context_min, score.context_max) for score in scores],
        through: [f"{score.receptive_field:,}" for score in scores],
        "tokens": [f"{score.tokens:,}" for score in scores],
        "nats\n/token": [number_text(score.nll) for score in scores],
        "perplexity": [number_text(score.perplexity, 3) for score in scores],
        "bits\n/byte": [number_text(score.bits_per_byte) for score in scores],
        per_character: [number_text(score.bits_per_char) for score in scores],
        per_word: [number_text(score.word_perplexity, 1) for score in scores],
        "tokens/s": [number_text(score.tokens_per_s, 0) for score in scores],
    }
    return fit_table(_known(columns), width, lesser=(per_word, through, "tgt_len", "tokens", per_character))


def window_table(windows: Sequence["WindowScore"], mem_lens: Sequence[int], width: int) -> "Table":
    """One row for each memory length: a sliding window beside the evaluation with memory.

    Args:
        windows: The results.
        mem_lens: The memory lengths as asked for.
        width: Columns of the window that it is shown in.
    """
    deviation, side_by_side = "±", "side\nby side"
    columns = {
        "mem_len ": [f"{length:,} " for length in mem_lens],
        "window": [f"{window.attention_length:,}" for window in windows],
        "nats\nwindow": [number_text(window.nll) for window in windows],
        "nats\nmemory": [number_text(window.nll_with_memory) for window in windows],
        deviation: [number_text(window.nll_difference_se) for window in windows],
        "tokens/s\nwindow": [number_text(window.tokens_per_s, 1) for window in windows],
        "tokens/s\nmemory": [number_text(window.tokens_per_s_with_memory, 0) for window in windows],
        "ratio": [number_text(window.ratio, 1) for window in windows],
        "ideal": [number_text(window.ideal_ratio, 1) for window in windows],
        "share": [number_text(window.share_of_ideal, 2) for window in windows],
        side_by_side: [f"{window.batch_size}/{window.batch_size_with_memory}" for window in windows],
    }
    return fit_table(_known(columns), width, lesser=(side_by_side, deviation))


def _known(columns: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Leave out columns that say nothing."""
    return {name: cells for name, cells in columns.items() if set(cells) != {number_text(None)}}


def fit_table(
    columns: Mapping[str, Sequence[str]],
    width: int,
    *,
    lesser: Iterable[str],
    left: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> "Table":
    """Make a table of columns, the lesser ones left out in turn until it fits; see `results_table`."""
    from rich.text import Text

    shown = dict(columns)
    for name in lesser:
        if sum(_column_width(name, cells) + _GAP for name, cells in shown.items()) - _GAP > width:
            shown.pop(name, None)
    table = results_table(list(shown), left=left, whole=whole)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


_GAP = 2


def _column_width(name: str, cells: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, (*name.split("\n"), *cells)))


def column_names(table: "Table") -> list[str]:
    """Return the names of a table's columns, each on one line: what a legend may explain."""
    return [" ".join(str(column.header).split()) for column in table.columns]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def runs_table(summaries: Iterable["RunSummary"], width: int) -> "Table":
    """One row for each run.

    Args:
        summaries: The runs.
        width: Columns of the window; where it is narrow lesser columns are left out.
    """
    rows = list(summaries)
    columns = {
        "run": [escape_line(str(row.run.folder)) for row in rows],
        "model": [_model_text(row) for row in rows],
        "tokenizer": [f"{row.tokenizer} {row.n_vocab:,}" for row in rows],
        "step": [_step_text(row) for row in rows],
        "best step": ["–" if row.best_step is None else f"{row.best_step:,}" for row in rows],
        "nats/token": [number_text(row.best_nll) for row in rows],
        "bits/byte": [number_text(row.best_bits_per_byte) for row in rows],
        "size": [size_text(row.n_bytes) for row in rows],
    }
    left = ["run", "model", "tokenizer"]
    lesser = ("best step", "size", "model", "bits/byte")
    return fit_table(columns, width, lesser=lesser, left=left, whole=left[1:])


def _model_text(summary: "RunSummary") -> str:
    model = summary.config.model
    scheme = "" if model.position == "relative" else f" {model.position}"
    return f"{model.n_layer} × {model.d_model}{scheme}"


def _step_text(summary: "RunSummary") -> str:
    step = "–" if summary.step is None else f"{summary.step:,}"
    return step if summary.steps is None else f"{step}/{summary.steps:,}"


def settings_table(settings: "Settings") -> "Table":
    """All settings by section, each with its value and where it comes from."""
    from rich.table import Table
    from rich.text import Text

    from txlcli.config import LEAVES

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    section = ""
    for leaf in LEAVES:
        if leaf.section != section:
            section = leaf.section
            table.add_row(Text(section, style="bold"))
        found = settings[leaf.name]
        table.add_row(
            f"  {leaf.name}",
            Text(escape_controls(value_text(found.value))),
            Text(escape_controls(found.origin)),
        )
    return table


def presets_table(presets: Mapping[str, str]) -> "Table":
    """The presets with what each says of itself."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, summary in presets.items():
        table.add_row(Text(name), Text(escape_controls(summary)))
    return table


def value_text(value: object) -> str:
    """Write a setting's value as YAML would."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        # Numbers as their flag takes them.
        separator = "," if all(isinstance(item, int) for item in value) else " "
        return separator.join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
