"""A training as people see it: the plan, one progress bar, evaluations with a line of text, the end."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from txlcli.files import shell_name
from txlcli.report.screen import Screen, facts_table
from txlcli.report.stages import Stages, close_bar, open_bar
from txlcli.report.text import (
    count_text,
    duration_text,
    escape_line,
    number_text,
    one_line,
    size_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from tqdm import tqdm

    from txlcli.config import DataConfig, ModelConfig
    from txlcli.evaluate import Score
    from txlcli.sources import Source
    from txlcli.train import Evaluated, Event, Finished, FirstLine, Found, Planned, PlanSummary, Stepped

_LISTED = 10
"""Files that a plan lists one by one."""

_LINES_PER_RUN = 30
"""Progress lines that a run writes to a stream that is no terminal."""


class Training:
    """Draws the events of a training: plan, one progress bar, evaluations with a line of text, the end.

    On a terminal one bar stays at the bottom and everything else scrolls above it. Elsewhere the bar's
    numbers come as plain lines, some tens a run. The plan and the way go to stderr, the result to stdout.
    """

    def __init__(self, screen: Screen, results: Screen, *, is_dry_run: bool = False) -> None:
        self.screen, self.results = screen, results
        self._plan_screen = results if is_dry_run else screen
        self._stages = Stages(screen)
        self._bar: tqdm[NoReturn] | None = None
        self._started_s = time.monotonic()
        self._first: Stepped | None = None
        self._first_s = 0.0
        self._lines_done = 0
        self._scope = ""
        self._best_scope = ""
        self._is_hushed = False

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_bars()

    def hush(self) -> None:
        """Write nothing but the result from now on."""
        self._close_bars()
        self.screen = replace(self.screen, is_quiet=True)
        self._is_hushed = True

    def show(self, event: "Event") -> None:
        """Draw one event."""
        from txlcli import train

        if isinstance(event, train.Finished):
            self._close_bars()
            self._finished(event)
        elif isinstance(event, train.Planned | train.FirstLine | train.Found):
            self._close_bars()
            self._planned(event)
        elif isinstance(event, train.Ready):
            self._close_bars()
            told = escape_line(str(event.run.folder))
            if event.step:
                told += f" · goes on at step {event.step:,} of {event.config.train.steps:,}"
            self.screen.write(f"{self.screen.style('run', 'dim')}  {told}")
        elif isinstance(event, train.Evaluated):
            self._evaluated(event)
        elif isinstance(event, train.Notice) and event.is_damage and not self._is_hushed:
            self._close_bars()
            self.screen.warn(event.text)
        elif self.screen.is_quiet:
            return
        elif isinstance(event, train.Progress):
            # An evaluation in between leaves the bar of the training standing; a check that it waits for not.
            if self._first is None or event.unit == "bytes":
                self._take_bar()
                self._stages.show(event.stage, event.done, event.total, event.unit)
        elif isinstance(event, train.Stepped):
            self._stepped(event)
        elif isinstance(event, train.Sampled):
            self._sampled(event.text)
        elif isinstance(event, train.Notice):
            self._line(self.screen.noted(event.text))
        elif isinstance(event, train.Skipped):
            self._line(self.screen.noted(f"step {event.step:,}: no update, {event.reason}"))

    def _planned(self, event: "Planned | FirstLine | Found") -> None:
        from txlcli import train

        screen = self._plan_screen
        if isinstance(event, train.Planned):
            screen.draw(_panel("plan", plan_facts(event.summary), screen))
        elif isinstance(event, train.Found):
            screen.draw(facts_table(found_facts(event)))
        else:
            screen.draw(facts_table(first_line_facts(event)))

    def _line(self, text: str) -> None:
        if self._bar is None:
            self._stages.close()
            self.screen.write(text)
            return
        self._bar.clear()
        self.screen.write(text)
        self._bar.refresh()

    def _close_bars(self) -> None:
        self._stages.close()
        close_bar(self._bar)
        self._bar = None

    def _take_bar(self) -> None:
        """Take the bar of the training away until the next step."""
        if self._bar is not None:
            self._bar.leave = False
        close_bar(self._bar)
        self._bar = None

    def _stepped(self, event: "Stepped") -> None:
        self._stages.close()
        if self._first is None:
            self._first, self._first_s = event, time.monotonic()
        if not self.screen.is_animated:
            n_lines = event.step * _LINES_PER_RUN // event.steps
            if n_lines > self._lines_done or event is self._first:
                self._lines_done = n_lines
                speed = f"{event.tokens_per_s:,.0f} tokens/s"
                self.screen.write(f"step {event.step:,}/{event.steps:,}  {self._numbers(event, speed)}")
            return
        # Short, so that there is room for the bar in a window of 80 columns.
        numbers = self._numbers(event, f"{count_text(event.tokens_per_s).replace(' ', '')} tok/s")
        if self._bar is None:
            layout = "{bar} {n:,}/{total:,}  {desc}"
            self._bar = open_bar(self.screen, layout, numbers, event.steps, event.step, is_left=True)
        self._bar.set_description_str(numbers, refresh=False)
        self._bar.update(event.step - self._bar.n)

    def _numbers(self, event: "Stepped", speed: str) -> str:
        left = ""
        if self._first is not None and event.step > self._first.step:
            step_s = (time.monotonic() - self._first_s) / (event.step - self._first.step)
            left = f"  {duration_text(step_s * (event.steps - event.step))} left"
        numbers = f"loss {event.loss:.3f}  {event.bits_per_byte:.3f} bits/byte  lr {event.lr:.1e}"
        return f"{numbers}  {speed}{left}"

    # Evaluations.

    def _evaluated(self, event: "Evaluated") -> None:
        scope = f"{'all' if event.is_whole else 'first'} {event.score.tokens + 1:,} tokens"
        # A scope that stays is said once.
        shown = f" · {scope}" if scope != self._scope else ""
        self._scope = scope
        if event.is_best:
            self._best_scope = scope
        mark = self.screen.style("  best", "green") if event.is_best else ""
        step = self.screen.style(f"step {event.step:,}", "bold")
        self._line(f"{step}  held out {score_text(event.score)}{shown}{mark}")

    def _sampled(self, text: str) -> None:
        from rich.text import Text

        sample = Text(f"  » {one_line(text)}")
        sample.truncate(self.screen.width, overflow="ellipsis")
        self._line(self.screen.style(sample.plain, "dim"))

    def _finished(self, event: "Finished") -> None:
        elapsed_s = None if self._first is None else time.monotonic() - self._started_s
        self.results.draw(
            facts_table(finished_facts(event, elapsed_s, self._scope, self._best_scope), style="bold")
        )
        folder = shell_name(event.run.folder)
        mem_lens = ",".join(str(factor * event.mem_len) for factor in (0, 1, 2, 4))
        hints = [
            f"txl generate --run {folder} --prompt 'Once'",
            f"txl eval {'' if event.has_valid else 'FILE '}--run {folder} "
            f"--mem-len {mem_lens if event.mem_len else '0,64,128'}",
        ]
        if event.has_test:
            hints.append(f"txl eval --run {folder} --split test")
        if event.reason in ("interrupted", "stop_at"):
            hints.insert(0, f"txl train --resume {folder}")
        self.screen.draw(facts_table([("next" if i == 0 else "", hint) for i, hint in enumerate(hints)]))


def plan_facts(summary: "PlanSummary") -> list[tuple[str, str]]:
    """What is about to be trained, in named lines."""
    config = summary.config
    model, optim = config.model, config.optim
    held_out = (
        f"{summary.n_valid_tokens:,} held out" if summary.n_valid_tokens else "nothing held out, best is last"
    )
    epochs = f"{summary.epochs:,.{2 if summary.epochs < 10 else 0}f}"
    parts = "" if optim.accumulate == 1 else f" in {optim.accumulate} parts"
    total, embedding, rest = (
        count_text(n) for n in (summary.n_embedding + summary.n_rest, summary.n_embedding, summary.n_rest)
    )
    lengths = f"tgt_len {model.tgt_len} · mem_len {model.mem_len}"
    size = f"{model.n_layer} layers of {model.d_model} · {model.n_head} heads of {model.d_head}"
    longest = -(-max(summary.n_train_tokens - 1, 1) // optim.batch_size)
    streams = f"{optim.batch_size} stream{'s' * (optim.batch_size != 1)}"
    length = min(model.tgt_len, longest)
    step = f"{streams} × {length} token{'s' * (length != 1)}{parts}"
    compiled = " · compiled" if config.machine.compile else ""
    rate = f"lr {optim.lr:g} · {optim.schedule} · warm-up {optim.warmup:,} steps"
    facts = [
        ("text", f"{escape_line(' '.join(summary.corpus))} · {size_text(summary.n_bytes)}"),
        *_documents_facts(summary.found, is_reset=model.reset_memory_at_documents),
        *([("held out", _held_out_text(summary.found))] if summary.n_valid_tokens else []),
        ("tokens", f"{summary.n_train_tokens:,} to learn from · {held_out}"),
        ("vocabulary", f"{summary.tokenizer} · {summary.n_vocab:,}{_text_rules(config.data)}"),
        *([("embeddings", embeddings)] if (embeddings := _embeddings_text(model)) else []),
        ("model", f"{size} · {lengths}"),
        ("positions", _positions_text(model)),
        ("parameters", f"{total} = {embedding} embedding + {rest} rest"),
        ("steps", f"{summary.steps:,} of {step} · {epochs} epochs"),
        ("optimizer", f"{optim.optimizer} · {rate}"),
        ("machine", f"{summary.device} · {summary.precision} · attention {summary.attention}{compiled}"),
        ("memory", f"about {size_text(summary.memory_bytes)}"),
    ]
    if summary.expected_s is not None:
        end = time.strftime("%H:%M", time.localtime(time.time() + summary.expected_s))
        facts.append(("end", f"about {end}, in {duration_text(summary.expected_s)}"))
    return facts


def found_facts(event: "Found") -> list[tuple[str, str]]:
    """Which files were found and skipped, in named lines."""
    corpus = event.corpus
    facts = _list_facts("sources", [_source_text(source) for source in corpus.sources])
    facts += _list_facts("skipped", [f"{one_line(str(path))} · {why}" for path, why in corpus.skipped])
    if event.valid is not None:
        facts += _list_facts("valid", [_source_text(source) for source in event.valid.sources])
    if event.test is not None:
        facts += _list_facts("test", [_source_text(source) for source in event.test.sources])
    return facts


def _list_facts(name: str, values: Sequence[str]) -> list[tuple[str, str]]:
    """The first of some values below one another, and how many there are where that is not seen."""
    shown = [*values[:_LISTED]]
    if len(values) > _LISTED:
        shown.append(f"and {len(values) - _LISTED:,} more; {len(values):,} in all")
    return [(name if index == 0 else "", value) for index, value in enumerate(shown)]


def _source_text(source: "Source") -> str:
    packing = ""
    if source.packing != "none":
        packing = f" unpacked · {source.packing}, {size_text(source.stored_bytes)} packed"
    return f"{source.name} · {size_text(source.n_bytes)}{packing} · {source.codec}"


def _documents_facts(event: "Found", *, is_reset: bool) -> list[tuple[str, str]]:
    """How many documents there are, what one is, and whether memory ends with them; nothing without any."""
    corpus, n_documents = event.corpus, event.survey.n_documents
    if n_documents is None:
        return []
    if corpus.text_field is not None:
        rule = f"JSON lines, field {one_line(corpus.text_field)}"
    elif corpus.document_separator is not None:
        rule = f"separated by {one_line(corpus.document_separator)}"
    else:
        rule = "one per file"
    memory = "memory ends with each" if is_reset else "memory goes on through them"
    return [("documents", f"{n_documents:,} · {rule} · {memory}")]


def _held_out_text(event: "Found") -> str:
    """What is held out, by which rule."""
    corpus, found, valid = event.corpus, event.survey, event.valid
    if valid is not None:
        return f"{valid.name} · {size_text(valid.n_bytes)}"
    size, n = size_text(found.n_valid_bytes), found.n_valid_documents
    documents = "" if n is None else f" · {n:,} document{'s' * (n != 1)}"
    if corpus.valid_every is not None:
        return f"the last of every {corpus.valid_every:,} documents · {size}{documents}"
    share = f"{found.n_valid_bytes / found.n_bytes:.1%}"
    return f"the last {share} · {size} from byte {found.split_at:,} on{documents}"


def _text_rules(data: "DataConfig") -> str:
    """How newlines and spaces are read where that is not as they stand."""
    newlines = {"keep": "", "drop": " · newlines left out", "eos": " · newlines are <eos>"}[data.newlines]
    return newlines + ("" if data.spaces == "keep" else " · spaces are underscores")


def _embeddings_text(model: "ModelConfig") -> str:
    """How the vocabulary's embeddings are divided and shared; empty: one table as wide as the model."""
    assert model.cutoffs != "auto", "settled by the plan"
    parts = []
    if model.cutoffs:
        parts.append("clusters from " + ", ".join(f"{start:,}" for start in model.cutoffs))
        if model.div_val > 1:
            parts.append(f"each {model.div_val} times narrower, projections tied: {model.tie_projs}")
    if model.d_embed not in (None, model.d_model):
        parts.append(f"{model.d_embed} wide")
    if not model.tied:
        parts.append("output has its own table")
    return " · ".join(parts)


def _positions_text(model: "ModelConfig") -> str:
    """The scheme of positions in words, and how far attention sees."""
    parts: list[str] = [model.position]
    if model.position == "shaw":
        also = "also on values" if model.shaw_values else "not on values"
        parts += [f"rows to distance {model.max_relative_position:,}", also]
    elif model.position != "relative" and model.absolute_positions == "continue":
        parts.append("run on through the text")
    elif model.position != "relative":
        # Two keys of one position are then told apart by content alone.
        parts.append("restart in each segment" + (", rows of memory repeat them" if model.mem_len else ""))
    if model.clamp_len is not None:
        parts.append(f"clamp_len {model.clamp_len:,}")
    if model.same_length != "off":
        parts.append(f"same_length {model.same_length}")
    if model.untie_r:
        parts.append("u and v for each layer")
    return " · ".join(parts)


def score_text(score: "Score") -> str:
    """A score in a few words: nats per token and bits per byte."""
    return _nats_text(score.nll, score.bits_per_byte)


def _nats_text(nll: float | None, bits_per_byte: float | None) -> str:
    bits = "" if bits_per_byte is None else f" · {number_text(bits_per_byte)} bits/byte"
    return f"{number_text(nll)} nats/token{bits}"


def finished_facts(
    event: "Finished", elapsed_s: float | None, scope: str, best_scope: str
) -> list[tuple[str, str]]:
    """What a training came to, in named lines.

    Args:
        event: The end.
        elapsed_s: Time since the command began; None: no step was made.
        scope: The tokens that were scored last.
        best_scope: Those of the best score; empty: it was made before this command.
    """
    reasons = {
        "length": "",
        "patience": " · evaluations stopped improving",
        "stop_at": " · stopped as asked",
        "interrupted": " · interrupted, saved",
    }
    took = "" if elapsed_s is None else f" in {duration_text(elapsed_s)}"
    facts = [("done", f"step {event.step:,}{took}{reasons[event.reason]}")]
    if event.is_best_lost:
        lost = f"step {event.best_step:,}, which was better, is lost"
        facts.append(("best", f"the last, step {event.step:,} · {lost}"))
    elif event.best_step is not None:
        best = _nats_text(event.best_nll, event.best_bits_per_byte)
        of = f" · {best_scope}" if best_scope else ""
        facts.append(("best", f"step {event.best_step:,} · {best} held out{of}"))
    if event.last_score is not None and event.last_score != event.best_score:
        facts.append(("last", f"step {event.step:,} · {score_text(event.last_score)} · {scope}"))
    return [*facts, ("run", escape_line(str(event.run.folder)))]


def first_line_facts(event: "FirstLine") -> list[tuple[str, str]]:
    """How the first line of the text is cut into pieces."""
    pieces = "│".join(one_line(piece) for piece in event.pieces)
    first, more = ("first ", "…") if event.is_cut else ("", "")
    return [
        ("first line", one_line(event.text) + more),
        (
            f"{first}{len(event.ids):,} piece{'s' * (len(event.ids) != 1)}",
            f"│{pieces}│{more}" if pieces else "",
        ),
    ]


def _panel(title: str, facts: Sequence[tuple[str, str]], screen: Screen) -> "RenderableType":
    from rich.panel import Panel

    block = facts_table(facts)
    if not screen.is_terminal:
        return block
    return Panel(block, title=title, title_align="left", border_style="cyan", expand=False)
