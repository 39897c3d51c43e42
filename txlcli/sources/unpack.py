"""Packed files: told by their first bytes, unpacked as a stream, never to the disk."""

import bz2
import lzma
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from txlcli import UserError, files

Packing: TypeAlias = Literal["none", "gzip", "xz", "bz2", "zstd"]

# Read at once of the packed file, and taken at most from a decoder at once.
SLICE_BYTES = 1 << 15
PIECE_BYTES = 1 << 18
# zstd gives all that its input holds, at most 128 KiB for four bytes of it.
ZSTD_SLICE_BYTES = 1 << 10
# What a stream may ask for; `xz -9` needs 65 MiB, the format allows 4 GiB. zstd stops at 128 MiB by itself.
XZ_MEMORY_BYTES = 1 << 29
MAGIC_BYTES = 10
# Unpacked bytes that stay, to be read again. The text held out by default, and what of the rest is looked
# through for a place to begin it, lie in so many at the end.
KEPT_BYTES = 11 << 20
# Files, or places in one, that stay open.
MAX_OPEN = 2

_REMEDY = "give the whole file as it was packed"

_MAGIC: Mapping[Packing, re.Pattern[bytes]] = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    # A stream of zstd may begin with a frame to be skipped, as pzstd writes it.
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL),
}


class Damaged(UserError):
    """A packed file that cannot be unpacked to its end, or not here."""


class Piece(NamedTuple):
    """Some unpacked bytes, and how many bytes of the packed file were taken so far."""

    data: bytes
    place: int


def find_packing(head: bytes) -> Packing:
    """Tell by the first bytes of a file, at least `MAGIC_BYTES` where it has them, how it is packed."""
    return next((packing for packing, magic in _MAGIC.items() if magic.match(head)), "none")


def unpack(fd: int, packing: Packing, name: str) -> Iterator[Piece]:
    """Yield the bytes that an open file holds packed, in pieces of bounded size, from its start.

    Streams that follow one another are one text, and zeros after the last are padding. Checksums are
    compared as they come.

    Raises:
        UserError: the file is cut or damaged, or zstd is not installed; the message says where.
        OSError: the file cannot be read.
    """
    make = _MEMBERS[packing]
    data, member = b"", None
    place = n_unpacked = n_members = 0
    while True:
        if not data and (member is None or member.is_waiting):
            data = files.read_at(fd, SLICE_BYTES, place)
            place += len(data)
            if not data and member is None:
                return
            if not data:
                raise Damaged(
                    f"{name}: {packing} file cut short at byte {place:,}, after {n_unpacked:,} unpacked "
                    f"bytes; {_REMEDY}"
                )
        if member is None:
            if n_members:
                data = data.lstrip(b"\0")
                if not data:
                    continue
            if len(data) < MAGIC_BYTES:
                more = files.read_at(fd, max(SLICE_BYTES, MAGIC_BYTES), place)
                data, place = data + more, place + len(more)
            if find_packing(data) != packing:
                got = " ".join(f"0x{byte:02x}" for byte in data[:4])
                raise Damaged(
                    f"{name}: {packing} file damaged at byte {place - len(data):,}, where another stream "
                    f"should begin, after {n_unpacked:,} unpacked bytes; got {got}; {_REMEDY}"
                )
            member, n_members = make(name), n_members + 1
        try:
            out, rest = member.feed(data)
        except (zlib.error, lzma.LZMAError, OSError, ValueError, _zstd_error()) as error:
            why = str(error).rsplit(": ", 1)[-1]
            raise Damaged(
                f"{name}: {packing} file damaged between bytes {place - len(data):,} and {place:,}, "
                f"after {n_unpacked:,} unpacked bytes; got {why[:1].lower()}{why[1:]}; {_REMEDY}"
            ) from None
        data = rest
        if out:
            n_unpacked += len(out)
            yield Piece(out, place - len(data))
        if member.is_ended:
            member = None


class Unpacker:
    """Reads a packed file forwards, and somewhat back: its last `KEPT_BYTES` stay.

    Attributes:
        path: The file.
        place: How far it is unpacked.
    """

    def __init__(self, path: Path, packing: Packing, name: str) -> None:
        self.path, self.place = path, 0
        self._kept: deque[bytearray] = deque()
        self._n_kept = 0
        self._pieces = _unpack_file(path, packing, name)
        self._status = path.stat()

    @property
    def start(self) -> int:
        """The first byte that can still be read."""
        return self.place - self._n_kept

    def advance(self, needed: int) -> Piece | None:
        """Unpack and return one piece more, and keep what comes from byte `needed` on; None: the file ends.

        Raises:
            UserError: as `unpack`.
            OSError: the file cannot be read.
        """
        piece = next(self._pieces, None)
        if piece is not None:
            # Many small streams may follow one another.
            if not self._kept or len(self._kept[-1]) + len(piece.data) > PIECE_BYTES:
                self._kept.append(bytearray())
            self._kept[-1] += piece.data
            self._n_kept += len(piece.data)
            self.place += len(piece.data)
            while (
                self._n_kept - len(self._kept[0]) >= KEPT_BYTES and self.start + len(self._kept[0]) <= needed
            ):
                self._n_kept -= len(self._kept.popleft())
        return piece

    def read(self, lo: int, hi: int) -> bytes:
        """Return the bytes `lo`, at least `start`, to `hi`; fewer only where the file ends."""
        while self.place < hi and self.advance(lo) is not None:
            pass
        parts, end = [], self.place
        for block in reversed(self._kept):
            begin = end - len(block)
            if begin < hi:
                parts.append(memoryview(block)[max(lo - begin, 0) : hi - begin])
            if begin <= lo:
                break
            end = begin
        return b"".join(reversed(parts))

    def is_current(self) -> bool:
        """Say whether the file is still the one that was opened."""
        before, now = self._status, self.path.stat()
        marks = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        return all(getattr(before, mark) == getattr(now, mark) for mark in marks)


def _unpack_file(path: Path, packing: Packing, name: str) -> Iterator[Piece]:
    fd = files.open_regular(path)
    try:
        yield from unpack(fd, packing, name)
    finally:
        os.close(fd)


class Unpackers:
    """Keeps a few packed files open between reads, so that one goes on where another has ended."""

    def __init__(self) -> None:
        self._idle: list[Unpacker] = []

    def take(self, path: Path, packing: Packing, name: str, lo: int) -> Unpacker:
        """Return the one that comes to byte `lo` soonest, for the caller alone; a new one where none can.

        Raises:
            OSError: the file cannot be read.
        """
        able = [one for one in self._idle if one.path == path and one.start <= lo and one.is_current()]
        if not able:
            return Unpacker(path, packing, name)
        best = max(able, key=lambda one: one.place)
        self._idle.remove(best)
        return best

    def give(self, unpacker: Unpacker) -> None:
        """Keep one for later, in place of that which was not used for longest."""
        self._idle = [*self._idle, unpacker][-MAX_OPEN:]


class _Member(Protocol):
    """One stream: takes packed bytes, gives some unpacked ones and what it has not taken."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]: ...

    @property
    def is_waiting(self) -> bool:
        """Whether it can do nothing without more bytes."""

    @property
    def is_ended(self) -> bool:
        """Whether the stream is complete."""


class _Gzip:
    is_waiting = True

    def __init__(self, name: str) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        out = self._decoder.decompress(data, PIECE_BYTES)
        return out, self._decoder.unused_data or self._decoder.unconsumed_tail

    @property
    def is_ended(self) -> bool:
        return self._decoder.eof


class _Standard:
    def __init__(self, decoder: "bz2.BZ2Decompressor | lzma.LZMADecompressor") -> None:
        self._decoder = decoder

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        out = self._decoder.decompress(data, PIECE_BYTES)
        return out, self._decoder.unused_data

    @property
    def is_waiting(self) -> bool:
        return self._decoder.needs_input

    @property
    def is_ended(self) -> bool:
        return self._decoder.eof


class _Zstd:
    is_waiting = True

    def __init__(self, name: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise Damaged(
                f"{name}: is packed with zstd, which needs the package zstandard (txlcli's extra zstd); "
                "install it (pip install zstandard), or unpack the file first"
            ) from None
        self._decoder = zstandard.ZstdDecompressor().decompressobj()

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        out = self._decoder.decompress(data[:ZSTD_SLICE_BYTES])
        return out, self._decoder.unused_data + data[ZSTD_SLICE_BYTES:]

    @property
    def is_ended(self) -> bool:
        return bool(self._decoder.eof)


def _zstd_error() -> type[Exception]:
    """Name the error of damaged zstd; where the package is absent, one that is looked for anyway."""
    try:
        import zstandard
    except ImportError:
        return ValueError
    error: type[Exception] = zstandard.ZstdError
    return error


_MEMBERS: Mapping[Packing, Callable[[str], _Member]] = {
    "gzip": _Gzip,
    "xz": lambda name: _Standard(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)),
    "bz2": lambda name: _Standard(bz2.BZ2Decompressor()),
    "zstd": _Zstd,
}
