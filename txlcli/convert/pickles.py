"""Other programs' pickles, read without running them.

A pickle is a program for a machine with a stack, and what makes it dangerous is that it may call any function
by its name. `read_pickled` is an interpreter for that machine that can call nothing: a name is a name, an
object is a `Foreign` record of what the file says about it, a tensor is a `StoredTensor` that knows where its
numbers lie. Which names a file may mention is written in `allowed`; with any other one it is refused.

Four kinds of files are known by what is in them, whatever they are called:

    zip archive       torch.save since 1.6; its layout is in `archive`
    torch stream      torch.save before, and with `_use_new_zipfile_serialization=False`: pickles of a magic
                      number, of 1001, of a dict about the machine, of the object, and of the list of its
                      storages' keys; then for each key the count of its numbers (int64) and the numbers,
                      little-endian
    pickle            protocols 0 to 5, also of Python 2
    tar archive       torch 0.1.10; refused by name

A hostile file meets bounds before it takes anything: on the bytes, steps, containers and remembered values of
its pickles (see `machine`), and, in what comes out, on the depth and on the size when everything shared is
counted as often as it appears.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txlcli import UserError
from txlcli.convert.archive import Storage, StoredTensor, read_archive
from txlcli.convert.machine import (
    CHARACTERS_IN_ONE,
    LIMIT_PICKLE_BYTES,
    Damaged,
    Decoder,
    Foreign,
    Slice,
    too_large,
)
from txlcli.files import describe_error, open_regular, read_at

_LIMIT_DEPTH = 200
# What comes out is measured in plain values; what costs more to walk over or to name counts as several.
_LIMIT_UNFOLDED = 1 << 24
_CONTAINER_WEIGHT, _TENSOR_WEIGHT = 16, 100
# A text is seldom taken for more instructions than these before one makes no sense.
_CHANCE_STEPS = 8

_MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_PROTOCOL = 1001


def read_pickled(path: Path, remedy: str = "name a file that torch.save or pickle wrote") -> Any:
    """Read what torch.save or pickle wrote as a tree of plain values.

    Args:
        path: The file.
        remedy: What to do where it cannot be opened or is something else.

    Returns:
        None, bool, int, float, str, bytes, list, tuple, dict, set, `Foreign` and `StoredTensor`. OrderedDict,
        Counter and defaultdict are dicts (without attributes such as a state_dict's `_metadata`), torch.Size
        is a tuple, a Parameter is its tensor, bytearray is bytes, frozenset is a set. Strings of Python 2 are
        latin-1. Keys and members of sets are plain values or short flat tuples of them. What was one object
        in the file is one object here. The tree has no cycles, is at most 200 deep, and is of bounded size
        even where it is walked without regard for what is shared, so plain recursion is safe.

    Raises:
        UserError: the file is missing, damaged, too large, or mentions a name that is not in `allowed`.
    """
    fd = open_or_advise(path, remedy)
    try:
        size = os.fstat(fd).st_size
        start = read_at(fd, 512, 0)
        _refuse_other_formats(path, start)
        if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            value = _read_zip(path, fd, size)
        else:
            value = _read_stream(path, fd, size, remedy)
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}; {remedy}") from error
    finally:
        os.close(fd)
    _check_tree(path, value)
    return value


def open_or_advise(path: Path, remedy: str) -> int:
    """Open a file as `open_regular` does, and say where that fails what to do.

    Raises:
        UserError: as `open_regular`.
    """
    try:
        return open_regular(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error


def _refuse_other_formats(path: Path, start: bytes) -> None:
    if start[257:262] == b"ustar":
        raise UserError(
            f"{path}: a tar archive, as torch 0.1.10 and older saved; got a format that is not read; "
            "load it with an old torch and save it again"
        )
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: only a pointer of Git LFS; got no weights; fetch the file itself")


# What files are that are taken for checkpoints, by their first bytes.
_FORMATS = (
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\xff\xfe", "a text file"),
    (b"\xfe\xff", "a text file"),
)


def _name_format(start: bytes, size: int) -> str | None:
    """Say what a file that is no pickle is, by its first bytes; None: that is not known.

    The oldest pickles are text too, so this tells something only of a file that is none.
    """
    if size == 0:
        return "an empty file"
    for sign, name in _FORMATS:
        if start.startswith(sign):
            return name
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8:
        return "a safetensors file without .safetensors at the end of its name"
    # A character may be cut at the end of what was read.
    text = start.decode("utf-8", "ignore").lstrip("\ufeff")
    n_lost = len(start.removeprefix(b"\xef\xbb\xbf")) - len(text.encode())
    if n_lost > 3 or not all(c.isprintable() or c in "\t\n\r\f" for c in text):
        return None
    head = text.lstrip()[:15].lower()
    if head.startswith(("<!doctype html", "<html")):
        return "a web page"
    return "a JSON file" if head.startswith(("{", "[")) else "a text file"


def _read_zip(path: Path, fd: int, size: int) -> Any:
    archive = read_archive(path, fd)
    if archive.pickle.n_bytes > LIMIT_PICKLE_BYTES:
        raise too_large(path, LIMIT_PICKLE_BYTES, "bytes of pickle")
    data = read_at(fd, archive.pickle.n_bytes, archive.pickle.position)
    decoder = Decoder(path, data, size)
    value = decoder.decode()
    if decoder.position < len(data):
        raise decoder.damaged("more after its end")
    for storage in decoder.storages.values():
        entry = archive.storages.get(storage.key)
        if entry is None:
            raise decoder.damaged(f"no entry for storage {storage.key[:100]!a}")
        if entry.n_bytes != storage.n_bytes:
            raise decoder.damaged(
                f"{entry.n_bytes:,} bytes for storage {storage.key[:100]!a} of {storage.n_bytes:,}"
            )
        storage.position, storage.big_endian = entry.position, archive.big_endian
    return value


def _read_stream(path: Path, fd: int, size: int, remedy: str) -> Any:
    """Read a plain pickle or, if the first value is its magic number, a stream of torch."""
    data = read_at(fd, min(size, LIMIT_PICKLE_BYTES), 0)
    decoder = Decoder(path, data, size)
    try:
        value = decoder.decode()
    except Damaged as error:
        # Whatever else it is, a few of its bytes may look like instructions.
        name = _name_format(data[:512], size) if decoder.n_steps <= _CHANCE_STEPS else None
        if name is None:
            raise UserError(str(error)) from error
        raise UserError(f"{path}: {name}, not a checkpoint; got {_show_start(data)}; {remedy}") from error
    if value != _MAGIC:
        if decoder.storages:
            raise decoder.damaged("tensors whose numbers are in no file")
        if decoder.position < size:
            raise decoder.damaged("more after its end")
        return value
    if decoder.decode() != _STREAM_PROTOCOL:
        raise decoder.damaged("another version of torch's format than 1001")
    # What it says about the machine does not matter: the numbers are little-endian on any.
    decoder.decode()
    value, keys = decoder.decode(), decoder.decode()
    names = [key for key in keys if type(key) is str] if type(keys) is list else []
    if type(keys) is not list or not _are_each_once(decoder.storages, keys, names):
        raise decoder.damaged("a list of other storages than its tensors have")
    position = decoder.position
    n_needed = position + sum(8 + storage.n_bytes for storage in decoder.storages.values())
    if size < n_needed:
        raise UserError(
            f"{path}: ends too early; got {size:,} bytes, its tensors need {n_needed:,}; fetch the file again"
        )
    for storage in map(decoder.storages.__getitem__, names):
        n_elements = int.from_bytes(read_at(fd, 8, position), "little", signed=True)
        storage.position = position + 8
        position += 8 + storage.n_bytes
        if n_elements != storage.n_elements:
            raise decoder.damaged(f"{n_elements:,} numbers for a storage of {storage.n_elements:,}")
    if position < size:
        raise decoder.damaged("more after its end")
    return value


def _are_each_once(storages: Mapping[str, Storage], keys: list[Any], names: list[str]) -> bool:
    """Whether a list has the key of each storage once and nothing else; not sorted: texts may be long."""
    found = {name for name in names if name in storages}
    return len(keys) == len(names) == len(found) == len(storages)


def _show_start(data: bytes) -> str:
    """Show how a file begins, on one short line."""
    if not data:
        return "0 bytes"
    return ascii(data[:80].decode("utf-8", "replace").split("\n")[0][:30])


def _check_tree(path: Path, root: Any) -> None:
    """Refuse what cannot be walked plainly: cycles, great depth, too much of what is shared and shares."""
    # Of each container that was left: its depth, and its size with all that is in it, each time that it is.
    measures: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()
    pending = [[root]]
    while pending:
        container = pending[-1]
        if id(container) in measures:
            pending.pop()
            continue
        parts = _parts(container)
        if id(container) not in entered:
            entered.add(id(container))
            inner = [part for part in parts if type(part) in _CONTAINERS and id(part) not in measures]
            if any(id(part) in entered for part in inner):
                raise UserError(
                    f"{path}: no checkpoint; got a value that contains itself; fetch the file again"
                )
            pending.extend(inner)
            continue
        depth, size = 0, _CONTAINER_WEIGHT
        for part in parts:
            if type(part) in _CONTAINERS:
                part_depth, part_size = measures[id(part)]
                depth, size = max(depth, part_depth), size + part_size
            elif type(part) is Slice:
                raise UserError(f"{path}: no checkpoint; got a storage that is no tensor's; save tensors")
            elif type(part) in (str, bytes):
                size += 1 + len(part) // CHARACTERS_IN_ONE
            else:
                size += _TENSOR_WEIGHT if type(part) is StoredTensor else 1
        measures[id(container)] = depth + 1, size
        if depth > _LIMIT_DEPTH:
            raise too_large(path, _LIMIT_DEPTH, "values within one another")
        if size > _LIMIT_UNFOLDED:
            raise too_large(path, _LIMIT_UNFOLDED, "values where what is shared counts each time")


_CONTAINERS = (list, tuple, dict, set, Foreign)


def _parts(container: Any) -> Any:
    if type(container) is dict:
        return [*container, *container.values()]
    if type(container) is Foreign:
        return container.args, container.state
    return container
