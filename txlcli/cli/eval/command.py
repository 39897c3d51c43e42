"""The command and its flags."""

import sys
from contextlib import ExitStack
from typing import Annotated

from txlcli import UserError
from txlcli.cli.app import command
from txlcli.cli.eval.per_token import open_tsv
from txlcli.cli.eval.request import (
    WINDOW_TOKENS,
    Request,
    choose_documents,
    choose_split,
    choose_window_tokens,
)
from txlcli.cli.eval.result import write_table
from txlcli.cli.eval.scoring import score
from txlcli.cli.flags import (
    MACHINE,
    SCORING,
    AttentionFlag,
    CheckpointFlag,
    DeterministicFlag,
    DeviceFlag,
    JsonFlag,
    MosesFlag,
    PrecisionFlag,
    QuietFlag,
    RunFlag,
    ThreadsFlag,
    argument,
    option,
    parse_mem_lens,
    setting,
)
from txlcli.cli.signals import listening
from txlcli.report import Screen, Stages, json_text


@command(
    "eval",
    examples=[
        "txl eval --mem-len 0,64,128,256",
        "txl eval novel.txt --run runs/books --json",
        "txl eval novel.txt --per-token novel.tsv",
        "txl eval --mem-len 256 --sliding-window",
    ],
)
def evaluate(
    file: Annotated[
        str | None,
        argument("FILE", help="text to score; - for standard input; else held-out text"),
    ] = None,
    *,
    run: RunFlag = None,
    checkpoint: CheckpointFlag = "best",
    split: Annotated[
        str | None, option("--split", metavar="valid|test", help="held-out text of the run; else valid")
    ] = None,
    encoding: Annotated[
        str | None, option("--encoding", metavar="NAME", help="encoding of FILE; else that of the run's text")
    ] = None,
    is_raw: MosesFlag = False,
    text_field: Annotated[
        str | None,
        option("--text-field", metavar="NAME", help="FILE is JSON lines with its texts in this field"),
    ] = None,
    document_separator: Annotated[
        str | None,
        option("--document-separator", metavar="TEXT", help="text that stands between documents of FILE"),
    ] = None,
    document_per_file: Annotated[
        bool, option("--document-per-file", help="each file in FILE, a folder, is one document")
    ] = False,
    has_no_documents: Annotated[
        bool,
        option("--no-documents", help="FILE is one text; else its documents are found as the run's were"),
    ] = False,
    is_by_line: Annotated[
        bool, option("--by-line", help="score each line by itself, from empty memory after a newline")
    ] = False,
    per_token: Annotated[
        str | None,
        option("--per-token", metavar="FILE.tsv", help="write each token's id, text, nats and byte offset"),
    ] = None,
    is_window: Annotated[
        bool,
        option(
            "--sliding-window",
            help="beside it loss and speed without memory, by a full window per token; takes long",
        ),
    ] = False,
    window_tokens: Annotated[
        int | None,
        option(
            "--window-tokens",
            metavar="N",
            help=f"tokens scored so, drawn from the whole text; else {WINDOW_TOKENS}",
            number=int,
        ),
    ] = None,
    is_json: JsonFlag = False,
    is_quiet: QuietFlag = False,
    mem_len: Annotated[
        str | None,
        option(
            "--mem-len",
            metavar="LIST",
            help="memory lengths, such as 0,128,512; else as trained",
            panel=SCORING,
        ),
    ] = None,
    tgt_len: Annotated[
        str | None, option("--tgt-len", metavar="N", help="segment; else as trained", panel=SCORING)
    ] = None,
    clamp_len: Annotated[
        str | None,
        option("--clamp-len", metavar="N", help="largest distance, or none; else as trained", panel=SCORING),
    ] = None,
    same_length: Annotated[
        str | None,
        option(
            "--same-length",
            metavar="off|mem_len|mem_len+1",
            help="keys that every query sees; else as trained",
            panel=SCORING,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        option(
            "--batch-size",
            metavar="N",
            help="streams side by side at most; the score is the same",
            panel=MACHINE,
        ),
    ] = None,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "auto",
    attention: AttentionFlag = "auto",
    threads: ThreadsFlag = None,
    is_deterministic: DeterministicFlag = False,
) -> None:
    """Score text exactly, once per memory length.

    Reads a run and FILE, or the held-out text inside the run, and prints one table row for each memory
    length. Every token but the first is scored once, whatever the batch size.
    """
    request = Request(
        file=file,
        split=choose_split(
            file,
            split,
            {
                "--encoding": encoding is not None,
                "--moses": is_raw,
                "--text-field": text_field is not None,
                "--document-separator": document_separator is not None,
                "--document-per-file": document_per_file,
                "--no-documents": has_no_documents,
            },
        ),
        encoding=setting("encoding", encoding),
        documents=choose_documents(
            {
                "--text-field": text_field,
                "--document-separator": document_separator,
                "--document-per-file": document_per_file or None,
                "--no-documents": has_no_documents or None,
            }
        ),
        mem_lens=None if mem_len is None else parse_mem_lens(mem_len),
        tgt_len=setting("tgt_len", tgt_len),
        has_clamp_len=clamp_len is not None,
        clamp_len=setting("clamp_len", clamp_len),
        same_length=setting("same_length", same_length),
        batch_size=setting("batch_size", batch_size),
        device=setting("device", device),
        precision=setting("precision", precision),
        attention=setting("attention", attention),
        threads=setting("threads", threads),
        is_deterministic=is_deterministic,
        is_raw=is_raw,
        is_by_line=is_by_line,
        window_tokens=choose_window_tokens(is_window, window_tokens, is_by_line, per_token),
    )
    if per_token is not None and request.mem_lens is not None and len(request.mem_lens) > 1:
        raise UserError(f"--per-token: takes one memory length; got --mem-len {mem_len}")
    screen, out = Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout)
    with listening("stopping; once more to stop at once") as interruption, ExitStack() as stack:
        tsv = open_tsv(per_token, stack)
        stages = Stages(screen)
        stack.callback(stages.close)
        result = score(request, run, checkpoint, tsv, stack, stages, interruption)
        if is_json:
            out.write_text(json_text(result.as_json(), indent=1).encode() + b"\n")
        else:
            write_table(result, out)
