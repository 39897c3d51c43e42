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
  where the text came from. `n_characters` and `n_words` are null where they are not known.
"""

from txlcli.data.batches import (
    Batches,
    Segment,
    longest_stream,
    steps_per_epoch,
    stream_start,
)
from txlcli.data.prepare import Prepared, encode_text, prepare
from txlcli.data.store import (
    Counts,
    SourceInfo,
    Split,
    SplitInfo,
    StoreInfo,
    TokenStore,
    open_counts,
    open_split,
    read_store_info,
)
from txlcli.sources import Progress

__all__ = [
    "Batches",
    "Counts",
    "Prepared",
    "Progress",
    "Segment",
    "SourceInfo",
    "Split",
    "SplitInfo",
    "StoreInfo",
    "TokenStore",
    "encode_text",
    "longest_stream",
    "open_counts",
    "open_split",
    "prepare",
    "read_store_info",
    "steps_per_epoch",
    "stream_start",
]
