"""Vocabulary and ids of a run's texts: those of a run beside it, or new ones."""

from collections.abc import Generator, Iterator
from typing import Any

from txlcli import UserError
from txlcli.config import Settings, value_of
from txlcli.data import (
    Prepared,
    StoreInfo,
    Taken,
    find_store,
    hash_rules,
    prepare,
    reading_rules,
    take_store,
    with_rules,
)
from txlcli.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, sampled_bytes
from txlcli.train.cost import is_timed
from txlcli.train.events import Event, Notice, Progress
from txlcli.train.place import clear
from txlcli.train.request import Request
from txlcli.train.texts import Texts

HASHED_S = 0.1
"""Seconds between looks at files that are hashed."""


def take(request: Request, settings: Settings, texts: Texts) -> Generator[Event, None, Taken | None]:
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
        # Steps that are timed read the ids; they take much longer than to check these.
        for event in take_store(known, origin, texts.run.folder, is_checked=is_timed(settings)):
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
        clear(texts.run)
        yield Notice(f"{known.run_dir}: has prepared the same text, but it cannot be taken: {error}")
    return None


def _text_rules(request: Request, settings: Settings, texts: Texts) -> dict[str, Any]:
    """Return all settings that shape tokenizer and ids."""
    kind, found = value_of(settings, "tokenizer"), texts.survey
    tokenizer: dict[str, Any] = {name: value_of(settings, name) for name in ("tokenizer", "vocab_size")}
    if request.init is not None:
        tokenizer = {"fingerprint": load_tokenizer(request.init.tokenizer_folder).fingerprint()}
    elif found.n_train_bytes > (sampled_bytes(kind, value_of(settings, "newlines")) or found.n_train_bytes):
        tokenizer["seed"] = value_of(settings, "seed")  # it chooses what is learned from
    others = {"valid": texts.valid, "test": texts.test}
    return {
        "corpus": reading_rules(texts.corpus),
        "split_at": found.split_at,
        "others": {name: None if one is None else reading_rules(one) for name, one in others.items()},
        "tokenizer": tokenizer,
    }


def make_tokenizer(request: Request, settings: Settings, texts: Texts) -> Generator[Event, None, Tokenizer]:
    """Learn the vocabulary from the training part alone, or take that of the run to start from."""
    kind, found = value_of(settings, "tokenizer"), texts.survey
    if request.init is not None:
        tokenizer = load_tokenizer(request.init.tokenizer_folder)
    else:
        if kind in ("word", "sentencepiece") and not found.has_text:
            raise UserError(
                f"{texts.corpus.name}: has only white space; a {kind} vocabulary needs words; "
                "use --tokenizer char or byte"
            )
        sampled = sampled_bytes(kind, value_of(settings, "newlines"))
        if sampled is not None and found.n_train_bytes > sampled:
            yield Notice(f"vocabulary: learned from {sampled >> 20} MiB drawn from all over the text")
        yield Progress(f"making the {kind} vocabulary", 0, 0, "bytes")
        tokenizer = build_tokenizer(
            kind,
            vocab_size=value_of(settings, "vocab_size"),
            text=lambda: _interruptible(request, _lessons(kind, texts)),
            n_bytes=found.n_train_bytes,
            seed=value_of(settings, "seed"),
            newlines=value_of(settings, "newlines"),
            has_documents=texts.corpus.has_documents,
        )
    tokenizer.save(texts.run.tokenizer_folder)
    return tokenizer


def _lessons(kind: str, texts: Texts) -> Iterator[bytes]:
    """Read what a vocabulary is learned from; of characters the survey has seen which there are."""
    if kind == "char":
        return iter(["".join(texts.survey.alphabet).encode()])
    return texts.read_train()


def _interruptible(request: Request, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        request.pause()
        yield chunk


def encode(request: Request, texts: Texts, tokenizer: Tokenizer) -> Generator[Event, None, StoreInfo]:
    """Encode all texts into the run's store."""
    for event in prepare(
        texts.corpus,
        tokenizer,
        texts.run.folder,
        split_at=texts.survey.split_at,
        valid=texts.valid,
        test=texts.test,
        origin=texts.origin,
        tokenizer_folder=texts.run.tokenizer_folder,
        n_processors=value_of(request.settings, "threads"),
    ):
        if isinstance(event, Prepared):
            for text in event.notices:
                yield Notice(text)
            return event.info
        yield Progress(event.stage, event.done_bytes, event.total_bytes, "bytes")
        request.pause()
    raise AssertionError("a preparation ends with its store")
