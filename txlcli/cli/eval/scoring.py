"""From a text to the rows."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

from txlcli.cli.eval.per_token import write_tsv
from txlcli.cli.eval.protocol import notices_of, text_protocol, window_protocol
from txlcli.cli.eval.request import Request
from txlcli.cli.eval.result import Result
from txlcli.cli.eval.text import Text, open_text
from txlcli.cli.signals import Interruption
from txlcli.report import Stages

if TYPE_CHECKING:
    from txlcli.api import LanguageModel
    from txlcli.device import Precision
    from txlcli.evaluate import Draw, Record, Score, WindowScore
    from txlcli.model import Lengths


def score(
    request: Request,
    run: str | None,
    checkpoint: str,
    tsv: BinaryIO | None,
    stack: ExitStack,
    stages: Stages,
    interruption: Interruption,
) -> Result:
    """Load, encode, score."""
    from txlcli.api import load
    from txlcli.device import choose_precision
    from txlcli.evaluate import Draw, TokenNats, window_length

    lm = load(
        run,
        checkpoint,
        device=request.device,
        precision=request.precision,
        attention=request.attention,
        threads=request.threads,
        deterministic=request.is_deterministic,
        moses=request.is_raw,
    )
    precision = choose_precision(request.precision, lm.device, training=False)
    text = open_text(request, lm, stack, stages, interruption)
    trained = lm.model.lengths
    mem_lens = request.mem_lens or (trained.mem_len,)
    nats = None if tsv is None else stack.enter_context(TokenNats())
    scores: dict[int, Score] = {}
    windows: dict[int, WindowScore] = {}
    if request.window_tokens is not None:
        for mem_len in mem_lens:  # all of them before the first row, which may take long
            window_length(lm.model, request.lengths(trained, mem_len), text.store.n_tokens)
    for mem_len in dict.fromkeys(mem_lens):
        lengths = request.lengths(trained, mem_len)
        draw = None
        record = None if nats is None else nats.record
        if request.window_tokens is not None:
            draw = Draw(text.store.n_tokens, request.window_tokens)
            record = draw.record
        scores[mem_len] = _score_row(request, lm, text, lengths, precision, record, stages, interruption)
        if draw is not None:
            windows[mem_len] = _slide(request, lm, text, lengths, precision, draw, stages, interruption)
    stages.close()
    if tsv is not None and nats is not None:
        write_tsv(tsv, text, lm.tokenizer, nats)
    ordered = tuple(scores[mem_len] for mem_len in mem_lens)
    return Result(
        run=str(lm.run.folder),
        step=lm.step,
        file=request.file,
        split=request.split if request.file is None else None,
        n_bytes=text.info.n_bytes,
        protocol={
            **text_protocol(request, lm, text, precision, checkpoint, ordered[0]),
            "sliding_window": window_protocol(lm, windows[mem_lens[0]]) if windows else None,
        },
        mem_lens=mem_lens,
        scores=ordered,
        windows=tuple(windows[mem_len] for mem_len in mem_lens if windows),
        notices=notices_of(request, lm, text, checkpoint, ordered, has_offsets=tsv is not None),
    )


def _score_row(
    request: Request,
    lm: "LanguageModel",
    text: Text,
    lengths: "Lengths",
    precision: "Precision",
    record: "Record | None",
    stages: Stages,
    interruption: Interruption,
) -> "Score":
    from txlcli.evaluate import Score, evaluate, evaluate_by_line

    stage = f"scoring at mem_len {lengths.mem_len}"
    if request.is_by_line:
        events = evaluate_by_line(
            lm.model,
            text.store,
            text.counts,
            # The vocabulary of bytes has a newline even where none comes any more.
            newline_id=None if lm.config.data.newlines == "drop" else lm.tokenizer.newline_id,
            document_end=lm.tokenizer.document_end,
            lengths=lengths,
            n_stream=request.batch_size,
            precision=precision,
            record=record,
            place=text.name,
        )
    else:
        events = evaluate(
            lm.model,
            text.store,
            text.counts,
            lengths=lengths,
            n_stream=request.batch_size,
            precision=precision,
            record=record,
            place=text.name,
        )
    for event in events:
        if isinstance(event, Score):
            return event
        stages.show(stage, event.done, event.total, "tokens, warm-up included")
        interruption.leave()
    raise AssertionError("an evaluation ends with its score")


def _slide(
    request: Request,
    lm: "LanguageModel",
    text: Text,
    lengths: "Lengths",
    precision: "Precision",
    draw: "Draw",
    stages: Stages,
    interruption: Interruption,
) -> "WindowScore":
    """Score the drawn tokens by sliding windows, beside the row that `draw` has recorded."""
    from txlcli.evaluate import WindowScore, score_window

    stage = f"sliding window beside mem_len {lengths.mem_len}"
    for event in score_window(
        lm.model,
        text.store,
        draw,
        lengths=lengths,
        n_side=request.batch_size,
        precision=precision,
    ):
        if isinstance(event, WindowScore):
            return event
        if event.total:
            stages.show(stage, event.done, event.total, "tokens")
        else:
            stages.show(f"{stage}: trying batch sizes", 0, 0, "tokens")
        interruption.leave()
    raise AssertionError("a sliding window ends with its score")
