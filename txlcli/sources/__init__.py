"""Bytes and text out of files, folders and stdin.

A corpus is its files end to end; a position in it is a byte of the files as they are on disk, or of what
packed ones unpack to. Text leaves this package as UTF-8 cut at characters, whatever its encoding was, with
the bytes that each character took before; newlines may be left out of it and spaces read as underscores, as
published results have it (`convert`). Where a corpus has documents, their ends are marked.
"""

from txlcli.sources.chunk import Chunk, character_ends, code_points, convert
from txlcli.sources.corpus import (
    Corpus,
    DocumentRule,
    Newlines,
    Progress,
    Source,
    Spaces,
    check_unchanged,
    list_some,
)
from txlcli.sources.documents import NotJsonLines, Part
from txlcli.sources.encoding import find_encoding
from txlcli.sources.fault import NotText
from txlcli.sources.read import find_marks, find_place, read_chunks, read_text
from txlcli.sources.search import NothingMatches, find_corpus, search_corpus
from txlcli.sources.split import find_split
from txlcli.sources.survey import (
    VALID_BYTES_MAX,
    VALID_FRACTION,
    Survey,
    guess_script,
    held_out_start,
    survey,
    told_replaced,
    told_unseparated,
)
from txlcli.sources.unpack import Packing
from txlcli.tokenizer import complete_utf8

__all__ = [
    "VALID_BYTES_MAX",
    "VALID_FRACTION",
    "Chunk",
    "Corpus",
    "DocumentRule",
    "Newlines",
    "NotJsonLines",
    "NotText",
    "NothingMatches",
    "Packing",
    "Part",
    "Progress",
    "Source",
    "Spaces",
    "Survey",
    "character_ends",
    "check_unchanged",
    "code_points",
    "complete_utf8",
    "convert",
    "find_corpus",
    "find_encoding",
    "find_marks",
    "find_place",
    "find_split",
    "guess_script",
    "held_out_start",
    "list_some",
    "read_chunks",
    "read_text",
    "search_corpus",
    "survey",
    "told_replaced",
    "told_unseparated",
]
