"""Where a store's text came from, so that another run can tell whether its own would be the same.

A store is the same for two runs if the content of their files is (its sha256), and all settings that shape
tokenizer and ids are (the hash of `rules`); both are known before a vocabulary is made. A hash that was
recorded is trusted while size, inode, time of modification and time of change of every file are as recorded.
The time of change is set by the system alone, so text that is replaced behind an old time stamp shows.
"""

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txlcli import UserError, __version__, files
from txlcli.data.info import SPLITS, SourceInfo, Split, TextInfo
from txlcli.sources import Corpus

# What a clock of a file system may be behind: 2 s on FAT.
CLOCK_NS = 2_000_000_000
BLOCK_BYTES = 1 << 20
# How far a file may be read to hash it before whoever else reads it comes, so that the disk is read once.
AHEAD_BYTES = 1 << 26
# Raised with any change to what a text becomes under the same settings.
RULES_VERSION = 2


@dataclass(frozen=True)
class Look:
    """How the files of a text were at one moment, before any of them was read."""

    sources: tuple[SourceInfo, ...]
    paths: tuple[Path, ...]
    at_ns: int

    @classmethod
    def at(cls, corpus: Corpus) -> "Look":
        """Look at the files of a corpus.

        Raises:
            UserError: one is gone.
        """
        at_ns, sources = time.time_ns(), []
        for source in corpus.sources:
            try:
                status = source.path.stat()
            except OSError as error:
                raise UserError(f"{source.name}: cannot be read; {files.describe_error(error)}") from error
            inode = files.inode_of(status)
            sources.append(
                SourceInfo(
                    path=source.name,
                    n_bytes=status.st_size,
                    mtime_ns=status.st_mtime_ns,
                    inode=inode,
                    # Where there is no inode either it is the time of creation.
                    ctime_ns=None if inode is None else status.st_ctime_ns,
                )
            )
        return cls(tuple(sources), tuple(source.path for source in corpus.sources), at_ns)

    def is_as(self, before: Sequence[SourceInfo]) -> bool:
        """Say whether the files are surely those of before, whatever they are called now."""
        return len(before) == len(self.sources) and all(
            _marks(old) == _marks(new) and old.inode is not None and old.ctime_ns is not None
            for old, new in zip(before, self.sources, strict=True)
        )

    def recorded(self) -> tuple[SourceInfo, ...]:
        """Return what of this can prove later that the files are the same."""
        return tuple(
            source
            if source.ctime_ns is not None and source.ctime_ns < self.at_ns - CLOCK_NS
            else dataclasses.replace(source, inode=None, ctime_ns=None)
            for source in self.sources
        )


def _marks(source: SourceInfo) -> tuple[int | None, ...]:
    return source.n_bytes, source.mtime_ns, source.inode, source.ctime_ns


@dataclass
class Origin:
    """What is known of the texts of a store while it is prepared.

    Attributes:
        corpora: The corpus, as `train`, and the files given for `valid` and `test`.
        looks: How their files were before they were read.
        hashes: The sha256 of their content, as far as known.
        rules: The hash of all settings that shape tokenizer and ids; empty: no other run may take the store.
        survey: What a pass over the corpus found, for the store; None: nothing.
    """

    corpora: Mapping[Split, Corpus]
    looks: Mapping[Split, Look]
    hashes: dict[Split, str | None] = field(default_factory=dict)
    rules: str = ""
    survey: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, corpus: Corpus, valid: Corpus | None = None, test: Corpus | None = None) -> "Origin":
        """Look at the texts of a store.

        Raises:
            UserError: a file is gone.
        """
        given: dict[Split, Corpus | None] = {"train": corpus, "valid": valid, "test": test}
        corpora = {name: one for name, one in given.items() if one is not None}
        return cls(corpora, {name: Look.at(one) for name, one in corpora.items()})

    def hash_missing(self, names: Sequence[Split] = SPLITS) -> "Hashing":
        """Return what hashes those of the texts whose content is not known."""
        missing = [name for name in self.looks if name in names and name not in self.hashes]
        return Hashing({name: self.looks[name] for name in missing})

    def others(self) -> dict[str, TextInfo]:
        """Return what a store says of the texts that are not the corpus."""
        return {
            name: TextInfo(sources=look.recorded(), sha256=self.hashes.get(name))
            for name, look in self.looks.items()
            if name != "train"
        }

    def settle(self) -> None:
        """Forget the hashes of texts whose files are not as they were.

        Raises:
            UserError: a file is gone.
        """
        for name, corpus in self.corpora.items():
            if [_marks(one) for one in Look.at(corpus).sources] != [*map(_marks, self.looks[name].sources)]:
                self.hashes[name] = None


class Hashing:
    """Hashes files end to end in a thread, which ends with the `with` block.

    Attributes:
        n_bytes: What there is to hash.
    """

    def __init__(self, looks: Mapping[Split, Look]) -> None:
        self._looks = looks
        self.n_bytes = sum(source.n_bytes for look in looks.values() for source in look.sources)
        self._hashes: dict[Split, str | None] = {}
        self._fault: BaseException | None = None
        self._n_read = self._n_allowed = 0
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._hash_all, daemon=True)

    def __enter__(self) -> "Hashing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def allow(self, n_bytes: int) -> None:
        """Say how far somebody else has read the same bytes; it reads not much further."""
        with self._changed:
            self._n_allowed = n_bytes
            self._changed.notify()

    @property
    def n_read(self) -> int:
        """The bytes hashed so far."""
        return self._n_read

    def is_done(self, timeout_s: float) -> bool:
        """Let it read as fast as it can, and say whether it has come to the end in that time."""
        self.allow(1 << 62)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> dict[Split, str | None]:
        """Wait for the hashes, by name; None: a file has become shorter.

        Raises:
            UserError: a file cannot be read.
        """
        while not self.is_done(60):
            pass
        if self._fault is not None:
            raise self._fault
        return self._hashes

    def _hash_all(self) -> None:
        try:
            for name, look in self._looks.items():
                self._hashes[name] = self._hash(look)
        except OSError as error:
            self._fault = UserError(f"{error.filename}: cannot be read; {files.describe_error(error)}")
        except BaseException as error:  # a bug, which is for whoever asks for the result
            self._fault = error

    def _hash(self, look: Look) -> str | None:
        digest = hashlib.sha256()
        for source, path in zip(look.sources, look.paths, strict=True):
            with path.open("rb", buffering=0) as file:
                left = source.n_bytes
                while left:
                    with self._changed:
                        while self._n_read >= self._n_allowed + AHEAD_BYTES and not self._is_over:
                            self._changed.wait()
                    block = b"" if self._is_over else file.read(min(left, BLOCK_BYTES))
                    if not block:
                        return None
                    digest.update(block)
                    left -= len(block)
                    self._n_read += len(block)
        return digest.hexdigest()


def hash_rules(values: Iterable[Any]) -> str:
    """Hash settings, with the version of this program: no store outlives a change to what it holds."""
    text = json.dumps([__version__, RULES_VERSION, *values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def reading_rules(corpus: Corpus) -> dict[str, Any]:
    """Return everything but content and names that decides which text is read out of a corpus."""
    names = [one.name for one in dataclasses.fields(corpus) if one.name not in ("sources", "skipped")]
    # Where files end matters for marks at their start, for packing and for documents.
    of_source = ("n_bytes", "n_mark", "codec", "packing")
    sources = [[getattr(source, name) for name in of_source] for source in corpus.sources]
    return {name: getattr(corpus, name) for name in names} | {"sources": sources}
