"""Whether a file is as it was written: its size and sha256, kept beside it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from txlcli import UserError
from txlcli.files import describe_error, open_regular

BLOCK_BYTES = 1 << 20


def checksum(data: bytes) -> str:
    """Return the sha256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def check_written(path: Path, n_bytes: object, sha256: object, remedy: str) -> Iterator[int]:
    """Hold a file against its size and sha256, which may be anything that a stranger's file said.

    Yields:
        After each block the bytes in it.

    Raises:
        UserError: the file cannot be read, or is not what was written; the latter ends with the remedy.
    """
    fd = open_regular(path)
    try:
        with open(fd, "rb", buffering=0) as file:  # noqa: PTH123
            size = os.fstat(fd).st_size
            if size != n_bytes:
                raise UserError(
                    f"{path}: damaged; got {size:,} bytes, it was written with {n_bytes!s:.20}; {remedy}"
                )
            digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
            while n_read := file.readinto(block):
                digest.update(block[:n_read])
                yield n_read
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: damaged; its bytes are not those that were written; {remedy}")
