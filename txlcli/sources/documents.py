"""Where documents end in a text, what JSON lines hold, and which documents are held out."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from txlcli import UserError
from txlcli.sources.chunk import Chunk, join_chunks
from txlcli.sources.corpus import CHUNK_BYTES, Corpus, Source, printable
from txlcli.tokenizer import complete_utf8

Part: TypeAlias = Literal["all", "train", "valid"]

# A line of JSON is parsed as a whole, so this bounds the memory that it takes.
LINE_BYTES_MAX = 1 << 26
_NO_OFFSETS = np.zeros(0, dtype=np.int64)
_AT_START = np.zeros(1, dtype=np.int64)
_SURROGATE = re.compile("[\ud800-\udfff]")
# Whole numbers as floats: Python refuses to read those of thousands of digits.
_JSON = json.JSONDecoder(parse_int=float)


class NotJsonLines(UserError):
    """A line that is not what JSON lines must be."""


def mark_documents(
    corpus: Corpus,
    source: Source,
    chunks: Iterable[Chunk],
    begin: int,
    is_end: bool,
    first_line: Callable[[], int],
) -> Iterator[Chunk]:
    """Mark in the text of one file where documents end; ends may lie at a chunk's start here.

    Args:
        corpus: Its rule of what a document is.
        source: The file.
        chunks: Its text from byte `begin` on.
        begin: See `chunks`.
        is_end: The text goes to the file's end, which ends a document.
        first_line: Counts on which line the text begins.

    Raises:
        NotJsonLines: a line is not what JSON lines must be; the message names file and line.
    """
    if corpus.text_field is not None:
        yield from _from_json(source, chunks, corpus.text_field, corpus.errors, first_line)
    elif corpus.document_separator is not None:
        codec = source.codec if corpus.raw else "utf-8"
        separator = corpus.document_separator.encode(codec)
        unit = character_unit(codec)
        unsized_bytes = 1 if corpus.raw else character_unit(source.codec)
        yield from _at_separators(chunks, separator, begin, unit, is_end, unsized_bytes)
    else:
        for chunk in chunks:
            yield chunk._replace(document_ends=_NO_OFFSETS, end_sizes=_NO_OFFSETS)
        if is_end:
            yield Chunk(b"", None, 0, 0, document_ends=_AT_START, end_sizes=_AT_START)


def character_unit(codec: str) -> int:
    """Return at multiples of how many bytes characters of an encoding begin."""
    return 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1


def settle(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Leave out ends of empty documents and empty chunks; an end goes with its document's last byte."""
    last: Chunk | None = None
    is_open = False  # there is text since the last end
    n_skipped = n_replaced = 0
    for chunk in chunks:
        ends, sizes = chunk.document_ends, chunk.end_sizes
        assert ends is not None
        assert sizes is not None
        source_bytes = chunk.source_bytes
        n_skipped += chunk.skipped_bytes
        n_replaced += chunk.n_replaced
        if len(ends):
            is_real = np.diff(ends, prepend=-1 if is_open else 0) > 0
            is_open = len(chunk.text) > ends[-1]
            n_empty = int(sizes[~is_real].sum())
            n_skipped += n_empty
            source_bytes -= n_empty
            ends, sizes = ends[is_real], sizes[is_real]
            if len(ends) and ends[0] == 0:
                assert last is not None
                assert last.document_ends is not None
                assert last.end_sizes is not None
                last = last._replace(
                    source_bytes=last.source_bytes + int(sizes[0]),
                    document_ends=np.append(last.document_ends, len(last.text)),
                    end_sizes=np.append(last.end_sizes, sizes[0]),
                )
                source_bytes -= int(sizes[0])
                ends, sizes = ends[1:], sizes[1:]
        else:
            is_open = is_open or len(chunk.text) > 0
        if chunk.text:
            if last is not None:
                yield last
            last = chunk._replace(
                source_bytes=source_bytes,
                n_replaced=n_replaced,
                document_ends=ends,
                end_sizes=sizes,
                skipped_bytes=n_skipped,
            )
            n_skipped = n_replaced = 0
    if last is not None:
        yield last


def select(chunks: Iterable[Chunk], every: int, part: Part) -> Iterator[Chunk]:
    """Keep of settled chunks the documents of one part; what is left out counts as skipped."""
    number = 0
    for chunk in chunks:
        ends, end_sizes = chunk.document_ends, chunk.end_sizes
        assert ends is not None
        assert end_sizes is not None
        lengths = np.diff(ends, prepend=0, append=len(chunk.text))
        is_held_out = (number + np.arange(1, len(lengths) + 1)) % every == 0
        number += len(ends)
        is_kept = is_held_out if part == "valid" else ~is_held_out
        if is_kept.all():
            yield chunk
            continue
        mask = np.repeat(is_kept, lengths)
        sizes = None if chunk.sizes is None else chunk.sizes[mask]
        end_sizes = end_sizes[is_kept[:-1]]
        n_text = int(lengths[is_kept].sum()) if sizes is None else int(sizes.sum())
        source_bytes = n_text + int(end_sizes.sum())
        yield chunk._replace(
            text=np.frombuffer(chunk.text, dtype=np.uint8)[mask].tobytes(),
            sizes=sizes,
            source_bytes=source_bytes,
            document_ends=np.cumsum(lengths * is_kept)[:-1][is_kept[:-1]],
            end_sizes=end_sizes,
            skipped_bytes=chunk.skipped_bytes + chunk.source_bytes - source_bytes,
        )


def _at_separators(
    chunks: Iterable[Chunk], separator: bytes, place: int, unit: int, is_end: bool, unsized_bytes: int
) -> Iterator[Chunk]:
    """Take separators out of the text and mark where they stood; their first bytes may end a chunk.

    Where sizes are not asked for, a byte of the separator took `unsized_bytes` in the file.
    """
    rest = Chunk(b"", None, 0, 0)
    for chunk in chunks:
        data = join_chunks([rest, chunk]) if rest.text else chunk
        parts = data.text.split(separator) if unit == 1 else _split(data.text, separator, place, unit)
        n_held = _n_begun(parts[-1], separator)
        n_done = len(data.text) - n_held
        parts[-1] = parts[-1][: len(parts[-1]) - n_held]
        text = parts[0] if len(parts) == 1 else b"".join(parts)
        ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))[:-1]
        if data.sizes is None:
            sizes, end_sizes, held = (
                None,
                np.full(len(ends), unsized_bytes * len(separator), dtype=np.int64),
                None,
            )
            n_held_bytes = unsized_bytes * n_held
        else:
            starts = ends + len(separator) * np.arange(len(ends))
            taken = (starts[:, None] + np.arange(len(separator))).ravel()
            sizes, held = np.delete(data.sizes[:n_done], taken), data.sizes[n_done:]
            end_sizes = data.sizes[taken].reshape(len(ends), len(separator)).sum(axis=1, dtype=np.int64)
            n_held_bytes = int(held.sum())
        yield data._replace(
            text=text,
            sizes=sizes,
            source_bytes=data.source_bytes - n_held_bytes,
            document_ends=ends,
            end_sizes=end_sizes,
        )
        rest = Chunk(data.text[n_done:], held, n_held_bytes, 0)
        place += n_done
    ends = np.array([len(rest.text)] if is_end else [], dtype=np.int64)
    yield rest._replace(document_ends=ends, end_sizes=np.zeros(len(ends), dtype=np.int64))


def _split(text: bytes, separator: bytes, place: int, unit: int) -> list[bytes]:
    """Split at separators that begin where a character may, at multiples of `unit` bytes of the file."""
    parts, begin, found = [], 0, text.find(separator)
    while found >= 0:
        if (place + found) % unit:
            found = text.find(separator, found + 1)
        else:
            parts.append(text[begin:found])
            begin = found + len(separator)
            found = text.find(separator, begin)
    return [*parts, text[begin:]]


def _n_begun(text: bytes, separator: bytes) -> int:
    """Return the length of the longest beginning of a separator, not all of it, that ends a text."""
    longest = min(len(separator) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(separator[:n])), 0)


def json_texts(
    source: Source,
    chunks: Iterable[Chunk],
    field: str,
    errors: Literal["strict", "replace"],
    first_line: int,
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line of JSON lines and the text of its field; blank lines have none."""
    number, begun = first_line, b""

    def refuse(fault: str) -> UserError:
        return NotJsonLines(f"{source.place}: line {number:,} {fault}")

    for chunk in itertools.chain(chunks, [Chunk(b"\n", None, 0, 0)]):
        *lines, begun = (begun + chunk.text).split(b"\n")
        for line in lines:
            if line and not line.isspace():
                yield number, _text_of(line, field, errors, refuse)[0]
            number += 1


def _from_json(
    source: Source,
    chunks: Iterable[Chunk],
    field: str,
    errors: Literal["strict", "replace"],
    first_line: Callable[[], int],
) -> Iterator[Chunk]:
    """Turn JSON lines into the texts of one field, each with its end."""
    n_lines = n_begun = n_begun_bytes = n_replaced = 0
    begun: list[bytes] = []  # of the line that is not whole yet

    def refuse(fault: str) -> UserError:
        return NotJsonLines(f"{source.place}: line {first_line() + n_lines:,} {fault}")

    def parse(lines: Sequence[bytes]) -> Iterator[bytes]:
        nonlocal n_lines, n_replaced
        for line in lines:
            if line and not line.isspace():
                text, n_wrong = _text_of(line, field, errors, refuse)
                n_replaced += n_wrong
                yield text
            n_lines += 1

    is_sized = False
    for chunk in chunks:
        is_sized = chunk.sizes is not None
        n_replaced += chunk.n_replaced
        *lines, last = chunk.text.split(b"\n")
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            begun, n_begun = [], 0
            n_last = (
                len(last) if chunk.sizes is None else int(chunk.sizes[len(chunk.text) - len(last) :].sum())
            )
            n_read = n_begun_bytes + chunk.source_bytes - n_last
            n_begun_bytes = n_last
            yield from _pack([*parse(lines)], n_read, n_replaced, is_sized)
            n_replaced = 0
        else:
            n_begun_bytes += chunk.source_bytes
        begun.append(last)
        n_begun += len(last)
        if n_begun > CHUNK_BYTES and (first := begun[0].lstrip()[:1]) not in (b"{", b""):
            got = "a list" if first == b"[" else f"`{printable(first.decode(errors='replace'))}`"
            raise refuse(_no_object(got, field))
        if n_begun > LINE_BYTES_MAX:
            raise refuse(f"is longer than {LINE_BYTES_MAX:,} bytes; give one document a line")
    yield from _pack([*parse([b"".join(begun)])], n_begun_bytes, n_replaced, is_sized)


def _pack(texts: Sequence[bytes], n_read: int, n_replaced: int, is_sized: bool) -> Iterator[Chunk]:
    """Put texts end to end into chunks of bounded size; `n_read` bytes of the file were read for them."""
    text = b"".join(texts)
    ends = np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    n_skipped, start = n_read - len(text), 0
    while True:
        some = text[start : start + max(CHUNK_BYTES, 4)]
        some = some[: complete_utf8(some)]
        stop = start + len(some)
        # An end at the cut goes with the text before it; one of an empty text at the start with none.
        mine = ends[(ends > start) & (ends <= stop)] - start
        yield Chunk(
            text=some,
            sizes=np.ones(len(some), dtype=np.uint32) if is_sized else None,
            source_bytes=len(some),
            n_replaced=n_replaced,
            document_ends=mine,
            end_sizes=np.zeros(len(mine), dtype=np.int64),
            skipped_bytes=n_skipped,
        )
        n_skipped = n_replaced = 0
        start = stop
        if start >= len(text):
            return


def _text_of(
    line: bytes, field: str, errors: Literal["strict", "replace"], refuse: Callable[[str], UserError]
) -> tuple[bytes, int]:
    """Return the text of a line's field, and how many bytes of its escapes are no characters."""
    try:
        found: Any = _JSON.decode(line.decode())
    except json.JSONDecodeError as error:
        first = line.lstrip()[:1]
        if first in (b"{", b"[") and not line.decode()[error.pos :].strip():
            what = "an object" if first == b"{" else "a list"
            raise refuse(_no_object(f"{what} that goes on beyond the line", field)) from None
        why, got = error.msg[:1].lower() + error.msg[1:], _shown(line, error.pos)
        raise refuse(f"is not JSON at column {error.colno:,} ({why}); got {got}; mend the line") from None
    except RecursionError:
        raise refuse("is not JSON that can be read; it is nested too deeply") from None
    if not isinstance(found, dict):
        raise refuse(_no_object(_kind(found), field))
    if field not in found:
        keys = ", ".join(f"`{printable(key)[:40]}`" for key in list(found)[:5]) or "no field"
        raise refuse(
            f"has no field `{printable(field)}`; got {keys}; name the text's field with --text-field"
        )
    text = found[field]
    if not isinstance(text, str):
        raise refuse(
            f"has no text in the field `{printable(field)}`; got {_kind(text)}; "
            "name the text's field with --text-field"
        )
    wrong = _SURROGATE.findall(text)
    if not wrong:
        return text.encode(), 0
    if errors == "strict":
        raise refuse(
            f"has half a character in the field `{printable(field)}`; got \\u{ord(wrong[0]):04x}; "
            "mend it, or train with --encoding-errors replace"
        )
    return _SURROGATE.sub("\ufffd", text).encode(), len("\\ud800") * len(wrong)


def _no_object(got: str, field: str) -> str:
    told = f"is no JSON object; got {got}; each line must be an object with a text in `{printable(field)}`"
    # What a whole file of JSON is made of; any other line has no such remedy.
    remedies = {"a list": "jq -c '.[]' FILE", "an object": "jq -c . FILE"}
    remedy = next((command for kind, command in remedies.items() if got.startswith(kind)), None)
    return told if remedy is None else f"{told}: for example {remedy} writes such lines"


def _kind(value: object) -> str:
    kinds = {type(None): "null", bool: "true or false", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "an object")


def _shown(line: bytes, column: int) -> str:
    return f"`{printable(line.decode()[column : column + 20])}`"
