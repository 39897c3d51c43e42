"""The run folder: where everything that a run was and is lies, and how to find it again.

    config.yaml                    the settings, each a plain value
    tokenizer.json, tokenizer.*    text to ids and back
    data/                          the store of training and held-out ids
    stdin.txt                      the text, only if it came through standard input
    metrics.jsonl                  one JSON object a line, `event` first
    checkpoints/step-0000100/      weights and exact training state (see checkpoint.py)
    pointers.json                  {"best": 80, "best_nll": 1.52, "last": 100}
    .lock                          only while something is written: who writes
    converted.json                 only in a run that was not trained but made of another program's checkpoint

A folder is a run when it has a `config.yaml`. Until the text is prepared that holds only what was asked for,
below a first line that says so, and nothing else in the folder counts. A checkpoint's folder appears whole or
not at all, so the newest one on disk is the last one. `pointers.json` is written after it: its time says
which run saved last, and it is the only place that knows which step is best. `best` and `best_nll` are null
before the first evaluation, and where the best checkpoint was lost; then best is last. Nothing here holds an
absolute path: a run may be moved and copied.

A run may be a link to a folder elsewhere, and files that are only read may be links. What is written, emptied
or deleted must lie in the run itself: a run from a stranger could else lead to any file of the user's.

Whoever writes holds the system's lock on `.lock` meanwhile, in which it says who it is. Whoever reads does
not ask for it, and begins again where what it was sent to has gone meanwhile.

A converted run has a checkpoint without training state, no text and no metrics, and maybe no tokenizer:

    {"kind": "nvidia", "n_vocab": 204, "has_tokenizer": true, "start_id": 0}
"""

from txlcli.run.checkpoints import (
    Pointers,
    choose_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_pointers,
    step_of,
    write_pointers,
)
from txlcli.run.conversion import (
    MAKERS,
    Conversion,
    load_run_tokenizer,
    read_conversion,
    refuse_converted,
    refuse_without_tokenizer,
    vocabulary_size,
    write_conversion,
)
from txlcli.run.folder import RUNS, Run, latest_run, list_runs, open_run, read_asked, write_asked
from txlcli.run.json_object import dump_json, parse_json
from txlcli.run.making import check_writable, discard_run, new_run
from txlcli.run.metrics import (
    append_metrics,
    cut_metrics,
    has_saved_metrics,
    metrics_length,
    read_bits_per_byte,
)
from txlcli.run.summary import RunSummary, describe_run
from txlcli.run.writer import sweep_run, writing

__all__ = [
    "MAKERS",
    "RUNS",
    "Conversion",
    "Pointers",
    "Run",
    "RunSummary",
    "append_metrics",
    "check_writable",
    "choose_checkpoint",
    "cut_metrics",
    "describe_run",
    "discard_run",
    "dump_json",
    "has_saved_metrics",
    "latest_run",
    "list_checkpoints",
    "list_runs",
    "load_run_tokenizer",
    "metrics_length",
    "new_run",
    "open_run",
    "parse_json",
    "prune_checkpoints",
    "read_asked",
    "read_bits_per_byte",
    "read_conversion",
    "read_pointers",
    "refuse_converted",
    "refuse_without_tokenizer",
    "step_of",
    "sweep_run",
    "vocabulary_size",
    "write_asked",
    "write_conversion",
    "write_pointers",
    "writing",
]
