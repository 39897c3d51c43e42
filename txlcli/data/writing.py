"""The files of a split, as its pieces come in."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from txlcli.data.encoding import Encoded
from txlcli.data.info import FileInfo, SplitInfo

BLOCK_ITEMS = 1 << 20


class SplitWriter:
    """Writes the ids of a split and, if it is held out, their counts.

    Where newlines are dropped, also what was left out before which token.
    """

    def __init__(self, folder: Path, split: str, *, is_counted: bool, has_gaps: bool) -> None:
        self.n_tokens = self.n_unknown = 0
        self._n_characters: int | None = 0
        self._n_words: int | None = 0 if is_counted else None
        self._counts: _CountsFile | None = None
        self._gaps: _GapsFile | None = None
        self._ids = _HashedFile((folder / f"{split}.ids").open("xb"))
        try:
            if is_counted:
                self._counts = _CountsFile(folder / f"{split}.counts")
            if is_counted and has_gaps:
                self._gaps = _GapsFile(folder / f"{split}.left_out")
        except BaseException:
            self.close()
            raise

    def add(self, encoded: Encoded) -> None:
        """Write what a piece has become."""
        self._ids.write(encoded.ids)
        if self._counts is not None and encoded.counts is not None:
            self._counts.add(encoded.counts)
        if self._gaps is not None:
            self._gaps.add(encoded)
        self.n_tokens += encoded.n_tokens
        self.n_unknown += encoded.n_unknown
        self._n_characters = _plus(self._n_characters, encoded.n_characters)
        self._n_words = _plus(self._n_words, encoded.n_words)

    def finish(self, n_bytes: int) -> SplitInfo:
        """Write the rest and say what the split holds; `n_bytes` of the source went into it."""
        if self._counts is not None and self._n_characters is None:
            # Some bytes are no text, so nothing may depend on the pieces that were.
            self._counts.keep_bytes_alone()
        self.close()
        return SplitInfo(
            n_tokens=self.n_tokens,
            n_bytes=n_bytes,
            n_characters=self._n_characters,
            n_words=self._n_words,
            n_unknown=self.n_unknown,
            counts_dtype=None if self._counts is None else self._counts.dtype.name,
            files={name: file.info() for name, file in self._files().items()},
        )

    def close(self) -> None:
        """Let the files go."""
        for file in self._files().values():
            file.close()

    def _files(self) -> "dict[str, _HashedFile | _CountsFile | _GapsFile]":
        """Return its files by the ends of their names."""
        files = {"ids": self._ids, "counts": self._counts, "left_out": self._gaps}
        return {name: file for name, file in files.items() if file is not None}


def _plus(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


class _HashedFile:
    """A file that is hashed as it is written from its start to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._digest, self._n_bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        """Write some bytes more."""
        self.file.write(data)
        self._digest.update(data)
        self._n_bytes += len(data)

    def info(self) -> FileInfo:
        """Say what it is, once it is closed."""
        return FileInfo(self._n_bytes, self._digest.hexdigest()).at(Path(self.file.name))

    def close(self) -> None:
        """Let the file go."""
        self.file.close()


class _CountsFile:
    """Counts in the smallest type that has held all so far."""

    def __init__(self, path: Path) -> None:
        self.dtype: np.dtype[Any] = np.dtype("<u1")
        self._path = path
        self._file = _HashedFile(path.open("x+b"))

    def add(self, counts: npt.NDArray[Any]) -> None:
        """Write the counts of some tokens: [n, 3]."""
        if counts.dtype.itemsize > self.dtype.itemsize:
            self._widen(counts.dtype.newbyteorder("<"))
        self._file.write(counts.astype(self.dtype).tobytes())

    def keep_bytes_alone(self) -> None:
        """Set all but the source bytes to zero."""
        file = self._file.file
        self._file = _HashedFile(file)
        file.seek(0)
        while block := file.read(3 * BLOCK_ITEMS * self.dtype.itemsize):
            counts = np.frombuffer(block, dtype=self.dtype).reshape(-1, 3).copy()
            counts[:, 1:] = 0
            file.seek(-len(block), 1)
            self._file.write(counts.tobytes())

    def info(self) -> FileInfo:
        """Say what it is, once it is closed."""
        return self._file.info()

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _widen(self, dtype: "np.dtype[Any]") -> None:
        wider = self._path.with_suffix(".wider")
        self._file.file.seek(0)
        with wider.open("xb") as file:
            hashed = _HashedFile(file)
            while block := self._file.file.read(BLOCK_ITEMS * self.dtype.itemsize):
                hashed.write(np.frombuffer(block, dtype=self.dtype).astype(dtype).tobytes())
        self._file.close()
        wider.replace(self._path)
        hashed.file = self._path.open("r+b")
        hashed.file.seek(0, 2)
        self._file = hashed
        self.dtype = dtype


class _GapsFile:
    """Before which tokens bytes were left out, each with how many since the split began."""

    def __init__(self, path: Path) -> None:
        self._file = _HashedFile(path.open("xb"))
        self._n_tokens = self._n_bytes = self._n_told = 0

    def add(self, encoded: Encoded) -> None:
        """Write the gaps of some tokens, but not the first where nothing was left out before it."""
        if encoded.gaps is not None:
            gaps = encoded.gaps + np.array([self._n_tokens, self._n_bytes])
            first = 1 if int(gaps[0, 1]) == self._n_told else 0
            self._file.write(gaps[first:].astype("<u8").tobytes())
            self._n_told = int(gaps[-1, 1])
        self._n_tokens += encoded.n_tokens
        self._n_bytes += encoded.n_left_out

    def info(self) -> FileInfo:
        """Say what it is, once it is closed."""
        return self._file.info()

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
