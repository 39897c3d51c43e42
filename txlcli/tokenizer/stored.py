"""The files of a vocabulary: written in one way only, and taken back only if they are exactly so.

`tokenizer.json` is one JSON object with sorted keys, ASCII only, a newline at its end. A reader builds the
tokenizer from it and writes it again in memory: any other bytes were not written by `save`, so they are
refused. That one comparison covers unknown and duplicate keys, wrong order and wrong types at once.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from txlcli import UserError
from txlcli.files import load_json, read_bounded, write_whole

Ids: TypeAlias = npt.NDArray[np.signedinteger[Any]]

MAX_VOCAB = 2**20
MAX_FILE_BYTES = 2**28
_OTHER_VALUES = 100


def to_json(fields: Mapping[str, Any]) -> bytes:
    """Write the one form of a vocabulary's JSON."""
    return json.dumps(fields, sort_keys=True).encode("ascii") + b"\n"


def read_fields(path: Path) -> dict[str, Any]:
    """Read the JSON object of a vocabulary.

    Raises:
        UserError: missing, too large, or not a JSON object.
    """
    data = read_bounded(path, MAX_FILE_BYTES)
    try:
        fields = load_json(data, MAX_VOCAB + _OTHER_VALUES)
    # RecursionError: brackets nested a hundred thousand deep are valid JSON.
    except (ValueError, RecursionError):
        raise damaged(path, "expected JSON") from None
    if not isinstance(fields, dict):
        raise damaged(path, "expected a JSON object")
    return fields


def read_strings(path: Path, fields: Mapping[str, Any], key: str) -> list[str]:
    """Take a list of distinct strings out of the JSON.

    Raises:
        UserError: it is something else, or longer than a vocabulary may be.
    """
    strings = fields.get(key)
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise damaged(path, f"expected `{key}` to be a list of strings")
    if len(strings) > MAX_VOCAB:
        raise damaged(path, f"got {len(strings):,} `{key}`, expected at most {MAX_VOCAB:,}")
    if len(set(strings)) < len(strings):
        raise damaged(path, f"got a repeated string in `{key}`")
    return strings


def document_field(has_documents: bool) -> dict[str, bool]:
    """Return what the JSON says of a vocabulary whose last id ends a document: nothing of any other."""
    return {"documents": True} if has_documents else {}


def has_documents(fields: Mapping[str, Any]) -> bool:
    """Say whether the JSON is that of a vocabulary whose last id ends a document."""
    return fields.get("documents") is True


def check_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Refuse files on disk that are not byte for byte what `save` would write.

    Raises:
        UserError: one differs or is missing.
    """
    for name, expected in files.items():
        if read_bounded(folder / name, MAX_FILE_BYTES) != expected:
            raise damaged(folder / name, "its bytes are not as they were written")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each file whole; the JSON last, since a folder without it holds no vocabulary."""
    for name in sorted(files, reverse=True):
        write_whole(folder / name, files[name])


def hash_files(files: Mapping[str, bytes]) -> str:
    """Hash names, sizes and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()


def damaged(path: Path, reason: str) -> UserError:
    """Make the error for a file that no `save` wrote."""
    return UserError(
        f"{path}: damaged, or not made by txl; {reason}; take the file from the run it came from"
    )
