"""Text as ids on disk: the store, how it is prepared, and the streams that training reads from it.

The folder `data/` of a run is written whole or not at all and holds, for each split (`train`, `valid`,
`test`):

* `SPLIT.ids`: the token ids in order, little-endian unsigned integers without a header, of 1, 2 or 4
  bytes: the smallest that holds `n_vocab - 1`. The file MUST be `n_tokens` of them long.
* `SPLIT.counts` (`valid` and `test` only): for each token three little-endian unsigned integers of 1, 2
  or 4 bytes: the source bytes, the characters and the words that end with it. Source bytes are those of
  the file in its own encoding; where that is not UTF-8, a character's bytes count with its last piece. A
  word is a run of characters that are not white space. The file MUST be `3 * n_tokens` integers long.
  Where newlines are dropped, their bytes are counted with no token, and still end words; where spaces are
  underscores, underscores end words.
* `SPLIT.left_out` (beside `SPLIT.counts`, only where newlines are dropped): for each token that newlines
  were left out right before, two little-endian unsigned integers of 8 bytes: the token's position, and the
  bytes of the file left out since the split began. Both ascend.
* `store.json`: one JSON object with the fields of `StoreInfo`: the sizes and types of these files and
  where the text came from. `n_characters` and `n_words` are null where they are not known. Of each split,
  `files` holds the size, sha256, inode and modification time of its files as they were written, by the ends
  of their names, and `checksum` is the sha256 of `store.json` as it would be without that key, in Python's
  ASCII JSON with sorted keys, an indent of 1 and a newline at the end,

      {"checksum": "5e8c...", "splits": {"train": {"files": {"ids": {"n_bytes": 9, "sha256": "03ab..."}}, ...

  so damage of a disk or of a copy is noticed: before a split is scored, and before a training that goes
  on, or has taken the store of another run, saves what it learns (see `damage`). A store that has neither was
  written by an older version: of its files no more is known than their sizes.

None of these files is changed once it is there (but for the time of damaged ones, so that they do not pass
for untouched), so runs of the same text may share them by hard links.

Where the text is made of documents, the tokenizer's `document_end` follows each, and what separates it from
the next one in the file is counted with it: its bytes, its characters, no word.
"""

from typing import TYPE_CHECKING, Any

from txlcli.data.damage import CHECKING, CheckBeside, check_store, is_untouched
from txlcli.data.info import DamagedStore, SourceInfo, Split, SplitInfo, StoreInfo, TextInfo, read_store_info
from txlcli.data.origin import Hashing, Look, Origin, hash_rules, reading_rules
from txlcli.data.prepare import Prepared, encode_text, prepare
from txlcli.data.reuse import (
    StoredRun,
    Taken,
    find_store,
    find_survey,
    stores_in,
    survey_record,
    take_store,
    trusted_hash,
    with_rules,
)
from txlcli.data.store import Counts, TokenStore, open_counts, open_split
from txlcli.sources import Progress

if TYPE_CHECKING:
    from txlcli.data.batches import (
        Batches,
        Segment,
        longest_stream,
        steps_per_epoch,
        stream_start,
    )

__all__ = [
    "CHECKING",
    "Batches",
    "CheckBeside",
    "Counts",
    "DamagedStore",
    "Hashing",
    "Look",
    "Origin",
    "Prepared",
    "Progress",
    "Segment",
    "SourceInfo",
    "Split",
    "SplitInfo",
    "StoreInfo",
    "StoredRun",
    "Taken",
    "TextInfo",
    "TokenStore",
    "check_store",
    "encode_text",
    "find_store",
    "find_survey",
    "hash_rules",
    "is_untouched",
    "longest_stream",
    "open_counts",
    "open_split",
    "prepare",
    "read_store_info",
    "reading_rules",
    "steps_per_epoch",
    "stores_in",
    "stream_start",
    "survey_record",
    "take_store",
    "trusted_hash",
    "with_rules",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Workers import this package, and torch takes a second.
        if name in ("Batches", "Segment", "longest_stream", "steps_per_epoch", "stream_start"):
            from txlcli.data import batches

            return getattr(batches, name)
        raise AttributeError(f"module 'txlcli.data' has no attribute {name!r}")
