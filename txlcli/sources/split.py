"""Where a corpus may be split."""

from collections.abc import Iterator

import numpy as np

from txlcli.sources.blocks import read_blocks
from txlcli.sources.chunk import Sizes
from txlcli.sources.corpus import Corpus, Source
from txlcli.sources.decoding import align_encoded, align_utf8, read_encoded


def find_split(corpus: Corpus, wanted: int) -> int:
    """Move a byte of the corpus to where it may be split; it does not depend on the tokenizer.

    With documents that is the start of one nearest to it, if between half and twice as much comes after as
    wanted; in JSON lines the nearest in any case. Else it is the next start of a character; where the bytes
    around it are no UTF-8 the byte itself is returned, and `n_bytes` where less than two bytes would remain.

    Raises:
        UserError: a file cannot be read.
    """
    n_bytes = corpus.n_bytes
    if not 0 < wanted < n_bytes:
        return wanted
    if corpus.has_documents:
        n_after = n_bytes - wanted
        bounds = [(max(n_bytes - 2 * n_after, 1), n_bytes - max(n_after // 2, 2) + 1)]
        if corpus.text_field is not None:
            bounds = [(bounds[0][0], n_bytes - 1), (1, n_bytes - 1)]
        for lo, hi in bounds:
            split = _nearest_start(corpus, wanted, lo, hi)
            if split is not None:
                return split
        if corpus.text_field is not None:
            return n_bytes
    base = 0
    for source in corpus.sources:
        if base < wanted < base + source.n_bytes:
            align = align_utf8 if source.codec == "utf-8" else align_encoded
            split = base + align(source, wanted - base)
            return split if n_bytes - split >= 2 else n_bytes
        base += source.n_bytes
    return wanted


def _nearest_start(corpus: Corpus, wanted: int, lo: int, hi: int) -> int | None:
    """Return the document's start nearest to a byte of the corpus, from `lo` on, before `hi`; None: none."""
    before, base = None, 0
    for source in corpus.sources:
        if base < hi and base + source.n_bytes > lo:
            for start in _starts(corpus, source, max(lo - base, 0)):
                place = base + start
                if place >= hi:
                    break
                if place >= wanted:
                    return before if before is not None and wanted - before < place - wanted else place
                if place >= lo:
                    before = place
        base += source.n_bytes
    return before


def _starts(corpus: Corpus, source: Source, lo: int) -> Iterator[int]:
    """Yield the bytes of a file, from `lo` on, at which documents certainly start."""
    if lo == 0:
        yield 0
    if corpus.document_per_file:
        return
    # In raw bytes too the text is asked, so that both are split at the same place.
    mark = "\n" if corpus.text_field is not None else corpus.document_separator
    assert mark is not None
    separator = mark.encode()
    # Two separators may overlap, as in "\n\n\n". One that none overlaps from before ends a document also
    # for who reads from the file's start, so the search begins early enough to see such.
    begin = max(lo - 10 * len(separator), source.n_mark)
    texts: Iterator[tuple[bytes, Sizes | None]]
    if source.codec == "utf-8":
        texts = ((block, None) for block in read_blocks(source, begin, source.n_bytes))
    else:
        begin = max(begin if begin == source.n_mark else align_encoded(source, begin), source.n_mark)
        chunks = read_encoded(source, begin, source.n_bytes, "replace", True, None)
        texts = ((chunk.text, chunk.sizes) for chunk in chunks)
    place, last = begin, -len(separator)  # of the text that follows `held`; of the last separator in `data`
    held, held_sizes = b"", np.zeros(0, dtype=np.uint32)
    for text, sizes in texts:
        data = held + text
        if sizes is None:
            ends = None
        else:
            data_sizes = np.concatenate([held_sizes, sizes])
            ends = np.cumsum(data_sizes)
        begin_place = place - (len(held) if ends is None else int(held_sizes.sum()))
        found = data.find(separator)
        while found >= 0:
            if found - last >= len(separator):
                stop = found + len(separator)
                start = begin_place + (stop if ends is None else int(ends[stop - 1]))
                if lo <= start < source.n_bytes:
                    yield start
            last = found
            found = data.find(separator, found + 1)
        n_held = min(len(separator) - 1, len(data))
        held = data[len(data) - n_held :]
        last -= len(data) - n_held
        if sizes is None:
            place += len(text)
        else:
            held_sizes = data_sizes[len(data) - n_held :]
            place += int(sizes.sum())
