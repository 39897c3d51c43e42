"""What people see: draws events and results, computes nothing but how to show them.

Results go to stdout, everything else to stderr. A stream that is no terminal gets plain lines at intervals:
no animation, no colour, no control codes. What a stream's encoding cannot show is replaced, never an error;
text of users and models is never read as markup.
"""

from txlcli.report.bench import bench_table, comparison_table
from txlcli.report.convert import converted_facts, tensors_table
from txlcli.report.screen import Screen, facts_table
from txlcli.report.stages import Stages
from txlcli.report.tables import (
    column_names,
    eval_table,
    presets_table,
    runs_table,
    settings_table,
    value_text,
    window_table,
)
from txlcli.report.text import (
    count_text,
    escape_controls,
    escape_line,
    json_text,
    one_line,
)
from txlcli.report.training import Training

__all__ = [
    "Screen",
    "Stages",
    "Training",
    "bench_table",
    "column_names",
    "comparison_table",
    "converted_facts",
    "count_text",
    "escape_controls",
    "escape_line",
    "eval_table",
    "facts_table",
    "json_text",
    "one_line",
    "presets_table",
    "runs_table",
    "settings_table",
    "tensors_table",
    "value_text",
    "window_table",
]
