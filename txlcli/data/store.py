"""The ids of a run on disk, read by offset."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from txlcli import UserError, files
from txlcli.data.damage import distrust
from txlcli.data.info import (
    DamagedStore,
    Split,
    SplitInfo,
    StoreInfo,
    read_store_info,
    remedy_for,
    telling_remedy,
)

Ids: TypeAlias = npt.NDArray[np.int64]


class TokenStore:
    """A file of ids, read by offset and never mapped, so that resident memory does not grow with use."""

    def __init__(self, path: Path, *, dtype: str, n_tokens: int, n_vocab: int) -> None:
        self.path = path
        self.n_tokens = n_tokens
        self.n_vocab = n_vocab
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._fd = _open_sized(path, n_tokens * self._dtype.itemsize)

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids `start` to `stop` as an array of its own.

        Raises:
            UserError: the file is damaged: cut short since it was opened, or an id beyond the vocabulary.
        """
        return self.read_stored(start, stop).astype(np.int64)

    def read_stored(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the same ids in the type that the file holds, read-only."""
        ids = _read_items(self._fd, self.path, self._dtype, start, stop, self.n_tokens)
        if ids.size and int(ids.max()) >= self.n_vocab:
            distrust(self.path)
            raise DamagedStore(
                f"{self.path}: damaged; got id {int(ids.max())} in a vocabulary of {self.n_vocab}",
                remedy_for(self.path),
            )
        return ids

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "TokenStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Counts:
    """For each token of a held-out split the source bytes, characters and words that end with it.

    `is_text` is false where the bytes are no text in their encoding: then only bytes are counted. `left_out`
    names the file of what is no part of the text; None: all of it is. `marks` as in `SplitInfo`.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        n_tokens: int,
        is_text: bool = True,
        left_out: Path | None = None,
        marks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.path = path
        self.n_tokens = n_tokens
        self.is_text = is_text
        self.left_out = left_out
        places, sizes = np.array(marks, dtype=np.int64).reshape(-1, 2).T
        self._mark_places, self._mark_bytes = places, np.append(0, np.cumsum(sizes))
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._fd = _open_sized(path, 3 * n_tokens * self._dtype.itemsize)

    def read(self, start: int, stop: int) -> Ids:
        """Return the counts of the tokens `start` to `stop`: [n, 3] source bytes, characters, words."""
        items = _read_items(self._fd, self.path, self._dtype, 3 * start, 3 * stop, 3 * self.n_tokens)
        return items.astype(np.int64).reshape(-1, 3)

    def left_out_before(self, start: int, stop: int) -> Ids:
        """Return for the tokens `start` to `stop` the bytes of the source before each that are no text: [n].

        Raises:
            UserError: their file is damaged.
        """
        positions, n_bytes = self._gaps
        return n_bytes[np.searchsorted(positions, np.arange(start, stop), side="right")]

    def mark_bytes_before(self, places: Ids) -> Ids:
        """Return the bytes of byte-order marks before bytes of the source, counted without them: [n]."""
        return self._mark_bytes[np.searchsorted(self._mark_places, places, side="right")]

    @functools.cached_property
    def _gaps(self) -> tuple[Ids, Ids]:
        """Positions after a gap, and what was left out up to each after none: [n], [n + 1]."""
        if self.left_out is None:
            return np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        size = self.left_out.stat().st_size
        if size % 16 or size > 16 * self.n_tokens:
            raise DamagedStore(
                f"{self.left_out}: damaged; got {size:,} bytes for {self.n_tokens:,} tokens",
                remedy_for(self.left_out),
            )
        data = files.read_bounded(self.left_out, size)
        positions, n_bytes = np.frombuffer(data, dtype="<u8").astype(np.int64).reshape(-1, 2).T
        return positions, np.append(0, n_bytes)

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Counts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_sized(path: Path, n_bytes: int) -> int:
    with telling_remedy(path):
        fd = files.open_regular(path)
        size = os.fstat(fd).st_size
        if size != n_bytes:
            os.close(fd)
            raise UserError(f"{path}: damaged; got {size:,} bytes, store.json says {n_bytes:,}")
    return fd


def _read_items(
    fd: int, path: Path, dtype: "np.dtype[Any]", start: int, stop: int, n_items: int
) -> npt.NDArray[Any]:
    assert 0 <= start <= stop <= n_items, (start, stop, n_items)
    n_bytes = (stop - start) * dtype.itemsize
    try:
        data = files.read_at(fd, n_bytes, start * dtype.itemsize)
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {files.describe_error(error)}") from error
    if len(data) != n_bytes:
        raise DamagedStore(
            f"{path}: damaged; it ends before token {stop:,}, it was cut since it was opened",
            remedy_for(path),
        )
    return np.frombuffer(data, dtype)


def open_split(run_dir: Path, split: Split) -> TokenStore:
    """Open the ids of one split of a run.

    Raises:
        UserError: the run holds no such split, or its store is damaged.
    """
    info = read_store_info(run_dir)
    return TokenStore(
        run_dir / "data" / f"{split}.ids",
        dtype=info.dtype,
        n_tokens=_split_info(run_dir, info, split).n_tokens,
        n_vocab=info.n_vocab,
    )


def open_counts(run_dir: Path, split: Split) -> Counts:
    """Open the bytes, characters and words per token of a held-out split.

    Raises:
        UserError: the run holds no such split, it is the training split, or its store is damaged.
    """
    part = _split_info(run_dir, read_store_info(run_dir), split)
    path = run_dir / "data" / f"{split}.counts"
    if part.counts_dtype is None:
        raise UserError(f"{path}: the {split} split is stored without counts")
    left_out = path.with_suffix(".left_out")
    return Counts(
        path,
        dtype=part.counts_dtype,
        n_tokens=part.n_tokens,
        is_text=part.n_characters is not None,
        left_out=left_out if ("left_out" in part.files if part.files else left_out.exists()) else None,
        marks=part.marks or (),
    )


def _split_info(run_dir: Path, info: StoreInfo, split: Split) -> SplitInfo:
    if split not in info.splits:
        held = ", ".join(info.splits)
        raise UserError(f"{run_dir}: holds no {split} text; it has: {held}; score a file: txl eval FILE")
    return info.splits[split]


def smallest_dtype(largest: int) -> str:
    """Name the smallest unsigned type that holds numbers up to `largest`."""
    return "uint8" if largest < 1 << 8 else "uint16" if largest < 1 << 16 else "uint32"
