"""What happened in a run: metrics.jsonl, one JSON object a line."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

from txlcli import UserError
from txlcli.files import open_regular
from txlcli.run.folder import Run
from txlcli.run.json_object import parse_json

_METRICS_LINE_LIMIT_BYTES = 65_536


def append_metrics(run: Run, values: Mapping[str, object]) -> None:
    """Add one line to metrics.jsonl; numbers that are not finite become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    line = json.dumps(finite, allow_nan=False, ensure_ascii=False) + "\n"
    with run.metrics_path.open("ab") as file:
        file.write(line.encode())


def metrics_length(run: Run) -> int:
    """Measure metrics.jsonl in bytes.

    A checkpoint records this length, so the lines that it counts are made durable first.
    """
    try:
        with run.metrics_path.open("r+b") as file:  # some systems flush only what may be written
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def cut_metrics(run: Run, n_bytes: int) -> bool:
    """Cut metrics.jsonl to the length that a checkpoint recorded, so that no line comes twice.

    Returns:
        False if the file is shorter than that: somebody has edited it. Its whole lines are kept.
    """
    length = metrics_length(run)
    if length != n_bytes and length:
        with run.metrics_path.open("r+b") as file:
            file.truncate(n_bytes if length > n_bytes else _end_of_lines(file, length))
            os.fsync(file.fileno())
    return length >= n_bytes


def _end_of_lines(file: BinaryIO, length: int) -> int:
    """Return the byte after the last line that is whole: the next must not be written into a broken one."""
    start = max(length - _METRICS_LINE_LIMIT_BYTES, 0)
    file.seek(start)
    tail = file.read()
    return start + tail.rfind(b"\n") + 1 if b"\n" in tail else (0 if start == 0 else length)


def read_bits_per_byte(run: Run, step: int | None) -> float | None:
    """Find the held-out bits per byte that metrics.jsonl gives for `step`.

    The last step may have two scores: that of the slice, which chose the best, comes first.
    """
    # A summary does without: the file may be gone or cut by hand.
    with suppress(OSError, UserError), open(open_regular(run.metrics_path), "rb") as file:  # noqa: PTH123
        while line := file.readline(_METRICS_LINE_LIMIT_BYTES):
            if b'"eval"' in line:
                values = parse_json(line, run.metrics_path)
                if values.get("event") == "eval" and values.get("step") == step:
                    value = values.get("bits_per_byte")
                    return value if isinstance(value, float) else None
    return None
