"""Bytes of one file, packed or not, in blocks."""

import os
from collections.abc import Callable, Iterator

from txlcli import UserError, files
from txlcli.sources.corpus import CHUNK_BYTES, Source, became_shorter

BLOCK_BYTES = CHUNK_BYTES
"""What is read of a file at once."""


def read_blocks(
    source: Source, lo: int, hi: int, watch: Callable[[bytes], object] | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a file from `lo` to `hi`, each block shown to `watch`.

    Raises:
        UserError: it cannot be read, or has become shorter.
    """
    read = _stored_blocks if source.packing == "none" else _unpacked_blocks
    try:
        for block in read(source, lo, hi):
            if watch is not None:
                watch(block)
            yield block
    except OSError as error:
        raise UserError(f"{source.name}: cannot be read; {files.describe_error(error)}") from error


def _stored_blocks(source: Source, lo: int, hi: int) -> Iterator[bytes]:
    try:
        fd = files.open_regular(source.path)
    except UserError as error:
        raise UserError(str(error).replace(str(source.path), source.name, 1)) from error
    try:
        while lo < hi:
            block = files.read_at(fd, min(BLOCK_BYTES, hi - lo), lo)
            if not block:
                raise became_shorter(source, os.fstat(fd).st_size)
            lo += len(block)
            yield block
    finally:
        os.close(fd)


def _unpacked_blocks(source: Source, lo: int, hi: int) -> Iterator[bytes]:
    unpacker = source.unpackers.take(source.path, source.packing, source.name, lo)
    try:
        while lo < hi:
            block = unpacker.read(lo, min(lo + BLOCK_BYTES, hi))
            if not block:
                raise became_shorter(source, source.path.stat().st_size)
            lo += len(block)
            yield block
    except GeneratorExit:
        source.unpackers.give(unpacker)
        raise
    source.unpackers.give(unpacker)
