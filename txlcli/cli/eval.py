"""`txl eval`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from txlcli import UserError
from txlcli.cli.app import command
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
    option,
    parse_mem_lens,
    setting,
)
from txlcli.cli.signals import Interruption, listening
from txlcli.config import leaf, unescape
from txlcli.report import Screen, Stages, column_names, eval_table, json_text, one_line, window_table

if TYPE_CHECKING:
    from txlcli.api import LanguageModel
    from txlcli.config import ModelConfig
    from txlcli.data import Counts, Split, SplitInfo, TokenStore
    from txlcli.device import Precision
    from txlcli.evaluate import Draw, Record, Score, TokenNats, WindowScore
    from txlcli.model import Lengths
    from txlcli.sources import DocumentRule
    from txlcli.tokenizer import Tokenizer

_SPLITS = ("valid", "test")
_WINDOW_TOKENS = 256
_BLOCK_TOKENS = 1 << 20
_NEWLINES = {
    "keep": "part of the text, scored like every other token",
    "drop": "left out of the text, neither scored nor counted",
    "eos": "the word {newline}, scored like every other token",
}
_MEMORY_STARTS = {"empty": "empty memory", "zeros": "a memory of zeros"}
_SPACES = {"keep": "part of the text", "underscore": "read as underscores"}


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
        typer.Argument(
            metavar="FILE", help="text to score; - for standard input; else held-out text", show_default=False
        ),
    ] = None,
    *,
    run: RunFlag = None,
    checkpoint: CheckpointFlag = "best",
    split: Annotated[
        str | None, option("--split", metavar="valid|test", help="held-out text of the run; else valid")
    ] = None,
    encoding: Annotated[
        str | None, option("--encoding", metavar="NAME", help="encoding of FILE; else utf-8")
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
            help=f"tokens scored so, drawn from the whole text; else {_WINDOW_TOKENS}",
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
    request = _Request(
        file=file,
        split=_choose_split(
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
        encoding=setting("encoding", encoding) or "utf-8",
        documents=_choose_documents(
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
        window_tokens=_choose_window_tokens(is_window, window_tokens, is_by_line, per_token),
    )
    if per_token is not None and request.mem_lens is not None and len(request.mem_lens) > 1:
        raise UserError(f"--per-token: takes one memory length; got --mem-len {mem_len}")
    screen, out = Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout)
    with listening("stopping; once more to stop at once") as interruption, ExitStack() as stack:
        tsv = _open_tsv(per_token, stack)
        stages = Stages(screen)
        stack.callback(stages.close)
        result = _score(request, run, checkpoint, tsv, stack, stages, interruption)
        if is_json:
            out.write_text(json_text(result.as_json(), indent=1).encode() + b"\n")
        else:
            _write_table(result, out)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line asks for, checked."""

    file: str | None
    split: str
    encoding: str
    documents: "DocumentRule | None"
    mem_lens: tuple[int, ...] | None
    tgt_len: int | None
    has_clamp_len: bool
    clamp_len: int | None
    same_length: str | None
    batch_size: int | None
    device: str
    precision: str
    attention: str
    threads: int | None
    is_deterministic: bool
    is_raw: bool
    is_by_line: bool
    window_tokens: int | None

    def lengths(self, trained: "Lengths", mem_len: int) -> "Lengths":
        """The lengths of one row: as trained, but for what was asked."""
        lengths = trained._replace(mem_len=mem_len, tgt_len=self.tgt_len or trained.tgt_len)
        if self.has_clamp_len:
            lengths = lengths._replace(clamp_len=self.clamp_len)
        return lengths if self.same_length is None else lengths._replace(same_length=self.same_length)


@dataclass(frozen=True)
class _Text:
    """A text ready to be scored.

    `file_bytes` counts all bytes of the files, those that are neither scored nor counted too; None: not
    known. `n_documents` None: they have no ends among the tokens.
    """

    name: str
    store: "TokenStore"
    counts: "Counts"
    info: "SplitInfo"
    encoding: str
    documents: "DocumentRule"
    n_documents: int | None
    file_bytes: int | None
    notices: tuple[str, ...]

    @property
    def has_offsets(self) -> bool:
        """Whether each token's place in the files is known: with documents only if every byte is counted."""
        has_documents = self.documents != type(self.documents)()
        return not has_documents or self.info.n_bytes == self.file_bytes


@dataclass(frozen=True, kw_only=True)
class _Result:
    """All rows and what they rest on."""

    run: str
    step: int
    file: str | None
    split: str | None
    n_bytes: int
    protocol: dict[str, object]
    mem_lens: tuple[int, ...]
    scores: "tuple[Score, ...]"
    windows: "tuple[WindowScore, ...]"
    notices: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The document that --json prints."""
        rows = [
            {
                "mem_len": length,
                "tgt_len": score.lengths.tgt_len,
                "same_length": score.lengths.same_length,
                "context_min": score.context_min,
                "context_max": score.context_max,
                "receptive_field": score.receptive_field,
                "is_beyond_training": score.is_beyond_training,
                "tokens": score.tokens,
                "nll": score.nll,
                "total_nll": score.total_nll,
                "perplexity": score.perplexity,
                "bytes_scored": score.n_bytes,
                "chars_scored": score.n_characters,
                "words_scored": score.n_words,
                "bits_per_byte": score.bits_per_byte,
                "bits_per_char": score.bits_per_char,
                "word_perplexity": score.word_perplexity,
                "tokens_per_s": score.tokens_per_s,
            }
            for length, score in zip(self.mem_lens, self.scores, strict=True)
        ]
        windows = [
            {
                "mem_len": length,
                "tgt_len": window.lengths.tgt_len,
                "attention_length": window.attention_length,
                "tokens": window.tokens,
                "nll": window.nll,
                "nll_with_memory": window.nll_with_memory,
                "nll_difference_se": window.nll_difference_se,
                "tokens_per_s": window.tokens_per_s,
                "tokens_per_s_with_memory": window.tokens_per_s_with_memory,
                "ratio": window.ratio,
                "ideal_ratio": window.ideal_ratio,
                "share_of_ideal": window.share_of_ideal,
                "batch_size": window.batch_size,
                "batch_size_with_memory": window.batch_size_with_memory,
            }
            for length, window in zip(self.mem_lens if self.windows else (), self.windows, strict=True)
        ]
        return {
            "run": self.run,
            "step": self.step,
            "file": self.file,
            "split": self.split,
            "bytes": self.n_bytes,
            "protocol": self.protocol,
            "rows": rows,
            "sliding_window": windows,
            "notices": list(self.notices),
        }


def _choose_split(file: str | None, split: str | None, of_file: Mapping[str, bool]) -> str:
    if split is not None and split not in _SPLITS:
        raise UserError(f"--split: must be valid or test; got `{split}`")
    if file is not None and split is not None:
        raise UserError("--split: cannot go with FILE; give one of them")
    for flag, is_given in of_file.items():
        if file is None and is_given:
            raise UserError(f"{flag}: goes with FILE only; held-out text is stored as tokens")
    return split or "valid"


def _choose_documents(given: Mapping[str, str | bool | None]) -> "DocumentRule | None":
    """Return how documents are told apart by the flags; None: as in the run."""
    from txlcli.sources import DocumentRule

    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise UserError(f"{flags[0]}: cannot go with {flags[1]}; give one of them")
    if not flags:
        return None
    separator = setting("document_separator", given["--document-separator"])
    return DocumentRule(
        text_field=setting("text_field", given["--text-field"]),
        document_separator=None if separator is None else unescape(separator),
        document_per_file=given["--document-per-file"] is not None,
    )


def _choose_window_tokens(
    is_window: bool, n_tokens: int | None, is_by_line: bool, per_token: str | None
) -> int | None:
    """Return how many tokens are scored by sliding windows; None: none are."""
    if not is_window:
        if n_tokens is not None:
            raise UserError("--window-tokens: goes with --sliding-window only")
        return None
    for flag, is_given in (("--by-line", is_by_line), ("--per-token", per_token is not None)):
        if is_given:
            raise UserError(f"--sliding-window: cannot go with {flag}; give one of them")
    if n_tokens is not None and n_tokens < 1:
        raise UserError(f"--window-tokens: must be at least 1; got {n_tokens}")
    return n_tokens or _WINDOW_TOKENS


def _open_tsv(path: str | None, stack: ExitStack) -> BinaryIO | None:
    """Open the file of --per-token before anything is computed; it appears when the command ends well."""
    if path is None:
        return None
    from txlcli.files import open_whole

    return stack.enter_context(open_whole(Path(path)))


def _score(
    request: _Request,
    run: str | None,
    checkpoint: str,
    tsv: BinaryIO | None,
    stack: ExitStack,
    stages: Stages,
    interruption: Interruption,
) -> _Result:
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
    text = _open_text(request, lm, stack, stages, interruption)
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
        _write_tsv(tsv, text, lm.tokenizer, nats)
    ordered = tuple(scores[mem_len] for mem_len in mem_lens)
    return _Result(
        run=str(lm.run.folder),
        step=lm.step,
        file=request.file,
        split=request.split if request.file is None else None,
        n_bytes=text.info.n_bytes,
        protocol={
            **_protocol(request, lm, text, precision, checkpoint, ordered[0]),
            "sliding_window": _window_protocol(lm, windows[mem_lens[0]]) if windows else None,
        },
        mem_lens=mem_lens,
        scores=ordered,
        windows=tuple(windows[mem_len] for mem_len in mem_lens if windows),
        notices=_notices(request, lm, text, checkpoint, ordered, has_offsets=tsv is not None),
    )


def _open_text(
    request: _Request, lm: "LanguageModel", stack: ExitStack, stages: Stages, interruption: Interruption
) -> _Text:
    """Find the text's tokens: in the run, or by encoding FILE into a temporary folder."""
    import tempfile

    from txlcli.data import Progress, open_counts, open_split, read_store_info
    from txlcli.run import refuse_converted
    from txlcli.sources import Corpus

    split: Split = "valid" if request.split == "valid" else "test"
    folder, name, notices = lm.run.folder, f"{request.split} text of {lm.run.folder}", tuple[str, ...]()
    corpus: Corpus | None = None
    if request.file is not None:
        folder, split, name = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-"))),
            "test",
            request.file,
        )
        for event in lm.encode_file(
            request.file,
            folder,
            encoding=request.encoding,
            documents=request.documents,
            least_tokens=1 if request.is_by_line else 2,
        ):
            if isinstance(event, Progress):
                stages.show(event.stage, event.done_bytes, event.total_bytes, "bytes")
            else:
                notices += event.notices
                corpus = event if isinstance(event, Corpus) else corpus
            interruption.leave()
    if request.file is None:
        refuse_converted(
            lm.run, f"which has no held-out text; name a file: txl eval FILE --run {lm.run.folder}"
        )
    store = stack.enter_context(open_split(folder, split))
    counts = stack.enter_context(open_counts(folder, split))
    info = read_store_info(folder)
    return _Text(
        name=name,
        store=store,
        counts=counts,
        info=info.splits[split],
        encoding=info.encoding,
        documents=lm.document_rule if request.documents is None else request.documents,
        n_documents=_count_documents(store, lm.tokenizer),
        file_bytes=None if corpus is None else corpus.n_bytes - sum(one.n_mark for one in corpus.sources),
        notices=notices,
    )


def _count_documents(store: "TokenStore", tokenizer: "Tokenizer") -> int | None:
    """Count the ends of documents among the tokens; None: the vocabulary has none."""
    if tokenizer.document_end is None:
        return None
    return sum(
        int((store.read(start, min(start + _BLOCK_TOKENS, store.n_tokens)) == tokenizer.document_end).sum())
        for start in range(0, store.n_tokens, _BLOCK_TOKENS)
    )


def _score_row(
    request: _Request,
    lm: "LanguageModel",
    text: _Text,
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
    request: _Request,
    lm: "LanguageModel",
    text: _Text,
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


def _write_tsv(file: BinaryIO, text: _Text, tokenizer: "Tokenizer", nats: "TokenNats") -> None:
    """Write one line for each scored token: id, text with escapes, nats, byte offset in the source."""
    from txlcli.evaluate import token_scores

    file.write(b"token\ttext\tnats\tbyte_offset\n")
    for token in token_scores(text.store, text.counts if text.has_offsets else None, nats):
        source = tokenizer.decode([token.token], after=token.previous)
        offset = "" if token.byte_offset is None else token.byte_offset
        file.write(f"{token.token}\t{one_line(source)}\t{token.nats!r}\t{offset}\n".encode())


def _protocol(
    request: _Request, lm: "LanguageModel", text: _Text, precision: str, checkpoint: str, score: "Score"
) -> dict[str, object]:
    """What the numbers depend on beside the text and the weights."""
    model = lm.config.model
    start = _MEMORY_STARTS[lm.model.lengths.memory_start]
    by_line = f"each line from {start} after a newline token, its first token scored"
    whole = f"from {start} over the whole text, every token but the first scored"
    return {
        "memory_start": lm.model.lengths.memory_start,
        "scoring": by_line if request.is_by_line else whole,
        "newlines": _NEWLINES[lm.config.data.newlines].format(newline=_newline_word(lm)),
        "words": _words(request, lm),
        "documents": _documents(request, lm, text),
        "n_documents": text.n_documents,
        "reset_memory_at_documents": lm.model.document_end is not None,
        "spaces": _SPACES[lm.config.data.spaces],
        "position": _position(model),
        # As asked for: a row at mem_len 0 may have had to do without it, which its notice says.
        "same_length": request.same_length or lm.model.lengths.same_length,
        "clamp_len": score.lengths.clamp_len,
        "norm_eps": model.norm_eps,
        "checkpoint": checkpoint,
        "tokenizer": lm.tokenizer.kind,
        "n_vocab": lm.tokenizer.n_vocab,
        "encoding": "raw bytes" if lm.tokenizer.kind == "byte" else text.encoding,
        "precision": precision,
        "device": str(lm.device),
        "attention": lm.model.attention_name,
        "is_lower_bound": not lm.tokenizer.is_lossless and text.info.n_unknown > 0,
        "unknown_tokens": text.info.n_unknown,
    }


def _window_protocol(lm: "LanguageModel", window: "WindowScore") -> dict[str, object]:
    """What the numbers of the sliding window rest on."""
    from txlcli.evaluate import layer_macs

    per_token, per_key = layer_macs(lm.model)
    return {
        "window": "without memory: for each token all layers anew over the tokens before it, as many as are "
        "seen at most with memory, fewer at the text's beginning",
        "sample": f"{window.tokens:,} tokens, one drawn from each of as many equal stretches of the text; "
        "both losses are theirs",
        "nll_difference_se": "the standard error of the difference of the losses",
        "speed": "medians of pieces timed in turn, memory full, each side in its fastest batch size; the "
        "vocabulary once a scored token",
        "ideal": f"w (C + a w/2) / (C + a w), w the window; multiply-adds of a layer: C = {per_token:,} a "
        f"token, a = {per_key:,} a key",
        "share": "ratio / ideal; above 1 where a text or sample is too short to be timed, or hidden keys "
        "are computed",
        "batch_sizes": "windows and streams in a step",
        "macs_per_token": per_token,
        "macs_per_key": per_key,
    }


def _newline_word(lm: "LanguageModel") -> str:
    """The word that a newline is, for a vocabulary that has one."""
    from txlcli.tokenizer import CorpusWordTokenizer, MosesTokenizer

    words = lm.tokenizer.words if isinstance(lm.tokenizer, MosesTokenizer) else lm.tokenizer
    return words.newline if isinstance(words, CorpusWordTokenizer) else ""


def _words(request: _Request, lm: "LanguageModel") -> str | None:
    """How a vocabulary of corpus words finds them; None: it has other units."""
    if lm.config.data.newlines != "eos":
        return None
    split = "what white space separates; raw text needs --moses"
    raw = "raw text, split by Moses' rules; bytes, characters and words counted are the raw text's"
    return raw if request.is_raw else split


def _documents(request: _Request, lm: "LanguageModel", text: _Text) -> str | None:
    """How documents were told apart, and what that does to the score; None: as in the run there are none."""
    rule = text.documents
    if rule.text_field is not None:
        what = f"JSON lines, field {one_line(rule.text_field)}; what else stands in them is not counted"
    elif rule.document_separator is not None:
        what = f"separated by {one_line(rule.document_separator)}, whose bytes count with a document's end"
    elif rule.document_per_file:
        what = "one per file"
    else:
        return None if lm.tokenizer.document_end is None else "none, the whole is one text"
    if text.n_documents is None:
        return f"{what}; they run into one another, since the vocabulary has no token for their end"
    memory = "ends with each" if lm.model.document_end is not None else "goes on through them"
    return f"{text.n_documents:,} · {what} · a token for each end is scored too · memory {memory}"


def _position(model: "ModelConfig") -> str:
    """The scheme of positions, and for absolute ones where they start."""
    is_absolute = model.position in ("sinusoid", "learned")
    return f"{model.position}, {model.absolute_positions}" if is_absolute else model.position


def _notices(
    request: _Request,
    lm: "LanguageModel",
    text: _Text,
    checkpoint: str,
    scores: "Sequence[Score]",
    *,
    has_offsets: bool,
) -> tuple[str, ...]:
    """What a reader of the table should know, each sentence once."""
    from txlcli.run import read_pointers

    notices = [*([] if lm.damage is None else [lm.damage]), *lm.notices, *text.notices]
    if (
        request.file is None
        and request.split == "valid"
        and checkpoint == "best"
        and read_pointers(lm.run).best
    ):
        notices.append("this text chose the checkpoint, so a fresh one may score a little worse")
    if any(score.is_beyond_training for score in scores):
        trained = lm.model.lengths
        notices.append(f"* longer than in training: mem_len {trained.mem_len}, tgt_len {trained.tgt_len}")
    if has_offsets and not text.has_offsets:
        notices.append("byte offsets are left out: not all that stands between the tokens is counted")
    elif request.is_raw and has_offsets:
        notices.append("byte offsets beside characters that Moses' rules replaced are a guess")
    if not lm.tokenizer.is_lossless and text.info.n_unknown:
        share = text.info.n_unknown / text.info.n_tokens
        notices.append(
            f"{share:.2%} of the tokens are unknown words, so bits per byte and character are lower bounds"
        )
    notices.extend(notice for score in scores for notice in score.notices)
    return tuple(dict.fromkeys(notices))


def _write_table(result: _Result, out: Screen) -> None:
    """Print the table, then what its numbers rest on."""
    out.draw(eval_table(result.scores, result.mem_lens, out.width))
    shown: list[str] = []
    if result.windows:
        out.write("")
        windows = window_table(result.windows, result.mem_lens, out.width)
        out.draw(windows)
        shown = column_names(windows)
    protocol = result.protocol
    clamp = "no clamp_len" if protocol["clamp_len"] is None else f"clamp_len {protocol['clamp_len']}"
    eps = protocol["norm_eps"]
    eps_rule = "" if eps == leaf("norm_eps").default else f"norm_eps {eps:g} · "
    machine = f"{protocol['precision']} on {protocol['device']} · attention {protocol['attention']}"
    text = result.file if result.file is not None else f"{result.split} text of the run"
    facts = [
        ("text", f"{text} · {result.n_bytes:,} bytes · {protocol['encoding']}"),
        ("model", f"{result.run} · step {result.step:,} ({protocol['checkpoint']})"),
        ("scored", str(protocol["scoring"])),
        *([("documents", str(protocol["documents"]))] if protocol["documents"] is not None else []),
        ("newlines", str(protocol["newlines"])),
        *([("words", str(protocol["words"]))] if protocol["words"] is not None else []),
        *([("spaces", str(protocol["spaces"]))] if protocol["spaces"] != _SPACES["keep"] else []),
        (
            "rules",
            f"position {protocol['position']} · same_length {protocol['same_length']} · {clamp} · "
            f"{eps_rule}{machine}",
        ),
        *_window_facts(protocol["sliding_window"], shown),
        *(("note" if i == 0 else "", notice) for i, notice in enumerate(result.notices)),
    ]
    out.write("")
    out.explain(facts)


def _window_facts(protocol: object, shown: Sequence[str]) -> list[tuple[str, str]]:
    """What the sliding window's table rests on; what explains a column only where that is shown."""
    if not isinstance(protocol, dict):
        return []
    lines = [("window", "window"), ("sample", "sample"), ("±", "nll_difference_se"), ("speed", "speed")]
    lines += [("ideal", "ideal"), ("share", "share"), ("side by side", "batch_sizes")]
    is_column = {"±", "side by side"}
    return [(name, protocol[key]) for name, key in lines if name in shown or name not in is_column]
