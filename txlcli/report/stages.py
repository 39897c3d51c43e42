"""Stages that people wait for: a bar on a terminal, a few plain lines elsewhere."""

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from txlcli.report.screen import Screen
from txlcli.report.text import duration_text, size_text

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_S = 10.0
"""Seconds between lines about one stage, on a stream that is no terminal."""

_SPEED_S = 1.0
"""Seconds after which a stage has shown how fast it is."""


def open_bar(
    screen: Screen,
    layout: str,
    text: str,
    total: int | None,
    done: int = 0,
    *,
    is_scaled: bool = False,
    is_left: bool = False,
) -> "tqdm[NoReturn]":
    """Start a bar at the bottom of a terminal; `text` is the layout's `{desc}`."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread would redraw the bar behind our back
    bar: tqdm[NoReturn] = tqdm(
        desc=text,
        total=total,
        initial=done,
        file=screen.stream,
        bar_format=layout,
        dynamic_ncols=True,
        ascii=not screen.is_unicode,
        unit_scale=is_scaled,
        leave=is_left,
        colour="cyan" if screen.has_color else None,
    )
    return bar


def close_bar(bar: "tqdm[NoReturn] | None") -> None:
    """End a bar; a stream that went away must not hide what ended the work."""
    if bar is not None:
        with suppress(OSError):
            bar.close()


class Stages:
    """Shows one stage after the other: each has its own bar, or its own lines."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._bar: tqdm[NoReturn] | None = None
        self._stage = ""
        self._line_s = -math.inf
        self._begun = (0.0, 0)

    def show(self, stage: str, done: int, total: int, unit: str) -> None:
        """Say how far a stage is; `total` 0: not known."""
        if self.screen.is_quiet:
            return
        is_new = stage != self._stage or (self.screen.is_animated and self._bar is None)
        if is_new:
            self._begun = (time.monotonic(), done)
        if not self.screen.is_animated:
            self._show_line(stage, done, total, unit, is_new=is_new)
            return
        if is_new:
            self.close()
            self._stage = stage
            layout = "{desc}  {percentage:3.0f}% {bar} {n_fmt}/{total_fmt}{postfix}" if total else "{desc}"
            self._bar = open_bar(self.screen, layout, stage, total or None, done, is_scaled=True)
        assert self._bar is not None
        # The layout puts a comma before it.
        self._bar.set_postfix_str(", ".join(self._speed(done, total, unit)), refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        close_bar(self._bar)
        self._bar = None

    def _speed(self, done: int, total: int, unit: str) -> list[str]:
        """Return bytes a second and the time left, as soon as a stage has gone on for a moment."""
        elapsed_s, n_new = time.monotonic() - self._begun[0], done - self._begun[1]
        if unit != "bytes" or elapsed_s < _SPEED_S or n_new <= 0:
            return []
        left = [f"{duration_text((total - done) * elapsed_s / n_new)} left"] if total > done else []
        return [f"{size_text(n_new / elapsed_s)}/s", *left]

    def _show_line(self, stage: str, done: int, total: int, unit: str, *, is_new: bool) -> None:
        now_s = time.monotonic()
        if not is_new and now_s - self._line_s < _LINE_S:
            return
        whole = _amount(total, unit) if total else ""
        far = f"{_amount(done, unit)} of {whole}" if whole else _amount(done, unit) if done else ""
        amount = (whole or far) if is_new else ", ".join([far, *self._speed(done, total, unit)])
        self.screen.write(f"{stage}: {amount}" if amount else stage)
        self._stage, self._line_s = stage, now_s


def _amount(number: int, unit: str) -> str:
    return size_text(number) if unit == "bytes" else f"{number:,} {unit}"
