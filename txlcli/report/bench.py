"""Measurements as tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from txlcli.report.screen import results_table
from txlcli.report.tables import fit_table
from txlcli.report.text import number_text, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from txlcli.bench import Comparison, Measured


def bench_table(rows: Sequence["Measured"], width: int) -> "Table":
    """One row for each kind of work; the form of attention is named where it is not the same everywhere.

    Args:
        rows: The results.
        width: Columns of the window; where it is narrow lesser columns are left out.
    """
    columns = {
        "work": [row.what.replace("attention+", "  +") for row in rows],
        "streams\n× tokens": [f"{row.n_stream:,} × {row.n_query:,}" for row in rows],
        "type": [row.precision for row in rows],
        "attention": [row.attention for row in rows],
        "tokens/s": [_speed(row.tokens_per_s_mean) for row in rows],
        "± sd": [_speed(row.tokens_per_s_sd) for row in rows],
        "× eager": [f"{row.ratio_to_eager:.2f}" for row in rows],
        "peak\nmemory": [_size(row.peak_memory_bytes) for row in rows],
        "eager\npeak": [_size(row.eager_peak_memory_bytes) for row in rows],
        "of matmul\nlimit": [_share(row.share_of_matmul_limit) for row in rows],
    }
    if len(set(columns["attention"])) == 1:
        del columns["attention"]
    left = ["work", "type", "attention"]
    lesser = ("eager\npeak", "± sd", "of matmul\nlimit")
    return fit_table(columns, width, lesser=lesser, left=left, whole=left)


def comparison_table(comparisons: Sequence["Comparison"]) -> "Table":
    """One row for each form of attention that can run here, and precision."""
    names = ["attention", "type", "error", "of\nallowed", "gradient\nerror", "of\nallowed", "agrees"]
    left = ["attention", "type"]
    table = results_table([*names, "tokens/s", "× eager"], left=left, whole=left)
    for compared in comparisons:
        errors = compared.errors
        if errors is None:
            continue
        table.add_row(
            compared.attention,
            compared.precision,
            f"{errors.forward:.1e}",
            _share(errors.forward_share),
            f"{errors.gradient:.1e}",
            _share(errors.gradient_share),
            "yes" if compared.agrees else "NO",
            _speed(compared.tokens_per_s_mean),
            number_text(compared.ratio_to_eager, 2),
        )
    return table


def _speed(tokens_per_s: float | None) -> str:
    """Write a speed or its deviation: whole numbers from 100 on, three figures below."""
    if tokens_per_s is None or tokens_per_s >= 99.95:
        return number_text(tokens_per_s, 0)
    return f"{tokens_per_s:.3g}"


def _size(n_bytes: int | None) -> str:
    return number_text(None) if n_bytes is None else size_text(n_bytes)


def _share(share: float) -> str:
    percent = 100 * share
    if not percent < 1000:
        return f"{share:.2g} ×"
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"
