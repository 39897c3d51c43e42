"""Bytes and text out of files, folders and stdin.

A corpus is its files end to end; a position in it is a byte of the files as they are on disk. Text
leaves this package as UTF-8 cut at characters, whatever its encoding was, with the bytes that each
character took before; newlines may be left out of it and spaces read as underscores, as published results
have it (`convert`).
"""

from txlcli.sources.corpus import (
    Corpus,
    Newlines,
    Source,
    Spaces,
    check_unchanged,
    find_byte,
    find_corpus,
    find_encoding,
)
from txlcli.sources.read import (
    Chunk,
    character_ends,
    code_points,
    complete_utf8,
    convert,
    find_split,
    read_chunks,
    read_text,
)
from txlcli.sources.survey import (
    VALID_BYTES_MAX,
    VALID_FRACTION,
    Progress,
    Survey,
    guess_script,
    held_out_start,
    survey,
    told_replaced,
)

__all__ = [
    "VALID_BYTES_MAX",
    "VALID_FRACTION",
    "Chunk",
    "Corpus",
    "Newlines",
    "Progress",
    "Source",
    "Spaces",
    "Survey",
    "character_ends",
    "check_unchanged",
    "code_points",
    "complete_utf8",
    "convert",
    "find_byte",
    "find_corpus",
    "find_encoding",
    "find_split",
    "guess_script",
    "held_out_start",
    "read_chunks",
    "read_text",
    "survey",
    "told_replaced",
]
