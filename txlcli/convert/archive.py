"""Tensors in their files: where the numbers lie, checked before one is read; the zip format of torch.save.

A file of torch.save (since 1.6) is a zip archive whose entries are all in one folder and stored as they are:

    NAME/data.pkl      the object, pickled; a tensor names its storage by a key
    NAME/data/KEY      the bytes of a storage
    NAME/byteorder     `little` or `big`; little if there is none
    NAME/version       of the format, a number as text

The list of entries is read here rather than by Python's zipfile, which takes it into memory whatever its size
and believes what it says. Here every size and place is held against the file first. What an archive may do
and torch does not is refused: compressed or encrypted entries, two with one name, entries within one another,
names outside the folder. The checksums are not compared, since torch can be told to write none.
"""

import os
import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from txlcli import UserError
from txlcli.files import describe_error, open_regular, read_at

# The largest published models have some hundred tensors; each takes about a hundred bytes of the list.
_LIMIT_ENTRIES = 100_000
_LIMIT_DIRECTORY_BYTES = 16 << 20
_LIMIT_DIMENSIONS = 16

_ZIP64 = 0xFFFFFFFF
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13


@dataclass(eq=False)
class Storage:
    """A run of numbers of one type in a file.

    Attributes:
        key: Its name in the file.
        dtype: The type of its numbers; uint8 where the file says none.
        n_elements: How many there are.
        position: The byte of the file where they begin; None until that is known.
        big_endian: Whether the first byte of a number is the most significant.
    """

    key: str
    dtype: torch.dtype
    n_elements: int
    position: int | None = None
    big_endian: bool = False

    @property
    def n_bytes(self) -> int:
        """Its size in the file."""
        return self.n_elements * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is still in its file; its size and place are checked, none of its numbers is read.

    Attributes:
        path: The file.
        dtype: Its type.
        shape: Its shape. It never holds more numbers than its storage.
        strides: Steps between neighbors in numbers, one for each dimension.
        offset: Its first number within its storage.
        storage: Where its numbers are.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage

    @property
    def identity(self) -> tuple[object, ...]:
        """What is equal for two tensors exactly if they are the same numbers of the file, that is, tied."""
        return self.path, self.storage.key, self.dtype, self.offset, self.shape, self.strides

    def read(self) -> Tensor:
        """Read its numbers.

        Returns:
            A contiguous tensor on the CPU, the caller's own.

        Raises:
            UserError: the file is gone, unreadable, or was cut since it was opened.
        """
        n_elements = _span(self.shape, self.strides)
        assert self.storage.position is not None, "known once the whole file is read"
        data = torch.empty(n_elements * self.dtype.itemsize, dtype=torch.uint8)
        position = self.storage.position + self.offset * self.dtype.itemsize
        _read_into(self.path, position, memoryview(data.numpy()))  # type: ignore[arg-type]
        if self.storage.big_endian != (sys.byteorder == "big") and self.dtype.itemsize > 1:
            data.numpy().view(f"u{self.dtype.itemsize}").byteswap(inplace=True)
        if self.dtype is torch.bool:
            data.clamp_(max=1)  # a byte of another value would be a bool that is neither
        return data.view(self.dtype).as_strided(self.shape, self.strides).contiguous()


def describe_misfit(
    shape: tuple[object, ...], strides: tuple[object, ...], offset: object, n: int
) -> str | None:
    """Say why there is no such tensor in a storage of `n` numbers; None if there is."""
    if len(shape) != len(strides) or len(shape) > _LIMIT_DIMENSIONS:
        return "a shape that does not go with its strides"
    sizes = (*shape, *strides, offset)
    whole = [size for size in sizes if type(size) is int and 0 <= size < 1 << 63]
    if len(whole) < len(sizes):
        return "a shape, stride or offset that is no size"
    dimensions, steps, first = whole[: len(shape)], whole[len(shape) : -1], whole[-1]
    # Strides of zero would make a few numbers as many as one likes.
    n_claimed = 1
    for size in dimensions:
        n_claimed *= size
    if n_claimed > n or first + _span(dimensions, steps) > n:
        return f"a tensor of {n_claimed:,} numbers at {first:,} in a storage of {n:,}"
    return None


def _span(shape: "tuple[int, ...] | list[int]", strides: "tuple[int, ...] | list[int]") -> int:
    """Count the numbers from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _read_into(path: Path, position: int, data: memoryview) -> None:
    n_bytes = len(data)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            file.seek(position)
            while len(data) > 0:
                n_read = file.readinto(data)
                if not n_read:
                    raise UserError(
                        f"{path}: was cut while it was read; got {n_bytes - len(data):,} bytes "
                        f"at {position:,}, expected {n_bytes:,}; start again with the whole file"
                    )
                data = data[n_read:]
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error


# The zip format


class Entry(NamedTuple):
    """An entry of an archive: where its bytes begin in the file, and how many there are."""

    position: int
    n_bytes: int


class Archive(NamedTuple):
    """A checked archive of torch.save."""

    pickle: Entry
    storages: dict[str, Entry]
    big_endian: bool


def read_archive(path: Path, fd: int) -> Archive:
    """Read the list of an archive's entries, and check it.

    Args:
        path: The file, for messages.
        fd: Its descriptor.

    Raises:
        UserError: it is damaged, no archive of torch.save, or does what torch never does.
    """
    entries = _read_directory(path, fd)
    root = next(iter(entries), "").split("/")[0]
    for name in entries:
        parts = name.split("/")
        if parts[0] != root or len(parts) < 2 or not _is_plain(name, parts):
            raise _other(path, f"an entry {name[:100]!a}")
    if f"{root}/constants.pkl" in entries:
        raise UserError(
            f"{path}: a TorchScript program; got `{root}/constants.pkl`; save the model's state_dict"
        )
    pickle = entries.get(f"{root}/data.pkl")
    if pickle is None:
        raise _other(path, "no entry data.pkl")
    version = _read_note(fd, entries.get(f"{root}/version"))
    if not version.isdecimal() or not 1 <= int(version) <= 10:
        raise UserError(
            f"{path}: another version of torch's archives; got {version!r}, expected 1 to 10; "
            "save it again with another torch"
        )
    order = _read_note(fd, entries.get(f"{root}/byteorder")) or "little"
    if order not in ("little", "big"):
        raise UserError(
            f"{path}: another byteorder than there is; got {order!r}, expected little or big; "
            "fetch the file again"
        )
    folder = f"{root}/data/"
    storages = {name.removeprefix(folder): at for name, at in entries.items() if name.startswith(folder)}
    return Archive(pickle, storages, order == "big")


def _is_plain(name: str, parts: list[str]) -> bool:
    return not {"", ".", ".."} & set(parts) and "\\" not in name and name.isprintable()


def _read_note(fd: int, entry: Entry | None) -> str:
    if entry is None:
        return ""
    return read_at(fd, min(entry.n_bytes, 20), entry.position).decode("latin-1").strip()


def _read_directory(path: Path, fd: int) -> dict[str, Entry]:
    """Read the central directory (APPNOTE 4.3.12) and hold each entry against its local header (4.3.7)."""
    position, n_bytes, n_entries = _find_directory(path, fd)
    if n_entries > _LIMIT_ENTRIES or n_bytes > _LIMIT_DIRECTORY_BYTES:
        raise UserError(
            f"{path}: too many entries for a checkpoint; got {n_entries:,} in {n_bytes:,} bytes; "
            f"expected at most {_LIMIT_ENTRIES:,}; name a file that torch.save wrote"
        )
    directory = read_at(fd, n_bytes, position)
    entries: dict[str, Entry] = {}
    extents: list[tuple[int, int]] = []
    at = 0
    for _ in range(n_entries):
        header = directory[at : at + 46]
        if len(header) < 46 or header[:4] != b"PK\x01\x02":
            raise _damaged(path, "a list of entries that ends early")
        flags, method = struct.unpack_from("<HH", header, 8)
        packed, plain, n_name, n_extra, n_comment = struct.unpack_from("<IIHHH", header, 20)
        (start,) = struct.unpack_from("<I", header, 42)
        raw_name = directory[at + 46 : at + 46 + n_name]
        extra = directory[at + 46 + n_name : at + 46 + n_name + n_extra]
        at += 46 + n_name + n_extra + n_comment
        name = raw_name.decode("utf-8", errors="replace")
        shown = ascii(name[:100])
        plain, packed, start = _read_zip64(path, extra, [plain, packed, start])
        if flags & _ENCRYPTED:
            raise _other(path, f"an encrypted entry {shown}")
        if method != 0 or packed != plain:
            raise _other(path, f"a compressed entry {shown}")
        if name in entries:
            raise _other(path, f"two entries {shown}")
        local = read_at(fd, 30 + n_name, start) if start < position else b""
        if len(local) < 30 + n_name or local[:4] != b"PK\x03\x04" or local[30:] != raw_name:
            raise _damaged(path, f"no entry {shown} where the list has it")
        if struct.unpack_from("<H", local, 8) != (0,):
            raise _other(path, f"a compressed entry {shown}")
        first = start + 30 + n_name + int(struct.unpack_from("<H", local, 28)[0])
        if first + plain > position:
            raise _damaged(path, f"an entry {shown} that is larger than the file")
        entries[name] = Entry(first, plain)
        extents.append((start, first + plain))
    extents.sort()
    if any(end > start for (_, end), (start, _) in pairwise(extents)):
        raise _other(path, "entries within one another")
    return entries


def _find_directory(path: Path, fd: int) -> tuple[int, int, int]:
    """Find position, bytes and number of entries of the central directory (4.3.14 to 4.3.16)."""
    size = os.fstat(fd).st_size
    tail_at = max(0, size - 22 - 0xFFFF)
    tail = read_at(fd, size - tail_at, tail_at)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) - end < 22:
        raise _damaged(path, "no list of its entries at the end")
    n_entries, n_bytes, position, n_comment = struct.unpack_from("<HIIH", tail, end + 10)
    if len(tail) - end != 22 + n_comment:
        raise _damaged(path, "bytes behind the end")
    limit = tail_at + end
    locator = read_at(fd, 20, limit - 20) if limit >= 20 else b""
    if locator[:4] == b"PK\x06\x07":
        at = int.from_bytes(locator[8:16], "little")
        record = read_at(fd, 56, at) if at < size else b""
        if len(record) < 56 or record[:4] != b"PK\x06\x06":
            raise _damaged(path, "no list of its entries where it should be")
        n_entries, n_bytes, position = struct.unpack_from("<QQQ", record, 32)
        limit = at
    if position + n_bytes > limit:
        raise _damaged(path, "a list of entries that is larger than the file")
    return position, n_bytes, n_entries


def _read_zip64(path: Path, extra: bytes, sizes: list[int]) -> list[int]:
    """Put the 64-bit values of an entry's extra field in place of those that do not fit in 32 (4.5.3)."""
    if _ZIP64 not in sizes:
        return sizes
    at = 0
    while at + 4 <= len(extra):
        kind, n_bytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = [int.from_bytes(extra[i : i + 8], "little") for i in range(at + 4, at + 4 + n_bytes, 8)]
            if len(values) < sizes.count(_ZIP64):
                break
            following = iter(values)
            return [next(following) if size == _ZIP64 else size for size in sizes]
        at += 4 + n_bytes
    raise _damaged(path, "an entry without its size")


def _other(path: Path, found: str) -> UserError:
    return UserError(
        f"{path}: a zip archive, but no archive of torch.save; got {found}; name a file that torch.save wrote"
    )


def _damaged(path: Path, found: str) -> UserError:
    return UserError(f"{path}: damaged or cut short; got {found}; fetch the file again")
