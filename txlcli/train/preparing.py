"""From a corpus to a run that is ready to train."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from txlcli import UserError
from txlcli.attention import Demands, cannot_run, choose_backend, fall_back
from txlcli.checkpoint import load_model
from txlcli.config import (
    DEFAULT,
    DOCUMENT_RULES,
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
    dump_settings,
    fault_at,
    leaf,
    override,
    read_origins,
    read_settings,
    unescape,
)
from txlcli.data import (
    Origin,
    Prepared,
    StoredRun,
    StoreInfo,
    Taken,
    find_store,
    find_survey,
    hash_rules,
    prepare,
    reading_rules,
    steps_per_epoch,
    stores_in,
    survey_record,
    take_store,
    trusted_hash,
    with_rules,
)
from txlcli.device import choose_device, choose_precision, has_bf16
from txlcli.files import describe_error, write_whole
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
from txlcli.run import (
    RUNS,
    Run,
    discard_run,
    new_run,
    open_run,
    read_asked,
    refuse_without_tokenizer,
    sweep_run,
    write_asked,
    writing,
)
from txlcli.sources import Chunk, Corpus, Survey, complete_utf8, read_chunks, search_corpus, survey
from txlcli.sources.survey import VALID_BYTES_MAX, VALID_FRACTION
from txlcli.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, sampled_bytes
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

HASHED_S = 0.1
"""Seconds between looks at files that are hashed."""

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

    locks = ExitStack()

    def make(stack: ExitStack, paths: tuple[str, ...]) -> Run:
        if dry_run:
            return Run(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-"))))
        run = new_run(out, _stem(paths[0]) if paths else "corpus")
        # Another process may have begun in the same folder just now, which is then its own to discard.
        locks.enter_context(writing(run))
        stack.callback(discard_run, run)
        sweep_run(run)
        write_asked(run, dump_settings(settings), is_from_file=is_from_file)
        return run

    beside = RUNS if out is None else out.parent
    with locks:
        ready = yield from _until_ready(request, _Place(make, beside, is_dry=dry_run))
    if ready is not None:
        yield ready  # only now: a training takes the lock itself


def begin_again(
    run: Run, changes: Settings, *, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Prepare a run whose preparation was cut off, from the texts that its config.yaml names.

    What was there of it is removed. Unless `Ready` comes the run can be begun again once more.

    Args:
        run: The run; this process holds its lock.
        changes: What is set anew.
        should_stop: As for `begin`.

    Raises:
        UserError: as `begin`; or its text came through standard input and is not all there.
    """
    started = time.monotonic()
    is_from_file = read_asked(run)
    assert is_from_file is not None, "the run is not prepared"
    origins = read_origins(run.config_path)
    asked = {
        name: replace(sourced, origin=origins.get(name, sourced.origin))
        for name, sourced in read_settings(run.config_path).items()
    }
    # Before any is read: whoever wrote the run may not be whoever goes on with it.
    others = [_value(asked, name) for name in ("valid", "test", "init")]
    names = ", ".join([*_value(asked, "corpus"), *filter(None, others)])
    yield Notice(f"{run.folder}: its text was not prepared to the end; it is prepared anew, from {names}")
    request = _Request.of(override(asked, changes), is_from_file, started, should_stop)

    def undo() -> None:
        if read_asked(run) is not None:  # else it failed after the last thing to do: all is there
            _clear(run)

    def make(stack: ExitStack, paths: tuple[str, ...]) -> Run:
        _clear(run)
        stack.callback(undo)
        run.checkpoints_folder.mkdir(exist_ok=True)
        return run

    ready = yield from _until_ready(request, _Place(make, run.folder.parent, stdin_copy=_stdin_copy(run)))
    if ready is not None:
        yield ready


def _clear(run: Run) -> None:
    """Remove what a preparation that was cut off has left."""
    sweep_run(run)
    shutil.rmtree(run.data_folder, ignore_errors=True)
    for path in run.tokenizer_folder.glob("tokenizer.*"):
        with suppress(OSError):  # a folder that somebody has put there
            path.unlink()


def _stdin_copy(run: Run) -> Path:
    return run.folder / "stdin.txt"


@dataclass(frozen=True)
class _Place:
    """Where a run is prepared.

    Attributes:
        make: Makes its folder, which is undone with the stack; the corpus' paths may give it its name.
        beside: The folder whose runs may have the same text.
        is_dry: It is only planned.
        stdin_copy: Where standard input was copied to before; None: it is read.
    """

    make: Callable[[ExitStack, tuple[str, ...]], Run]
    beside: Path
    is_dry: bool = False
    stdin_copy: Path | None = None


def _until_ready(request: "_Request", place: _Place) -> Generator[Event, None, Ready | None]:
    with ExitStack() as stack:
        try:
            ready = yield from _prepare(request, place, stack)
        except Interrupted:
            return None
        except OSError as error:
            where = place.beside if error.filename is None else os.fsdecode(error.filename)
            raise UserError(f"{where}: the run cannot be prepared; {describe_error(error)}") from error
        if ready is not None:
            stack.pop_all()  # from here on the folder is a run, whatever happens to its training
    return ready


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
    notices: tuple[Notice, ...]

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
        init, notices = None if name is None else open_run(str(name)), tuple[Notice, ...]()
        if init is not None:
            refuse_without_tokenizer(init)
            loaded = load_model(init)  # what cannot be read is refused before anything is made
            settings = take_from_run(settings, loaded.config, str(name))
            _check_documents(settings, loaded.tokenizer, str(name))
            if loaded.damage is not None:
                notices = (Notice(loaded.damage, is_damage=True),)
        device = choose_device(str(_value(settings, "device")))
        choose_precision(str(_value(settings, "precision")), device, training=True)
        if _value(settings, "optimizer") == "muon":
            refuse_missing_muon()
        attention, told = choose_attention(settings)
        if told is not None:
            settings = settings | {"attention": Sourced(attention, f"plan: {told}")}
            notices += (Notice(f"attention: {told}"),)
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
    """The texts of a run, found and surveyed, the folder that they go to, and the stores beside it."""

    run: Run
    corpus: Corpus
    survey: Survey
    valid: Corpus | None
    test: Corpus | None
    origin: Origin
    stores: tuple[StoredRun, ...]

    @property
    def found(self) -> Found:
        """What was found, as an event tells it."""
        return Found(self.corpus, self.survey, self.valid, self.test)

    def read_train(self) -> Iterator[bytes]:
        """Read what is learned from."""
        for chunk in self._read_train():
            yield chunk.text

    def start_of_train(self, n_bytes: int) -> bytes:
        """Read the first bytes of what is learned from, of its first document if there are documents."""
        chunk = next(self._read_train(), None)
        if chunk is None:
            return b""
        ends = chunk.document_ends
        return chunk.text[: min([n_bytes, *(() if ends is None else ends[:1].tolist())])]

    def _read_train(self) -> Iterator[Chunk]:
        part: Literal["all", "train"] = "all" if self.corpus.valid_every is None else "train"
        return read_chunks(self.corpus, 0, self.survey.split_at, part=part)


def _prepare(request: _Request, place: _Place, stack: ExitStack) -> Generator[Event, None, Ready | None]:
    """Do all of `begin` but its last event; `stack` holds what must be undone unless that event comes."""
    is_dry = place.is_dry
    yield from request.notices
    texts = yield from _find_texts(request, place, stack)
    run, facts = texts.run, _facts(request, texts)
    settings = plan_text(request.settings, facts, from_file=request.is_from_file)
    taken = yield from _take(request, settings, texts)
    tokenizer = (yield from _make_tokenizer(request, settings, texts)) if taken is None else taken.tokenizer
    yield from _told_vocabulary(request, tokenizer)
    facts = replace(facts, n_vocab=tokenizer.n_vocab)
    settings = plan_vocabulary(settings, facts, from_file=request.is_from_file)
    yield from _told_clusters(settings)
    info = (yield from _encode(request, texts, tokenizer)) if taken is None else taken.info
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
    yield Planned(_summarize(config, planned, texts.found, info, tokenizer, request.device, expected_s))
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


def _find_texts(request: _Request, place: _Place, stack: ExitStack) -> Generator[Event, None, _Texts]:
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
    if place.stdin_copy is not None:
        paths = _with_copy(paths, place.stdin_copy)
    has_stdin = "-" in paths
    corpus = None if has_stdin else (yield from _search(request, paths, **rules))
    run = place.make(stack, paths)
    if corpus is None:
        yield Progress("reading standard input", 0, 0, "bytes")
        corpus = yield from _search(request, paths, **rules, stdin_copy=_stdin_copy(run))
    for one in (corpus, valid, test):
        yield from map(Notice, () if one is None else one.notices)
    # The default share is bounded in bytes; one that was asked for is meant as it is.
    fraction: float | None = _value(settings, "valid_fraction")
    bound = VALID_BYTES_MAX if fraction is None else None
    if valid is not None:
        fraction = 0.0
    elif fraction is None:
        fraction = VALID_FRACTION
    origin, stores = Origin.of(corpus, valid, test), tuple(stores_in(place.beside))
    for name, look in origin.looks.items():
        sha256 = trusted_hash(stores, look)
        if sha256 is not None:
            origin.hashes[name] = sha256
    found = yield from _survey(request, corpus, origin, stores, fraction, bound)
    for text in found.notices:
        yield Notice(text)
    texts = _Texts(run, corpus, found, valid, test, origin, stores)
    if place.is_dry:
        yield texts.found
    return texts


def _with_copy(paths: tuple[str, ...], copy: Path) -> tuple[str, ...]:
    """Read the copy of standard input that was made before.

    Raises:
        UserError: it was not made to the end.
    """
    if "-" in paths and not copy.exists():
        raise UserError(
            f"{copy.parent}: cannot be prepared anew; its text came through standard input, which was not "
            "read to the end; begin another run: ... | txl train -"
        )
    return tuple(str(copy) if path == "-" else path for path in paths)


def _survey(
    request: _Request,
    corpus: Corpus,
    origin: Origin,
    stores: Sequence[StoredRun],
    fraction: float,
    bound: int | None,
) -> Generator[Event, None, Survey]:
    """Survey the corpus, unless that was done before; what is read for it is hashed too."""
    rules = hash_rules([reading_rules(corpus), fraction, bound])
    sha256 = origin.hashes.get("train")
    found = None if sha256 is None else find_survey(stores, sha256, rules, corpus.name)
    if found is None or found.n_bytes != corpus.n_bytes:
        with ExitStack() as stack:
            # Raw bytes are not read for a survey; they are hashed when they are encoded.
            hashing = None
            if sha256 is None and not corpus.raw:
                hashing = stack.enter_context(origin.hash_missing(("train",)))
            for event in survey(corpus, valid_fraction=fraction, valid_bytes_max=bound):
                if isinstance(event, Survey):
                    found = event
                    continue
                if hashing is not None:
                    hashing.allow(event.done_bytes)
                yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
                request.pause()
            if hashing is not None:
                origin.hashes.update(hashing.result())
    assert found is not None, "a survey ends with what it found"
    origin.survey = survey_record(found, rules)
    return found


def _take(request: _Request, settings: Settings, texts: _Texts) -> Generator[Event, None, Taken | None]:
    """Take vocabulary and ids of a run that made them of the same text under the same settings, if any."""
    origin = texts.origin
    origin.rules = hash_rules([_text_rules(request, settings, texts)])
    stores = with_rules(texts.stores, origin.rules)
    if not stores:
        return None
    # Only now is it worth to hash what no survey has read.
    with origin.hash_missing() as hashing:
        while not hashing.is_done(HASHED_S):
            yield Progress("comparing with texts prepared before", hashing.n_read, hashing.n_bytes, "bytes")
            request.pause()
        origin.hashes.update(hashing.result())
    known = find_store(stores, origin)
    if known is None:
        return None
    try:
        for event in take_store(known, origin, texts.run.folder):
            if isinstance(event, Taken):
                how = "by hard links" if event.is_linked else "as copies"
                yield Notice(
                    f"{texts.corpus.name}: prepared before; vocabulary and ids are those of {known.run_dir}, "
                    f"{how}"
                )
                yield from map(Notice, event.info.notices)
                return event
            yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
            request.pause()
    except UserError as error:
        _clear(texts.run)
        yield Notice(f"{known.run_dir}: has prepared the same text, but it cannot be taken: {error}")
    return None


def _text_rules(request: _Request, settings: Settings, texts: _Texts) -> dict[str, Any]:
    """Return all settings that shape tokenizer and ids."""
    kind, found = _value(settings, "tokenizer"), texts.survey
    tokenizer: dict[str, Any] = {name: _value(settings, name) for name in ("tokenizer", "vocab_size")}
    if request.init is not None:
        tokenizer = {"fingerprint": load_tokenizer(request.init.tokenizer_folder).fingerprint()}
    elif found.n_train_bytes > (sampled_bytes(kind, _value(settings, "newlines")) or found.n_train_bytes):
        tokenizer["seed"] = _value(settings, "seed")  # it chooses what is learned from
    others = {"valid": texts.valid, "test": texts.test}
    return {
        "corpus": reading_rules(texts.corpus),
        "split_at": found.split_at,
        "others": {name: None if one is None else reading_rules(one) for name, one in others.items()},
        "tokenizer": tokenizer,
    }


def _check_data(settings: Settings) -> None:
    """Refuse settings of the text that contradict one another."""
    values = {leaf.name: _value(settings, leaf.name) for leaf in LEAVES if leaf.section == "data"}
    try:
        DataConfig(**values)
    except SettingError as error:
        raise blame(error, settings) from None


def _check_documents(settings: Settings, tokenizer: Tokenizer, run: str) -> None:
    """Refuse documents where the vocabulary of the run to start from has nothing that ends one."""
    rule = next((name for name in DOCUMENT_RULES if _value(settings, name) not in (None, False)), None)
    if rule is not None and tokenizer.document_end is None:
        raise fault_at(
            leaf(rule),
            settings[rule].origin,
            f"needs a vocabulary with an end of documents, and that of {run} has none; leave it out, "
            "or train without --init",
        )


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
        sampled = sampled_bytes(kind, _value(settings, "newlines"))
        if sampled is not None and found.n_train_bytes > sampled:
            yield Notice(f"vocabulary: learned from {sampled >> 20} MiB drawn from all over the text")
        yield Progress(f"making the {kind} vocabulary", 0, 0, "bytes")
        tokenizer = build_tokenizer(
            kind,
            vocab_size=_value(settings, "vocab_size"),
            text=lambda: _interruptible(request, _lessons(kind, texts)),
            n_bytes=found.n_train_bytes,
            seed=_value(settings, "seed"),
            newlines=_value(settings, "newlines"),
            has_documents=texts.corpus.has_documents,
        )
    tokenizer.save(texts.run.tokenizer_folder)
    return tokenizer


def _lessons(kind: str, texts: _Texts) -> Iterator[bytes]:
    """Read what a vocabulary is learned from; of characters the survey has seen which there are."""
    if kind == "char":
        return iter(["".join(texts.survey.alphabet).encode()])
    return texts.read_train()


def _told_vocabulary(request: _Request, tokenizer: Tokenizer) -> Iterator[Notice]:
    """Say where the vocabulary has another size than was asked for."""
    asked = _value(request.settings, "vocab_size")
    if request.init is None and asked is not None and tokenizer.n_vocab != asked:
        yield Notice(f"vocabulary: {asked:,} asked for, the text gives {tokenizer.n_vocab:,}")


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
        origin=texts.origin,
        tokenizer_folder=texts.run.tokenizer_folder,
        n_processors=_value(request.settings, "threads"),
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
    found: Found,
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
        found=found,
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
    start = texts.start_of_train(LARGEST_LINE_BYTES)
    line = next((line for line in start.splitlines() if line.strip()), start)
    if not texts.corpus.raw:
        line = line[: complete_utf8(line)]
    ids = tokenizer.encode(line).tolist()
    pieces = [
        tokenizer.decode([token], after=before).decode(errors="replace")
        for before, token in zip([None, *ids], ids, strict=False)
    ]
    return FirstLine(line.decode(errors="replace"), tuple(pieces), tuple(ids))
