"""From a corpus to a run that is ready to train."""

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from txlcli import UserError
from txlcli.attention import Demands, cannot_run, choose_backend, fall_back
from txlcli.checkpoint import load_model
from txlcli.config import (
    DEFAULT,
    FLAG,
    LEAVES,
    LENGTHS,
    Config,
    DataConfig,
    SettingError,
    Settings,
    Sourced,
    blame,
    build,
    dump,
    leaf,
    read_settings,
    unescape,
)
from txlcli.data import Prepared, StoreInfo, prepare, steps_per_epoch
from txlcli.device import choose_device, choose_precision, has_bf16
from txlcli.files import write_whole
from txlcli.plan import (
    Facts,
    Known,
    Measured,
    changed_by_plan,
    fit_streams,
    last_eval_is_whole,
    plan_length,
    plan_text,
    plan_vocabulary,
    run_s,
    take_from_run,
)
from txlcli.run import Run, discard_run, new_run, open_run, refuse_without_tokenizer
from txlcli.sources import Corpus, Survey, complete_utf8, read_text, search_corpus, survey
from txlcli.sources.survey import VALID_BYTES_MAX, VALID_FRACTION
from txlcli.tokenizer import SAMPLE_BYTES, Tokenizer, build_tokenizer, load_tokenizer
from txlcli.train.cost import Interrupted, check_fits, count_parameters, measure, memory_bytes
from txlcli.train.events import (
    Budget,
    Event,
    FirstLine,
    Found,
    Notice,
    Planned,
    PlanSummary,
    Progress,
    Ready,
)
from txlcli.train.optim import has_muon, refuse_missing_muon

LARGEST_LINE_BYTES = 400

COMPILE_SHARE = 0.1
"""Share of a run's time above which it is said that compiling takes it."""

_ANY_TEXT = Facts(
    n_bytes=2_000_000,
    n_characters=2_000_000,
    alphabet_size=100,
    script="latin",
    device_kind="cpu",
    has_bf16=False,
    has_muon=False,
)


def begin(
    settings: Settings,
    *,
    out: Path | None = None,
    dry_run: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    is_from_file: bool | None = None,
) -> Iterator[Event]:
    """Prepare a new run: find and survey the text, plan, make vocabulary and store, settle the length.

    Args:
        settings: What flags and file set; the corpus among it.
        out: The run's folder; None: a free name under `runs/`.
        dry_run: Plan only: the events end with the plan and the first line, and nothing is left on disk.
        should_stop: Asked during preparation; once true, the events end without `Ready`.
        is_from_file: A configuration file decides what flags leave open, and not the plan; None: as the
            origins of `settings` tell.

    Yields:
        Events, the last of them `Ready`. Unless it comes the run's folder is removed again.

    Raises:
        UserError: the text, the settings or the machine do not allow it.
    """
    started = time.monotonic()
    if is_from_file is None:
        is_from_file = any(sourced.origin != FLAG for sourced in settings.values())
    request = _Request.of(settings, is_from_file, started, should_stop)
    with ExitStack() as stack:
        try:
            ready = yield from _prepare(request, out, dry_run, stack)
        except Interrupted:
            return
        if ready is not None:
            stack.pop_all()  # from here on the folder is a run, whatever happens to its training
    if ready is not None:
        yield ready


@dataclass(frozen=True)
class _Request:
    """What was asked for, and what is known before the text is looked at."""

    settings: Settings
    is_from_file: bool
    device: torch.device
    attention: str
    init: Run | None
    started: float
    should_stop: Callable[[], bool]
    notices: tuple[str, ...]

    @classmethod
    def of(
        cls, settings: Settings, is_from_file: bool, started: float, should_stop: Callable[[], bool]
    ) -> "_Request":
        """Look at what can be refused at once."""
        name = _value(settings, "init")
        if is_from_file:
            build(settings)
        elif name is None:
            # What contradicts itself does so for any text: refused before a long one is read.
            plan_text(settings, _ANY_TEXT)
        init = None if name is None else open_run(str(name))
        if init is not None:
            refuse_without_tokenizer(init)
            load_model(init)  # what cannot be read is refused before anything is made
            theirs = build(read_settings(init.config_path))
            settings = take_from_run(settings, theirs, str(name))
        device = choose_device(str(_value(settings, "device")))
        choose_precision(str(_value(settings, "precision")), device, training=True)
        if _value(settings, "optimizer") == "muon":
            refuse_missing_muon()
        attention, told = choose_attention(settings)
        if told is not None:
            settings = settings | {"attention": Sourced(attention, f"plan: {told}")}
        notices = () if told is None else (f"attention: {told}",)
        return cls(settings, is_from_file, device, attention, init, started, should_stop, notices)

    def pause(self) -> None:
        """End the preparation if the user wants to stop."""
        if self.should_stop():
            raise Interrupted


def choose_attention(settings: Settings) -> tuple[str, str | None]:
    """Choose the form of attention for a model, and say why where it is not the one asked for, else None.

    Raises:
        UserError: one named on the command line cannot run this model here.
    """
    name = _value(settings, "attention")
    demands = Demands(
        choose_device(_value(settings, "device")),
        _value(settings, "d_head") or Demands().d_head,
        has_values=_value(settings, "position") == "shaw" and _value(settings, "shaw_values"),
        dropout=_value(settings, "dropatt"),
    )
    choice, told = choose_backend(name, demands), fall_back(name, demands)
    if told is not None and name != "auto" and settings["attention"].origin == FLAG:
        raise cannot_run(name, choice)
    return choice.name, told


def _value(settings: Settings, name: str) -> Any:  # Any: a setting's own type, which its name decides
    return settings[name].value if name in settings else leaf(name).default


@dataclass(frozen=True)
class _Texts:
    """The texts of a run, found and surveyed, and the folder that they go to."""

    run: Run
    corpus: Corpus
    survey: Survey
    valid: Corpus | None
    test: Corpus | None


def _prepare(
    request: _Request, out: Path | None, is_dry: bool, stack: ExitStack
) -> Generator[Event, None, Ready | None]:
    """Do all of `begin` but its last event; `stack` holds what must be undone unless that event comes."""
    yield from map(Notice, request.notices)
    texts = yield from _find_texts(request, out, is_dry, stack)
    run, facts = texts.run, _facts(request, texts)
    settings = plan_text(request.settings, facts, from_file=request.is_from_file)
    tokenizer = yield from _make_tokenizer(request, settings, texts)
    facts = replace(facts, n_vocab=tokenizer.n_vocab)
    settings = plan_vocabulary(settings, facts, from_file=request.is_from_file)
    yield from _told_clusters(settings)
    info = yield from _encode(request, texts, tokenizer)
    valid = info.splits.get("valid")
    facts = replace(
        facts, n_train_tokens=info.splits["train"].n_tokens, n_valid_tokens=valid.n_tokens if valid else 0
    )
    fitted = settings | fit_streams(Known(settings), facts)
    check_fits(without_length(fitted), tokenizer.n_vocab, request.device, None if is_dry else run)

    budget, measured = None, None

    def time_on_this_machine(wanted: Settings) -> Measured:
        nonlocal budget, measured
        budget = Budget(request.started, 60 * Known(wanted).number("minutes"))
        measured = measure(
            run,
            without_length(wanted),
            tokenizer,
            length_s=budget.limit_s,
            started=request.started,
            should_stop=request.should_stop,
        )
        return measured

    if not any(Known(settings).has(name) for name in ("steps", "epochs")):
        is_compiled = _value(settings, "compile")
        stage = "compiling and timing a few steps" if is_compiled else "timing a few steps"
        yield Progress(stage, 0, 0, "steps", is_deaf=is_compiled)
    planned = plan_length(settings, facts, time_on_this_machine, from_file=request.is_from_file)
    request.pause()
    for text in changed_by_plan(request.settings, planned):
        yield Notice(text)
    planned = yield from leave_out_failed_compile(planned, measured)
    config = build(planned)
    yield from _told_short_streams(config, facts)
    if measured is not None and budget is not None:
        yield from _told_compile_time(measured, budget)
    expected_s = None if measured is None else _expected_s(config, planned, facts, measured)
    yield Planned(_summarize(config, planned, texts.corpus, info, tokenizer, request.device, expected_s))
    if is_dry:
        yield _first_line(texts, tokenizer)
        return None
    origins = {leaf.name: planned[leaf.name].origin if leaf.name in planned else DEFAULT for leaf in LEAVES}
    write_whole(run.config_path, dump(config, origins).encode())
    return Ready(run, config, origins, budget)


def _told_clusters(settings: Settings) -> Iterator[Notice]:
    """Say where clusters of the vocabulary, or their widths, bring nothing."""
    kind, starts, div_val = (_value(settings, name) for name in ("tokenizer", "cutoffs", "div_val"))
    if starts and kind != "word":
        yield Notice(
            "cutoffs: clusters pay where frequent tokens have small ids; "
            f"those of a {kind} vocabulary are not sorted by frequency"
        )
    if div_val > 1 and not starts:
        yield Notice(
            f"div_val: {div_val} asked for; without cutoffs there is one cluster, so it changes nothing"
        )


def _told_short_streams(config: Config, facts: Facts) -> Iterator[Notice]:
    """Say when the text is shared among so many streams that none fills a segment."""
    n_stream, tgt_len = config.optim.batch_size, config.model.tgt_len
    longest = -(-max(facts.n_train_tokens - 1, 1) // n_stream)
    if n_stream > 1 and longest < tgt_len:
        yield Notice(
            f"tgt_len: {tgt_len} asked for, {longest} taken: {facts.n_train_tokens:,} tokens in "
            f"{n_stream} streams; a smaller --batch-size gives longer segments"
        )


def _told_compile_time(measured: Measured, budget: Budget) -> Iterator[Notice]:
    """Say when compiling takes much of the time that was asked for."""
    if measured.compile_s > COMPILE_SHARE * budget.limit_s:
        yield Notice(f"compile: takes {measured.compile_s:,.0f} s of the {budget.limit_s:,.0f} s asked for")


def leave_out_failed_compile(
    settings: Settings, measured: Measured | None
) -> Generator[Event, None, Settings]:
    """Say that compiling failed while steps were timed, and leave it out, so that it is not tried again."""
    if measured is None or measured.compile_fault is None:
        return settings
    yield Notice(f"compile: failed, {measured.compile_fault}; going on uncompiled")
    return settings | {"compile": Sourced(False, "plan: failed here")}


def without_length(settings: Settings) -> Config:
    """Build settings whose length is still open."""
    return build({name: sourced for name, sourced in settings.items() if name not in LENGTHS})


def _expected_s(config: Config, settings: Settings, facts: Facts, measured: Measured) -> float:
    assert config.train.steps is not None
    return measured.spent_s + run_s(config.train.steps, Known(settings), facts, measured)


def _find_texts(
    request: _Request, out: Path | None, is_dry: bool, stack: ExitStack
) -> Generator[Event, None, _Texts]:
    """Find and survey the texts; the run's folder is made first, so that a bad place shows at once."""
    settings = request.settings
    if request.init is not None:
        # Else the plan of any text has looked at them together.
        _check_data(settings)
    paths: tuple[str, ...] = _value(settings, "corpus")
    separator = _value(settings, "document_separator")
    rules = {
        "errors": _value(settings, "encoding_errors"),
        "raw": _value(settings, "tokenizer") == "byte" if "tokenizer" in settings else False,
        "document_separator": None if separator is None else unescape(separator),
    }
    for name in ("encoding", "newlines", "spaces", "packed", "include", "exclude"):
        rules[name] = _value(settings, name)
    for name in ("text_field", "document_per_file"):
        rules[name] = _value(settings, name)
    named: dict[str, Corpus | None] = {}
    for name in ("valid", "test"):
        path = _value(settings, name)
        named[name] = None if path is None else (yield from _search(request, [path], **rules))
    valid, test = named["valid"], named["test"]
    rules["valid_every"] = _value(settings, "valid_every")
    rules["held_out"] = [one for one in (valid, test) if one is not None]
    has_stdin = "-" in paths
    corpus = None if has_stdin else (yield from _search(request, paths, **rules))
    if is_dry:
        run = Run(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-"))))
    else:
        run = new_run(out, _stem(paths[0]) if paths else "corpus")
        stack.callback(discard_run, run)
    if corpus is None:
        yield Progress("reading standard input", 0, 0, "bytes")
        corpus = yield from _search(request, paths, **rules, stdin_copy=run.folder / "stdin.txt")
    for one in (corpus, valid, test):
        yield from map(Notice, () if one is None else one.notices)
    # The default share is bounded in bytes; one that was asked for is meant as it is.
    fraction: float | None = _value(settings, "valid_fraction")
    bound = VALID_BYTES_MAX if fraction is None else None
    if valid is not None:
        fraction = 0.0
    elif fraction is None:
        fraction = VALID_FRACTION
    found = None
    for event in survey(corpus, valid_fraction=fraction, valid_bytes_max=bound):
        if isinstance(event, Survey):
            found = event
        else:
            yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
            request.pause()
    assert found is not None, "a survey ends with what it found"
    for text in found.notices:
        yield Notice(text)
    if is_dry:
        yield Found(corpus, found, valid, test)
    return _Texts(run, corpus, found, valid, test)


def _check_data(settings: Settings) -> None:
    """Refuse settings of the text that contradict one another."""
    values = {leaf.name: _value(settings, leaf.name) for leaf in LEAVES if leaf.section == "data"}
    try:
        DataConfig(**values)
    except SettingError as error:
        raise blame(error, settings) from None


def _search(request: _Request, paths: Sequence[str], **rules: Any) -> Generator[Event, None, Corpus]:
    """Find a corpus, in which packed files may take long; `rules` are those of `search_corpus`."""
    for event in search_corpus(paths, **rules):
        if isinstance(event, Corpus):
            return event
        yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
        request.pause()
    raise AssertionError("a search ends with the corpus")


def _stem(path: str) -> str:
    return "stdin" if path == "-" else Path(path).resolve().stem


def _facts(request: _Request, texts: _Texts) -> Facts:
    found = texts.survey
    return Facts(
        n_bytes=found.n_bytes,
        n_characters=found.n_characters,
        alphabet_size=found.alphabet_size,
        script=found.script,
        device_kind=request.device.type,
        has_bf16=has_bf16(request.device),
        has_muon=has_muon(),
        attention=request.attention,
    )


def _make_tokenizer(
    request: _Request, settings: Settings, texts: _Texts
) -> Generator[Event, None, Tokenizer]:
    """Learn the vocabulary from the training part alone, or take that of the run to start from."""
    kind, found = _value(settings, "tokenizer"), texts.survey
    if request.init is not None:
        tokenizer = load_tokenizer(request.init.tokenizer_folder)
    else:
        if kind in ("word", "sentencepiece") and not found.has_text:
            raise UserError(
                f"{texts.corpus.name}: has only white space; a {kind} vocabulary needs words; "
                "use --tokenizer char or byte"
            )
        if kind == "sentencepiece" and found.split_at > SAMPLE_BYTES:
            yield Notice(f"vocabulary: learned from {SAMPLE_BYTES >> 20} MiB drawn from all over the text")
        yield Progress(f"making the {kind} vocabulary", 0, 0, "bytes")
        tokenizer = build_tokenizer(
            kind,
            vocab_size=_value(settings, "vocab_size"),
            text=lambda: _interruptible(request, read_text(texts.corpus, 0, found.split_at)),
            n_bytes=found.split_at,
            seed=_value(settings, "seed"),
            newlines=_value(settings, "newlines"),
        )
        asked = _value(request.settings, "vocab_size")
        if asked is not None and tokenizer.n_vocab != asked:
            yield Notice(f"vocabulary: {asked:,} asked for, the text gives {tokenizer.n_vocab:,}")
    tokenizer.save(texts.run.tokenizer_folder)
    return tokenizer


def _interruptible(request: _Request, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        request.pause()
        yield chunk


def _encode(request: _Request, texts: _Texts, tokenizer: Tokenizer) -> Generator[Event, None, StoreInfo]:
    for event in prepare(
        texts.corpus,
        tokenizer,
        texts.run.folder,
        split_at=texts.survey.split_at,
        valid=texts.valid,
        test=texts.test,
    ):
        if isinstance(event, Prepared):
            for text in event.notices:
                yield Notice(text)
            return event.info
        yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
        request.pause()
    raise AssertionError("a preparation ends with its store")


def _summarize(
    config: Config,
    settings: Settings,
    corpus: Corpus,
    info: StoreInfo,
    tokenizer: Tokenizer,
    device: torch.device,
    expected_s: float | None,
) -> PlanSummary:
    train, model, steps = info.splits["train"].n_tokens, config.model, config.train.steps
    valid = info.splits["valid"].n_tokens if "valid" in info.splits else 0
    assert steps is not None
    n_stream = min(config.optim.batch_size, train - 1)
    per_epoch = steps_per_epoch(train, n_stream, model.tgt_len)
    n_embedding, n_rest = count_parameters(model, tokenizer.n_vocab)
    is_whole = last_eval_is_whole(valid, steps * (train - 1) // per_epoch)
    return PlanSummary(
        corpus=config.data.corpus,
        n_bytes=corpus.n_bytes,
        n_train_tokens=train,
        n_valid_tokens=valid,
        tokenizer=tokenizer.kind,
        n_vocab=tokenizer.n_vocab,
        n_embedding=n_embedding,
        n_rest=n_rest,
        step_tokens=n_stream * model.tgt_len,
        epochs=steps / per_epoch,
        memory_bytes=memory_bytes(config, tokenizer.n_vocab),
        device=str(device),
        precision=config.machine.precision,
        attention=config.machine.attention,
        expected_s=expected_s,
        last_eval_tokens=valid if is_whole else min(valid, config.train.eval_tokens or valid),
        config=config,
        settings=settings,
    )


def _first_line(texts: _Texts, tokenizer: Tokenizer) -> FirstLine:
    """Encode the first line that has something in it."""
    start = next(read_text(texts.corpus, 0, texts.survey.split_at), b"")[:LARGEST_LINE_BYTES]
    line = next((line for line in start.splitlines() if line.strip()), start)
    if not texts.corpus.raw:
        line = line[: complete_utf8(line)]
    ids = tokenizer.encode(line).tolist()
    pieces = [
        tokenizer.decode([token], after=before).decode(errors="replace")
        for before, token in zip([None, *ids], ids, strict=False)
    ]
    return FirstLine(line.decode(errors="replace"), tuple(pieces), tuple(ids))
