"""The two ways to score a text: as one stream of tokens, or line by line."""

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from txlcli import UserError
from txlcli.data import Counts, TokenStore
from txlcli.device import Precision
from txlcli.evaluate.running import Record, Row, Tally, evaluation_mode, run
from txlcli.evaluate.score import EvalProgress, Score
from txlcli.evaluate.streams import (
    Applied,
    apply,
    bound,
    choose_streams,
    lay_out,
    measure,
    usable,
)
from txlcli.evaluate.tokens import COUNT_BLOCK, sum_counts
from txlcli.model import Lengths, TransformerXL

MAX_STREAMS = 64

# By line: tokens of the lines that are sorted by length together.
WINDOW_TOKENS = 1 << 20


def evaluate(
    model: TransformerXL,
    store: TokenStore,
    counts: Counts | None = None,
    *,
    lengths: Lengths | None = None,
    n_stream: int | None = None,
    n_tokens: int | None = None,
    precision: Precision = "fp32",
    record: Record | None = None,
    place: str = "the text",
) -> Iterator[EvalProgress | Score]:
    """Score a text from an empty memory, every token but the first once; the last event is the `Score`.

    While this runs the model is in evaluation mode, afterwards as it was; no random number is drawn and no
    gradient kept, so a training around it goes on as if nothing had happened. Closing the generator ends it.

    Args:
        model: The model, on the device that is to compute.
        store: The text's tokens.
        counts: Bytes, characters and words that end with each token; None: unknown.
        lengths: Lengths to score at; None: those of training.
        n_stream: At most so many streams run side by side; fewer where the text is too short for that to pay
            or memory too small. The totals do not depend on it. None: as many as pay.
        n_tokens: Take only the text's first so many tokens; None: all.
        precision: What matrix products run in; losses are float32 at least, totals float64.
        record: Called with the position of a token and the nats of that one and those after it. Every scored
            token comes once, the stretches in any order; `TokenNats` puts them in order.
        place: What errors call the text.

    Raises:
        UserError: there are fewer than two tokens, or the model's positions or memory do not allow these
            lengths.
    """
    asked = lengths or model.lengths
    model.refuse_lengths(asked)
    n_text = store.n_tokens if n_tokens is None else min(n_tokens, store.n_tokens)
    if n_text < 2:
        raise UserError(
            f"{place}: too short to score; got {n_text} token{'' if n_text == 1 else 's'}; "
            "all but the first are scored, so there must be at least 2"
        )
    started = time.perf_counter()
    run_lengths = bound(usable(asked), n_text - 1)
    rows = _share_rows(model, run_lengths, n_text, n_stream or MAX_STREAMS)
    tally = Tally(model.device, total=sum(row.length for row in rows), record=record)
    with evaluation_mode(model):
        for result in run(model, store, rows, run_lengths, precision=precision):
            tally.add(result)
            yield tally.progress
    units = sum_counts(counts, 1, n_text)
    applied = apply(model, asked, n_text - 1, what="the text")
    yield _score(tally, applied, units, n_stream=len(rows), n_line=None, started=started)


def evaluate_by_line(
    model: TransformerXL,
    store: TokenStore,
    counts: Counts | None = None,
    *,
    newline_id: int | None,
    document_end: int | None = None,
    lengths: Lengths | None = None,
    n_stream: int | None = None,
    precision: Precision = "fp32",
    record: Record | None = None,
    place: str = "the text",
) -> Iterator[EvalProgress | Score]:
    """Score each line from an empty memory after a newline token, so that its first token is scored too.

    The newline that ends a line is scored as its last token. A document's end also ends a line; right after a
    newline it is the last token of the line before. Lines of similar length run side by side: what
    fills up the shorter ones comes after their tokens, where a causal model cannot see it. A line longer than
    tgt_len runs segment by segment with memory.

    Args:
        model: As for `evaluate`, like all that is not named here.
        store: The text's tokens.
        counts: Bytes, characters and words that end with each token; None: unknown.
        newline_id: The token that ends a line and stands before each; None: the vocabulary has none.
        document_end: The token that ends a document; None: the vocabulary has none.
        lengths: Lengths to score at; None: those of training.
        n_stream: As many lines run side by side as make up the tokens of at most so many full segments.
        precision: What matrix products run in.
        record: As for `evaluate`; here the first token is scored too.
        place: What errors call the text.

    Raises:
        UserError: the vocabulary has no newline, there is no token, or the model's positions or memory do not
            allow these lengths.
    """
    asked = lengths or model.lengths
    model.refuse_lengths(asked)
    if newline_id is None:
        raise UserError("--by-line: lines start after a newline token; the vocabulary has none; leave it out")
    if store.n_tokens == 0:
        raise UserError(f"{place}: too short to score; got 0 tokens; by line there must be at least 1")
    started = time.perf_counter()
    tally = Tally(model.device, total=store.n_tokens, record=record)
    n_line = longest = widest = 0
    with evaluation_mode(model):
        for lines in _lots_of_lines(store, newline_id, document_end):
            n_line, longest = n_line + len(lines), max(longest, lines[0].length)
            for rows, run_lengths in _batch_lines(model, lines, usable(asked), n_stream or MAX_STREAMS):
                widest = max(widest, len(rows))
                for result in run(model, store, rows, run_lengths, precision=precision, start_id=newline_id):
                    tally.add(result)
                    yield tally.progress
    units = sum_counts(counts, 0, store.n_tokens)
    applied = apply(model, asked, longest, what="the longest line")
    yield _score(tally, applied, units, n_stream=widest, n_line=n_line, started=started)


def final_score(events: Iterator[EvalProgress | Score]) -> Score:
    """Run an evaluation to its end and return the score."""
    last: EvalProgress | Score | None = None
    for event in events:
        last = event
    assert isinstance(last, Score), "an evaluation ends with its score"
    return last


def _share_rows(model: TransformerXL, lengths: Lengths, n_text: int, n_stream: int) -> list[Row]:
    """Share a text of `n_text` tokens among streams."""
    tgt_len, step = lengths.tgt_len, measure(model, lengths)
    n_segments, n_warm = -(-(n_text - 1) // tgt_len), lengths.warm_segments(len(model.layers))
    n_side = choose_streams(n_segments, n_warm, step.fit(n_stream), fixed=step.fixed)
    # The first token is no target, so segment k has the targets from 1 + k T on.
    return [
        Row(1 + begin * tgt_len, 1 + scored * tgt_len, min(1 + end * tgt_len, n_text))
        for begin, scored, end in lay_out(n_segments, n_warm, n_side)
    ]


def _lots_of_lines(store: TokenStore, newline_id: int, document_end: int | None) -> Iterator[list[Row]]:
    """Find the lines, and yield them in lots of about `WINDOW_TOKENS` tokens, longest first in each."""
    lines: list[Row] = []
    begin = lot_begin = 0
    for start in range(0, store.n_tokens, COUNT_BLOCK):
        stop = min(start + COUNT_BLOCK, store.n_tokens)
        ids = store.read(start, min(stop + 1, store.n_tokens))
        is_end = ids == newline_id
        if document_end is not None:
            is_end[:-1] &= ids[1:] != document_end
            is_end |= ids == document_end
        ends = (start + 1 + np.flatnonzero(is_end[: stop - start])).tolist()
        if stop == store.n_tokens and ends[-1:] != [stop]:
            ends.append(stop)  # a last line without a newline
        for end in ends:
            lines.append(Row(begin, begin, end))
            begin = end
            if end - lot_begin >= WINDOW_TOKENS or end == store.n_tokens:
                yield sorted(lines, key=lambda line: -line.length)
                lines, lot_begin = [], end


def _batch_lines(
    model: TransformerXL, lines: Sequence[Row], lengths: Lengths, n_stream: int
) -> Iterator[tuple[Sequence[Row], Lengths]]:
    """Cut lines, longest first, into batches that fit in memory, each with the lengths it needs."""
    begin = 0
    while begin < len(lines):
        run_lengths = bound(lengths, lines[begin].length)
        n_line = n_stream * lengths.tgt_len // run_lengths.tgt_len
        end = begin + measure(model, run_lengths).fit(n_line)
        yield lines[begin:end], run_lengths
        begin = end


def _score(
    tally: Tally,
    applied: Applied,
    units: tuple[int | None, int | None, int | None],
    *,
    n_stream: int,
    n_line: int | None,
    started: float,
) -> Score:
    total_nll, notices = tally.total_nll, applied.notices
    if not math.isfinite(total_nll):
        notices = (*notices, "the model's outputs are not finite: its weights are damaged or far too large")
    n_bytes, n_characters, n_words = units
    return Score(
        lengths=applied.lengths,
        tokens=tally.tokens,
        total_nll=total_nll,
        n_bytes=n_bytes,
        n_characters=n_characters,
        n_words=n_words,
        context_min=applied.context_min,
        context_max=applied.context_max,
        receptive_field=applied.receptive_field,
        is_beyond_training=applied.is_beyond_training,
        n_stream=n_stream,
        n_line=n_line,
        elapsed_s=time.perf_counter() - started,
        notices=notices,
    )
