"""The texts of a run, found and surveyed."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from txlcli import UserError
from txlcli.config import LEAVES, DataConfig, SettingError, Settings, blame, unescape, value_of
from txlcli.data import (
    Origin,
    StoredRun,
    find_survey,
    hash_rules,
    reading_rules,
    stores_in,
    survey_record,
    trusted_hash,
)
from txlcli.run import Run
from txlcli.sources import (
    VALID_BYTES_MAX,
    VALID_FRACTION,
    Chunk,
    Corpus,
    Survey,
    list_some,
    read_chunks,
    search_corpus,
    survey,
)
from txlcli.train.events import Event, Found, Notice, Progress
from txlcli.train.place import Place
from txlcli.train.request import Request


@dataclass(frozen=True)
class Texts:
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

    def start_of_train(self) -> bytes:
        """Read the first chunk of what is learned from, of its first document if there are documents."""
        chunk = next(self._read_train(), None)
        if chunk is None:
            return b""
        ends = chunk.document_ends
        return chunk.text if ends is None or not len(ends) else chunk.text[: ends[0]]

    def _read_train(self) -> Iterator[Chunk]:
        part: Literal["all", "train"] = "all" if self.corpus.valid_every is None else "train"
        return read_chunks(self.corpus, 0, self.survey.split_at, part=part)


def find_texts(request: Request, place: Place, stack: ExitStack) -> Generator[Event, None, Texts]:
    """Find and survey the texts; the run's folder is made first, so that a bad place shows at once."""
    settings = request.settings
    if request.init is not None:
        # Else the plan of any text has looked at them together.
        _check_data(settings)
    paths: tuple[str, ...] = value_of(settings, "corpus")
    rules = _search_rules(settings)
    named: dict[str, Corpus | None] = {}
    for name in ("valid", "test"):
        path = value_of(settings, name)
        named[name] = None if path is None else (yield from _search(request, [path], **rules))
    valid, test = named["valid"], named["test"]
    rules["valid_every"] = value_of(settings, "valid_every")
    rules["held_out"] = [one for one in (valid, test) if one is not None]
    if place.stdin_copy is not None:
        paths = _with_copy(paths, place.stdin_copy)
    has_stdin = "-" in paths
    corpus = None if has_stdin else (yield from _search(request, paths, **rules))
    run = place.make(stack, paths)
    if corpus is None:
        yield Progress("reading standard input", 0, 0, "bytes")
        corpus = yield from _search(request, paths, **rules, stdin_copy=run.stdin_path)
    for one in (corpus, valid, test):
        yield from map(Notice, () if one is None else one.notices)
    if valid is not None and test is not None and (shared := test.shared_with(valid)):
        yield Notice(
            f"{list_some(shared)}: given as --valid and --test; chooses the checkpoint too, "
            "so the score of the test text flatters"
        )
    origin, stores = Origin.of(corpus, valid, test), tuple(stores_in(place.beside))
    for name, look in origin.looks.items():
        sha256 = trusted_hash(stores, look)
        if sha256 is not None:
            origin.hashes[name] = sha256
    found = yield from _survey(request, corpus, valid, origin, stores)
    yield from map(Notice, found.notices)
    texts = Texts(run, corpus, found, valid, test, origin, stores)
    if place.is_dry:
        yield texts.found
    return texts


def _check_data(settings: Settings) -> None:
    """Refuse settings of the text that contradict one another."""
    values = {leaf.name: value_of(settings, leaf.name) for leaf in LEAVES if leaf.section == "data"}
    try:
        DataConfig(**values)
    except SettingError as error:
        raise blame(error, settings) from None


def _search_rules(settings: Settings) -> dict[str, Any]:
    """Return how texts are read, in the words of `search_corpus`."""
    names = (
        "encoding",
        "newlines",
        "spaces",
        "packed",
        "include",
        "exclude",
        "text_field",
        "document_per_file",
    )
    separator = value_of(settings, "document_separator")
    return {name: value_of(settings, name) for name in names} | {
        "errors": value_of(settings, "encoding_errors"),
        "raw": value_of(settings, "tokenizer") == "byte" if "tokenizer" in settings else False,
        "document_separator": None if separator is None else unescape(separator),
    }


def _search(request: Request, paths: Sequence[str], **rules: Any) -> Generator[Event, None, Corpus]:
    """Find a corpus, in which packed files may take long; `rules` are those of `search_corpus`."""
    for event in search_corpus(paths, **rules):
        if isinstance(event, Corpus):
            return event
        yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
        request.pause()
    raise AssertionError("a search ends with the corpus")


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
    request: Request,
    corpus: Corpus,
    valid: Corpus | None,
    origin: Origin,
    stores: Sequence[StoredRun],
) -> Generator[Event, None, Survey]:
    """Survey the corpus, unless that was done before; what is read for it is hashed too."""
    # The default share is bounded in bytes; one that was asked for is meant as it is.
    fraction: float | None = value_of(request.settings, "valid_fraction")
    bound = VALID_BYTES_MAX if fraction is None else None
    if valid is not None:
        fraction = 0.0
    elif fraction is None:
        fraction = VALID_FRACTION
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
