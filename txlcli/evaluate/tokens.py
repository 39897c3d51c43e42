"""Scores token by token, in the text's order."""

import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, NamedTuple

import numpy as np

from txlcli.data import Counts, TokenStore
from txlcli.evaluate.running import Nats

# Tokens read at once.
COUNT_BLOCK = 1 << 20
TOKEN_BLOCK = 1 << 16


class TokenNats:
    """The nats of scored tokens by position, in a temporary file: streams end in any order, texts are long.

    with TokenNats() as nats:
        score = final_score(evaluate(model, store, counts, record=nats.record))
        for token in token_scores(store, counts, nats): ...
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self.start: int | None = None
        self.stop = 0

    def record(self, start: int, nats: Nats) -> None:
        """Keep the nats of the tokens from position `start` on."""
        self.start = start if self.start is None else min(start, self.start)
        self.stop = max(self.stop, start + len(nats))
        self._file.seek(8 * start)
        self._file.write(nats.astype("<f8").tobytes())

    def read(self, start: int, stop: int) -> Nats:
        """Return the nats of the tokens `start` to `stop`."""
        self._file.seek(8 * start)
        return np.frombuffer(self._file.read(8 * (stop - start)), dtype="<f8").astype(np.float64)

    def __enter__(self) -> "TokenNats":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class TokenScore(NamedTuple):
    """One scored token.

    Attributes:
        position: Its position in the text.
        token: Its id.
        previous: The id before it, on which its text may depend; None: it is the text's first.
        nats: Its negative log-likelihood.
        byte_offset: Where it begins in the source, in bytes of the source's own encoding; None: unknown.
    """

    position: int
    token: int
    previous: int | None
    nats: float
    byte_offset: int | None


def token_scores(
    store: TokenStore, counts: Counts | None, nats: TokenNats, document_end: int | None = None
) -> Iterator[TokenScore]:
    """Yield the scored tokens in the text's order; `document_end` is the token that ends a document."""
    if nats.start is None:
        return
    offset, _, _ = sum_counts(counts, 0, nats.start)
    previous = int(store.read(nats.start - 1, nats.start)[0]) if nats.start else None
    for start in range(nats.start, nats.stop, TOKEN_BLOCK):
        stop = min(start + TOKEN_BLOCK, nats.stop)
        ids, values = store.read(start, stop), nats.read(start, stop).tolist()
        offsets: list[int | None] = [None] * (stop - start)
        if counts is not None and offset is not None:
            ends = offset + np.cumsum(counts.read(start, stop)[:, 0])
            begins = np.append(offset, ends[:-1]) + counts.left_out_before(start, stop)
            # A document's end without bytes stands where its file ends, before the next one's mark.
            begins += counts.mark_bytes_before(begins - (ids == document_end))
            offsets, offset = begins.tolist(), int(ends[-1])
        for position, (token, value, place) in enumerate(
            zip(ids.tolist(), values, offsets, strict=True), start
        ):
            yield TokenScore(position, token, previous, value, place)
            previous = token


def sum_counts(counts: Counts | None, start: int, stop: int) -> tuple[int | None, int | None, int | None]:
    """Sum the bytes, characters and words of the tokens `start` to `stop`; None: unknown."""
    if counts is None:
        return None, None, None
    total = np.zeros(3, dtype=np.int64)
    for begin in range(start, stop, COUNT_BLOCK):
        total += counts.read(begin, min(begin + COUNT_BLOCK, stop)).sum(axis=0)
    n_bytes, n_characters, n_words = total.tolist()
    return (n_bytes, n_characters, n_words) if counts.is_text else (n_bytes, None, None)
