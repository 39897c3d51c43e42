"""Encoding on all processors: processes that do with pieces of text what `encode` does, in order.

A worker loads the tokenizer from its files and does not import torch. Pieces come through its standard input
and what they have become leaves through its standard output. A message is a JSON text, which says what
follows, and then the bytes of each array, each with its length before it. A worker hears no signals, since
Ctrl-C goes to all processes of a terminal and the one that reads the text decides; it ends when its input
does, which is also when that one is killed.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from txlcli import UserError
from txlcli.data.encoding import SYMBOLS, Encoded, Piece, Rules, encode
from txlcli.tokenizer import OutsideVocabulary, Tokenizer, load_tokenizer, pieces

# Below this the start of a worker costs more than it saves; symbols are looked up as fast as they are sent.
LEAST_BYTES = 1 << 24
# Pieces that a worker holds: the one that it encodes, and the next.
N_AHEAD = 2

# How long a worker that says nothing any more may take to be gone.
DEATH_S = 5.0

_LENGTH_BYTES = 8
_ARRAYS = {"sizes": "<u4", "left_out": "<i8", "document_ends": "<i8", "end_sizes": "<i8"}
_NUMBERS = ("n_tokens", "n_unknown", "n_characters", "n_words", "n_left_out")
# With the paths of modules of the process that starts it.
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from txlcli.data.workers import work; work(*sys.argv[1:3])"


def worker_count(tokenizer: Tokenizer, n_bytes: int, n_processors: int | None = None) -> int:
    """Return how many workers a text of `n_bytes` is worth; 0: it is encoded in this process.

    Args:
        tokenizer: What encodes it.
        n_bytes: The size of the text.
        n_processors: How many processors may be used; None: all that this process may run on.
    """
    if n_processors is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        n_processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    has_python = bool(sys.executable) and not getattr(sys, "frozen", False)
    if n_processors < 2 or n_bytes < LEAST_BYTES or tokenizer.kind in SYMBOLS or not has_python:
        return 0
    return n_processors


class Workers:
    """Processes that encode pieces; in a `with` block, at whose end they are gone.

    Args:
        n_workers: How many.
        folder: Where `tokenizer.json` lies.
        rules: How pieces are encoded.
    """

    def __init__(self, n_workers: int, folder: Path, rules: Rules) -> None:
        self._n_workers = n_workers
        self._processes: list[subprocess.Popen[bytes]] = []
        paths = [path or str(Path.cwd()) for path in sys.path]
        self._command = [sys.executable, "-c", _CODE, str(folder), json.dumps(rules._asdict()), *paths]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        # A thread waits for each, so that none of them waits for another, nor for who reads the text.
        self._threads = ThreadPoolExecutor(n_workers)

    def __enter__(self) -> "Workers":
        try:
            with _signals_held():
                for _ in range(self._n_workers):
                    self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Those of the workers."""
        return [process.pid for process in self._processes]

    def encode(self, text: Iterator[Piece], *, is_counted: bool) -> Iterator[tuple[Piece, Encoded]]:
        """Yield each piece, without its text, and what it has become, in order.

        At most two pieces a worker are on their way.

        Raises:
            OutsideVocabulary: without a place, which is found by reading again.
            UserError: a worker was killed.
        """
        waiting: deque[tuple[Piece, Future[Encoded]]] = deque()
        for piece in text:
            if len(waiting) == N_AHEAD * self._n_workers:
                yield _first(waiting)
            told = piece._replace(text=b"", sizes=None, left_out=None)
            waiting.append((told, self._threads.submit(self._encode, piece, is_counted)))
        while waiting:
            yield _first(waiting)

    def close(self) -> None:
        """End the processes at once: they hold nothing that is not made again."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        self._processes = []

    def _start(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Windows: no Ctrl-C reaches another group.
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._processes.append(process)
        self._idle.put(process)

    def _encode(self, piece: Piece, is_counted: bool) -> Encoded:
        """Have a worker encode a piece; runs in as many threads as there are workers."""
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, piece, is_counted)
            return _receive(process.stdout)
        except (EOFError, OSError, ValueError):  # the last of a message that was cut off
            raise self._death(process) from None
        finally:
            self._idle.put(process)

    def _death(self, process: "subprocess.Popen[bytes]") -> UserError:
        with suppress(subprocess.TimeoutExpired):
            process.wait(DEATH_S)
        code = process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else "ended by itself"
        return UserError(
            f"encoding: one of {self._n_workers} processes {how}; too little memory may be the cause; "
            "start again, with --threads 1 in one process"
        )


def _first(waiting: "deque[tuple[Piece, Future[Encoded]]]") -> tuple[Piece, Encoded]:
    piece, future = waiting.popleft()
    return piece, future.result()


def _send(pipe: IO[bytes], piece: Piece, is_counted: bool) -> None:
    arrays = {name: getattr(piece, name) for name in _ARRAYS}
    if arrays["sizes"] is not None and bool((arrays["sizes"] == 1).all()):
        arrays["sizes"] = None  # what it is where nothing is said, and four times the text
    there = {name: array.astype(_ARRAYS[name]) for name, array in arrays.items() if array is not None}
    head = {"is_counted": is_counted, "arrays": list(there)}
    _write(pipe, head, [piece.text, piece.following, *(array.tobytes() for array in there.values())])


def _receive(pipe: IO[bytes]) -> Encoded:
    head = json.loads(_read(pipe))
    if "outside" in head:
        raise OutsideVocabulary(*head["outside"])
    if "fault" in head:
        raise RuntimeError(f"a process that encodes text failed:\n{head['fault']}")
    ids = _read(pipe)
    counts = np.frombuffer(_read(pipe), head["counts"]) if head["counts"] else None
    gaps = np.frombuffer(_read(pipe), "<i8") if head["has_gaps"] else None
    return Encoded(
        ids=ids,
        counts=None if counts is None else counts.reshape(-1, 3),
        gaps=None if gaps is None else gaps.reshape(-1, 2),
        **head["numbers"],
    )


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep signals from processes that are started in the block; those for us come after it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(folder: str, rules_json: str) -> None:
    """Encode the pieces that come in until there are no more: what a worker does."""
    pieces.N_THREADS = 1  # there are as many workers as processors
    with (
        suppress(EOFError, OSError),
        open(0, "rb", closefd=False) as incoming,
        open(1, "wb", closefd=False) as outgoing,
    ):
        try:
            tokenizer, rules = load_tokenizer(Path(folder)), Rules(**json.loads(rules_json))
            while True:
                head = json.loads(_read(incoming))
                text, following = _read(incoming), _read(incoming)
                arrays: dict[str, Any] = {
                    name: np.frombuffer(_read(incoming), _ARRAYS[name]) for name in head["arrays"]
                }
                piece = Piece(text=text, following=following, **arrays)
                _answer(outgoing, encode(tokenizer, piece, rules, is_counted=head["is_counted"]))
        except (EOFError, OSError):
            raise
        except OutsideVocabulary as error:
            _write(outgoing, {"outside": [error.symbol, error.offset, error.remedy]}, [])
        except Exception:
            _write(outgoing, {"fault": traceback.format_exc()}, [])
        _read_all(incoming)  # so that nobody finds it closed


def _answer(pipe: IO[bytes], encoded: Encoded) -> None:
    counts, gaps = encoded.counts, encoded.gaps
    head = {
        "numbers": {name: getattr(encoded, name) for name in _NUMBERS},
        "counts": None if counts is None else counts.dtype.str,
        "has_gaps": gaps is not None,
    }
    _write(pipe, head, [encoded.ids, *(array.tobytes() for array in (counts, gaps) if array is not None)])


def _write(pipe: IO[bytes], head: dict[str, Any], parts: Sequence[bytes]) -> None:
    for part in (json.dumps(head).encode(), *parts):
        pipe.write(len(part).to_bytes(_LENGTH_BYTES, "little"))
        pipe.write(part)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Read one part of a message.

    Raises:
        EOFError: there is none, or not all of it.
    """
    head = pipe.read(_LENGTH_BYTES)
    n_bytes = int.from_bytes(head, "little")
    data = pipe.read(n_bytes)
    if len(head) < _LENGTH_BYTES or len(data) < n_bytes:
        raise EOFError
    return data


def _read_all(pipe: IO[bytes]) -> None:
    while pipe.read(1 << 16):
        pass
