"""`txl runs`."""

import sys
from pathlib import Path
from typing import Annotated

from txlcli import UserError
from txlcli.cli.app import command
from txlcli.cli.flags import JsonFlag, argument
from txlcli.report import Screen, json_text, runs_table


@command(examples=["txl runs", "txl runs experiments --json"])
def runs(
    folder: Annotated[str, argument("DIR", help="folder of runs", has_default=True)] = "runs",
    *,
    is_json: JsonFlag = False,
) -> None:
    """List the runs of a folder.

    Reads DIR and prints for each run its steps, its best held-out score, its tokenizer and its size on disk.
    """
    from txlcli.run import describe_run, list_runs

    screen, out = Screen.of(sys.stderr), Screen.of(sys.stdout)
    runs, summaries = list_runs(Path(folder)), []
    for run in runs:
        try:
            summaries.append(describe_run(run))
        except UserError as error:
            # One damaged run must not hide the others.
            screen.note(str(error))
    if is_json:
        from txlcli.config import flatten

        rows = [
            {
                "run": str(summary.run.folder),
                "step": summary.step,
                "steps": summary.steps,
                "best_step": summary.best_step,
                "best_nll": summary.best_nll,
                "best_bits_per_byte": summary.best_bits_per_byte,
                "tokenizer": summary.tokenizer,
                "n_vocab": summary.n_vocab,
                "bytes": summary.n_bytes,
                "settings": flatten(summary.config),
            }
            for summary in summaries
        ]
        out.write_text(json_text(rows, indent=1).encode() + b"\n")
    elif summaries:
        out.draw(runs_table(summaries, out.width))
    elif not runs:
        screen.note(f"{folder}: no runs here; train one with `txl train FILE`")
