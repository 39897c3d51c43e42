"""Text out of the files of a corpus, as UTF-8 cut at characters, its documents marked."""

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from txlcli.sources import blocks
from txlcli.sources.chunk import Chunk, convert, join_chunks
from txlcli.sources.corpus import Corpus, Source
from txlcli.sources.decoding import is_stateless, read_encoded, read_raw, read_utf8
from txlcli.sources.documents import Part, character_unit, json_texts, mark_documents, select, settle
from txlcli.sources.fault import NotText, line_of


def read_text(corpus: Corpus, start: int, stop: int, *, part: Part = "all") -> Iterator[bytes]:
    """Yield the text between two bytes of the corpus as UTF-8 in chunks of about 256 KiB, cut at characters.

    Both ends MUST stand at characters, as 0, `n_bytes` and `find_split` do. Raw bytes come as they are. The
    corpus' `newlines` and `spaces` are applied, also to raw bytes; separators of documents are left out.
    A packed file is unpacked from its start, unless another read has ended shortly before `start` or shortly
    after it.

    Raises:
        UserError: a file cannot be read, has become shorter, is damaged, is no text in its encoding under
            `strict`, or has no JSON lines where these are wanted: the message names file, byte or line, and
            remedy.
    """
    for chunk in read_chunks(corpus, start, stop, part=part):
        yield chunk.text


def read_chunks(
    corpus: Corpus,
    start: int,
    stop: int,
    *,
    sized: bool = False,
    watch: Callable[[bytes], object] | None = None,
    part: Part = "all",
) -> Iterator[Chunk]:
    """Yield what `read_text` does with its origin; `watch` sees the files' bytes, unpacked, on their way.

    `part` chooses documents by the corpus' `valid_every`; then `start` MUST be 0 and `stop` `n_bytes`.
    """
    chunks = read_documents(corpus, start, stop, sized=sized, watch=watch)
    if part != "all":
        assert corpus.valid_every is not None
        assert (start, stop) == (0, corpus.n_bytes)
        chunks = select(chunks, corpus.valid_every, part)
    yield from by_conventions(corpus, chunks)


def read_documents(
    corpus: Corpus,
    start: int,
    stop: int,
    *,
    sized: bool = False,
    watch: Callable[[bytes], object] | None = None,
) -> Iterator[Chunk]:
    """Yield text with its documents, but not by the corpus' `newlines` and `spaces` yet."""
    if not corpus.has_documents:
        return _read_files(corpus, start, stop, sized, watch)
    return settle(_gather(_read_files(corpus, start, stop, sized, watch)))


def by_conventions(corpus: Corpus, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Apply the corpus' `newlines` and `spaces`, and put small chunks together."""
    if corpus.newlines == "drop":
        chunks = _without_newlines(chunks, corpus)
    elif corpus.spaces != "keep":
        chunks = (chunk._replace(text=convert(chunk.text, "keep", corpus.spaces)) for chunk in chunks)
    # Documents may have lost all their text.
    yield from _gather(settle(chunks) if corpus.has_documents else chunks)


def find_place(corpus: Corpus, start: int, stop: int, offset: int, *, part: Part = "all") -> tuple[str, str]:
    """Name the file, and the place in it, of byte `offset` of the text that `read_text` gives.

    The place is a byte of the file, `byte 12`; in JSON lines, whose text has escapes, it is a line, `line 3`.

    Raises:
        UserError: as `read_text`.
    """
    unit = "byte" if corpus.text_field is None else "line"
    n_documents, is_open = 0, False  # those ended so far; there is text since
    for source, text, places, is_end in _segments(corpus, start, stop):
        is_held_out = corpus.valid_every is not None and (n_documents + 1) % corpus.valid_every == 0
        if part == "all" or is_held_out == (part == "valid"):
            kept = np.delete(places, _newlines(text)) if corpus.newlines == "drop" else places
            if offset < len(kept):
                return source.place, f"{unit} {kept[offset]}"
            offset -= len(kept)
        is_open = is_open or len(text) > 0
        if is_end and is_open:
            n_documents, is_open = n_documents + 1, False
    raise AssertionError("beyond the text")


def find_marks(corpus: Corpus, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Find the byte-order marks between two bytes of the corpus.

    Returns:
        For each the bytes between `start` and it, those of other marks not counted, and its own.
    """
    marks, n_bytes = [], 0
    for source, lo, hi in _ranges(corpus, start, stop):
        n_mark = max(min(hi, source.n_mark) - lo, 0)
        marks += [(n_bytes, n_mark)] if n_mark else []
        n_bytes += hi - lo - n_mark
    return tuple(marks)


def _segments(
    corpus: Corpus, start: int, stop: int
) -> Iterator[tuple[Source, bytes, npt.NDArray[np.int64], bool]]:
    """Yield text with its file, the place of each byte of it, and whether a document ends with it."""
    for source, lo, hi in _ranges(corpus, start, stop):
        chunks = _read_file(corpus, source, lo, hi, True, None)
        if corpus.text_field is not None:
            first_line = line_of(source, lo)
            for line, text in json_texts(source, chunks, corpus.text_field, corpus.errors, first_line):
                yield source, text, np.full(len(text), line), True
            continue
        place = max(lo, source.n_mark)
        if corpus.has_documents:
            chunks = mark_documents(corpus, source, chunks, lo, hi == source.n_bytes, lambda: 1)
        for chunk in chunks:
            sizes = np.zeros(0, dtype=np.int64) if chunk.sizes is None else chunk.sizes.astype(np.int64)
            ends = [] if chunk.document_ends is None else chunk.document_ends.tolist()
            end_sizes = [] if chunk.end_sizes is None else chunk.end_sizes.tolist()
            begin = 0
            for end, end_size in [*zip(ends, end_sizes, strict=True), (len(chunk.text), None)]:
                some = sizes[begin:end]
                yield source, chunk.text[begin:end], place + np.cumsum(some) - some, end_size is not None
                place += int(some.sum()) + (end_size or 0)
                begin = end


def _read_files(
    corpus: Corpus, start: int, stop: int, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    for source, lo, hi in _ranges(corpus, start, stop):
        chunks = _read_file(corpus, source, lo, hi, sized, watch)
        if corpus.has_documents:
            chunks = mark_documents(
                corpus, source, chunks, lo, hi == source.n_bytes, functools.partial(line_of, source, lo)
            )
        try:
            yield from chunks
        except NotText as error:
            if corpus.text_field is None:
                raise
            # Lines of JSON are text for every tokenizer.
            raise NotText(str(error).removesuffix(" or --tokenizer byte")) from None


def _ranges(corpus: Corpus, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """Yield the files between two bytes of the corpus, each with the bytes of its own."""
    base = 0
    for source in corpus.sources:
        lo, hi = max(start - base, 0), min(stop - base, source.n_bytes)
        base += source.n_bytes
        if lo < hi:
            yield source, lo, hi


def _read_file(
    corpus: Corpus, source: Source, lo: int, hi: int, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    is_utf8 = source.codec == "utf-8"
    read = read_raw if corpus.reads_bytes else read_utf8 if is_utf8 else read_encoded
    is_changed = not corpus.reads_bytes and not (is_utf8 and corpus.errors == "strict")
    is_sized = sized or (is_changed and _needs_sizes(corpus, source))
    return read(source, lo, hi, corpus.errors, is_sized, watch)


def _needs_sizes(corpus: Corpus, source: Source) -> bool:
    """Say whether only sizes tell what parts of the text took in a file that is no UTF-8."""
    if not is_stateless(source.codec):
        return corpus.has_documents or corpus.newlines == "drop"
    if corpus.valid_every is not None:
        return True
    separator = corpus.document_separator
    return corpus.text_field is not None or (separator is not None and not separator.isascii())


def _gather(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small chunks, as many small files and documents give them."""
    waiting: list[Chunk] = []
    n_waiting = 0
    for chunk in chunks:
        if waiting and n_waiting + len(chunk.text) > blocks.BLOCK_BYTES:
            yield join_chunks(waiting)
            waiting, n_waiting = [], 0
        waiting.append(chunk)
        n_waiting += len(chunk.text)
        if n_waiting > blocks.BLOCK_BYTES // 2:
            yield join_chunks(waiting)
            waiting, n_waiting = [], 0
    if waiting:
        yield join_chunks(waiting)


def _without_newlines(chunks: Iterable[Chunk], corpus: Corpus) -> Iterator[Chunk]:
    """Leave newlines out; where sizes are not asked for, what they took counts as skipped."""
    is_utf8 = corpus.reads_bytes or corpus.text_field is not None
    newline_bytes = 1 if is_utf8 else character_unit(corpus.encoding)
    n_waiting = 0  # left out since the last byte of text
    for chunk in chunks:
        ends, end_sizes = chunk.document_ends, chunk.end_sizes
        text = convert(chunk.text, "drop", corpus.spaces)
        if chunk.sizes is None:
            n_bytes = newline_bytes * (len(chunk.text) - len(text))
            n_waiting += n_bytes
            if text or ends is not None:
                n_last = (
                    newline_bytes * (len(chunk.text) - len(chunk.text.rstrip(b"\n"))) if text else n_waiting
                )
                if ends is not None and len(ends):
                    ends = ends - np.searchsorted(_newlines(chunk.text), ends)
                yield chunk._replace(
                    text=text,
                    source_bytes=chunk.source_bytes - n_bytes,
                    document_ends=ends,
                    skipped_bytes=chunk.skipped_bytes + n_waiting - n_last,
                )
                n_waiting = n_last
            continue
        newlines = _newlines(chunk.text)
        left_out = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(left_out, newlines - np.arange(len(newlines)), chunk.sizes[newlines])
        left_out[0] += n_waiting
        n_waiting = int(left_out[-1])
        if text or ends is not None:
            sizes = np.delete(chunk.sizes, newlines)
            yield chunk._replace(
                text=text,
                sizes=sizes,
                source_bytes=int(sizes.sum()) + (0 if end_sizes is None else int(end_sizes.sum())),
                left_out=left_out[:-1],
                document_ends=None if ends is None else ends - np.searchsorted(newlines, ends),
            )


def _newlines(text: bytes) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))
