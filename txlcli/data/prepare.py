"""From text to a store of ids, chunk by chunk."""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from txlcli import UserError, files
from txlcli.data.store import SourceInfo, Split, SplitInfo, StoreInfo, smallest_dtype
from txlcli.sources import (
    Chunk,
    Corpus,
    Progress,
    character_ends,
    check_unchanged,
    code_points,
    complete_utf8,
    find_byte,
    read_chunks,
    told_replaced,
)
from txlcli.tokenizer import OutsideVocabulary, Tokenizer

SAMPLE_BYTES = 1 << 16
BLOCK_ITEMS = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """The store is complete; notices are what a user should know, one line each."""

    info: StoreInfo
    notices: tuple[str, ...]


class Part(NamedTuple):
    """The bytes of a corpus that become one split."""

    split: Split
    corpus: Corpus
    start: int
    stop: int


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    run_dir: Path,
    *,
    split_at: int,
    valid: Corpus | None = None,
    test: Corpus | None = None,
) -> Iterator[Progress | Prepared]:
    """Encode a corpus into the store of a run, which appears at the end; the last event is `Prepared`.

    The corpus' bytes from `split_at` on are held out as `valid`, unless a corpus is given for it. Where they
    are under two tokens nothing is held out, and all is trained on.

    Raises:
        UserError: a file cannot be read or is no text, there are too few tokens to learn from or to
            score, or the disk is too small; nothing is left then.
    """
    notices = []
    split_at = corpus.n_bytes if valid is not None else split_at
    held_out = Part("valid", corpus, split_at, corpus.n_bytes)
    if split_at < corpus.n_bytes and _is_under_two_tokens(tokenizer, held_out):
        split_at = corpus.n_bytes
        notices.append(f"{corpus.name}: nothing is held out, it would be under two tokens; best is last")
    elif split_at == corpus.n_bytes and valid is None:
        notices.append(f"{corpus.name}: nothing is held out; best is last")
    parts = [Part("train", corpus, 0, split_at)]
    if split_at < corpus.n_bytes:
        parts.append(Part("valid", corpus, split_at, corpus.n_bytes))
    if valid is not None:
        parts.append(Part("valid", valid, 0, valid.n_bytes))
    if test is not None:
        parts.append(Part("test", test, 0, test.n_bytes))
    yield from _write_store(parts, tokenizer, run_dir, split_at, notices)


def encode_text(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, least_tokens: int = 2
) -> Iterator[Progress | Prepared]:
    """Encode a text to be scored as the split `test` of a store in a folder of the caller's.

    Raises:
        UserError: as `prepare`.
    """
    yield from _write_store(
        [Part("test", corpus, 0, corpus.n_bytes)], tokenizer, folder, corpus.n_bytes, [], least_tokens
    )


def _write_store(
    parts: list[Part],
    tokenizer: Tokenizer,
    run_dir: Path,
    split_at: int,
    notices: list[str],
    least_tokens: int = 2,
) -> Iterator[Progress | Prepared]:
    dtype = smallest_dtype(tokenizer.n_vocab - 1)
    # The vocabulary of bytes has a newline even where none comes any more.
    newline_id = None if parts[0].corpus.newlines == "drop" else tokenizer.newline_id
    _check_space(parts, tokenizer, run_dir, np.dtype(dtype).itemsize)
    digest = hashlib.sha256()
    corpus = parts[0].corpus
    splits: dict[str, SplitInfo] = {}
    with files.folder_whole(run_dir / "data") as folder:
        frequencies = np.zeros(tokenizer.n_vocab, dtype=np.int64)
        for part in parts:
            splits[part.split] = yield from _encode_part(
                part,
                tokenizer,
                folder,
                dtype,
                frequencies if part is parts[0] and newline_id is None else None,
                digest.update if part.corpus is corpus else None,
                # The survey of a corpus to learn from has counted them already.
                notices if part.corpus is not corpus or part.split == "test" else None,
            )
            _check_length(part, splits[part.split], least_tokens, tokenizer)
        for one in {id(part.corpus): part.corpus for part in parts}.values():
            notices.extend(check_unchanged(one))
        info = StoreInfo(
            n_vocab=tokenizer.n_vocab,
            dtype=dtype,
            start_id=_choose_start(tokenizer, newline_id, frequencies),
            tokenizer=tokenizer.fingerprint(),
            encoding=corpus.encoding,
            corpus=tuple(
                SourceInfo(path=source.name, n_bytes=source.n_bytes, mtime_ns=source.mtime_ns)
                for source in corpus.sources
            ),
            sha256=digest.hexdigest(),
            split_at=split_at,
            splits=splits,
        )
        text = json.dumps(dataclasses.asdict(info), indent=1, sort_keys=True)
        (folder / "store.json").write_text(text + "\n", encoding="utf-8")
    for split, one_info in splits.items():
        if one_info.n_unknown:
            share = one_info.n_unknown / one_info.n_tokens
            notices.append(f"{split}: {share:.2%} of the tokens are unknown to the vocabulary")
    yield Prepared(info, tuple(notices))


def _encode_part(
    part: Part,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: str,
    frequencies: npt.NDArray[np.int64] | None,
    watch: Callable[[bytes], object] | None,
    notices: list[str] | None,
) -> Generator[Progress, None, SplitInfo]:
    """Write the ids of one split and, if it is held out, their counts; add its tokens to `frequencies`.

    Bytes that were no text are told in `notices`.
    """
    n_tokens = n_bytes = n_unknown = n_characters = 0
    is_counted = part.split != "train"
    stored = np.dtype(dtype).newbyteorder("<")
    total = part.stop - part.start
    n_replaced = 0

    def counted() -> Iterator[Chunk]:
        nonlocal n_replaced
        for chunk in read_chunks(part.corpus, part.start, part.stop, sized=is_counted, watch=watch):
            n_replaced += chunk.n_replaced
            yield chunk

    yield Progress(f"encoding {part.split}", 0, total)
    with ExitStack() as stack:
        file = stack.enter_context((folder / f"{part.split}.ids").open("xb"))
        tally = _Tally(folder / f"{part.split}.counts", part.corpus) if is_counted else None
        if tally is not None:
            stack.callback(tally.close)
        for piece in whole_units(tokenizer, counted()):
            try:
                ids, ends = (
                    (tokenizer.encode(piece.text), None)
                    if tally is None
                    else tokenizer.encode_with_ends(piece.text)
                )
            except OutsideVocabulary:
                _refuse_outside(part, tokenizer)
            if tally is None or ends is None:
                n_characters += int(np.count_nonzero(character_ends(piece.text)))
            else:
                tally.add(piece, ends)
            file.write(ids.astype(stored).tobytes())
            if frequencies is not None:
                frequencies += np.bincount(ids, minlength=len(frequencies))
            if not tokenizer.is_lossless:
                n_unknown += tokenizer.unknown_count(ids)
            n_tokens += len(ids)
            n_bytes = piece.source_bytes
            yield Progress(f"encoding {part.split}", piece.read_bytes, total)
    if notices is not None and n_replaced:
        notices.append(told_replaced(part.corpus, n_replaced))
    known_characters = None if part.corpus.raw else n_characters
    return SplitInfo(
        n_tokens=n_tokens,
        n_bytes=n_bytes,
        n_characters=known_characters if tally is None else tally.n_characters,
        n_words=None if tally is None else tally.n_words,
        n_unknown=n_unknown,
        counts_dtype=None if tally is None else tally.dtype,
    )


def _refuse_outside(part: Part, tokenizer: Tokenizer) -> NoReturn:
    """Say where in its file the first symbol outside the vocabulary stands: read again, now with sizes."""
    n_before = 0
    for piece in _cut_units(tokenizer, read_chunks(part.corpus, part.start, part.stop, sized=True)):
        assert piece.sizes is not None
        taken = piece.sizes.astype(np.int64) + (0 if piece.left_out is None else piece.left_out)
        try:
            tokenizer.encode(piece.text)
        except OutsideVocabulary as error:
            n_before += int(taken[: error.offset].sum())
            n_before += 0 if piece.left_out is None else int(piece.left_out[error.offset])
            raise error.at(*find_byte(part.corpus, part.start, n_before)) from None
        n_before += int(taken.sum())
    raise AssertionError("the same text was outside the vocabulary before")


class Piece(NamedTuple):
    """Whole units of text; `sizes` and `left_out` as in `Chunk`.

    `following` begins with the character after it, a newline even if that is left out; `source_bytes` and
    `read_bytes` count those read so far.
    """

    text: bytes
    sizes: npt.NDArray[np.uint32] | None
    left_out: npt.NDArray[np.int64] | None
    following: bytes
    source_bytes: int
    read_bytes: int

    def part(self, start: int, stop: int) -> "Piece":
        """Return some bytes of the text with what belongs to them."""
        return self._replace(
            text=self.text[start:stop],
            sizes=None if self.sizes is None else self.sizes[start:stop],
            left_out=None if self.left_out is None else self.left_out[start:stop],
        )


def whole_units(tokenizer: Tokenizer, chunks: Iterator[Chunk]) -> Iterator[Piece]:
    """Cut text where the tokenizer's units end, so that encoding it piece by piece equals one pass."""
    last: Piece | None = None
    for piece in _cut_units(tokenizer, chunks):
        if last is not None:
            is_at_newline = piece.left_out is not None and piece.left_out[0] > 0
            yield last._replace(following=b"\n" if is_at_newline else piece.text[:4])
        last = piece
    if last is not None:
        yield last


def _cut_units(tokenizer: Tokenizer, chunks: Iterator[Chunk]) -> Iterator[Piece]:
    rest = Piece(b"", None, None, b"", 0, 0)
    for chunk in chunks:
        read = Piece(
            text=rest.text + chunk.text,
            sizes=_join(rest.sizes, chunk.sizes),
            left_out=_join(rest.left_out, chunk.left_out),
            following=b"",
            source_bytes=rest.source_bytes + chunk.source_bytes,
            read_bytes=rest.read_bytes + chunk.read_bytes,
        )
        cut = tokenizer.complete_prefix(read.text)
        if cut:
            yield read.part(0, cut)
        rest = read.part(cut, len(read.text))
    if rest.text:
        yield rest


def _join(before: npt.NDArray[Any] | None, after: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    return after if before is None or after is None else np.concatenate([before, after])


class _Tally:
    """Writes the counts of a held-out split, in the smallest type that has held all so far.

    Where newlines are dropped, also what was left out before which token.
    """

    def __init__(self, path: Path, corpus: Corpus) -> None:
        self.dtype = "uint8"
        self._path = path
        self._file: BinaryIO = path.open("x+b")
        self._gaps = _Gaps(path.with_suffix(".left_out")) if corpus.newlines == "drop" else None
        self._has_underscores = corpus.spaces == "underscore"
        # Characters of raw bytes are counted where they are UTF-8, and only there.
        self._is_text = not corpus.raw or corpus.encoding == "utf-8"
        self._n_characters = self._n_words = 0

    @property
    def n_characters(self) -> int | None:
        """The characters so far; None: the bytes are no text."""
        return self._n_characters if self._is_text else None

    @property
    def n_words(self) -> int | None:
        """The words so far; None: the bytes are no text."""
        return self._n_words if self._is_text else None

    def add(self, piece: Piece, ends: npt.NDArray[np.int64]) -> None:
        """Count what ends with each token; `ends` are their last bytes' successors in the piece."""
        assert piece.sizes is not None
        marks_by_kind: list[npt.NDArray[Any]] = [piece.sizes]
        if self._is_text:
            try:
                marks_by_kind += _mark_ends(piece, has_underscores=self._has_underscores)
            except ValueError:
                self._is_text = False
        if self._gaps is not None and piece.left_out is not None:
            self._gaps.add(piece.left_out, ends)
        columns = [_differences(marks, ends) for marks in marks_by_kind]
        columns += [np.zeros_like(columns[0])] * (3 - len(columns))
        self._n_characters += int(columns[1].sum())
        self._n_words += int(columns[2].sum())
        if len(ends):
            self._widen(smallest_dtype(max(int(column.max()) for column in columns)))
        stored = np.dtype(self.dtype).newbyteorder("<")
        self._file.write(np.stack([column.astype(stored) for column in columns], axis=1).tobytes())

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        if self._gaps is not None:
            self._gaps.close()

    def _widen(self, dtype: str) -> None:
        old, new = np.dtype(self.dtype).newbyteorder("<"), np.dtype(dtype).newbyteorder("<")
        if new.itemsize <= old.itemsize:
            return
        wider = self._path.with_suffix(".wider")
        self._file.seek(0)
        with wider.open("xb") as file:
            while block := self._file.read(BLOCK_ITEMS * old.itemsize):
                file.write(np.frombuffer(block, dtype=old).astype(new).tobytes())
        self._file.close()
        wider.replace(self._path)
        self._file = self._path.open("r+b")
        self._file.seek(0, 2)
        self.dtype = dtype


class _Gaps:
    """Writes before which tokens bytes were left out, each with how many since the split began."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._n_tokens = self._n_bytes = self._n_told = 0

    def add(self, left_out: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Take what was left out before each byte of a piece, and the ends of its tokens."""
        before_byte = self._n_bytes + np.cumsum(left_out)
        if len(ends):
            starts = np.minimum(np.append(0, ends[:-1]), len(left_out) - 1)
            before_token = before_byte[starts]
            grown = np.flatnonzero(np.diff(before_token, prepend=self._n_told))
            pairs = np.stack([self._n_tokens + grown, before_token[grown]], axis=1)
            self._file.write(pairs.astype("<u8").tobytes())
            self._n_told = int(before_token[-1])
        self._n_tokens += len(ends)
        self._n_bytes = int(before_byte[-1])

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def _mark_ends(piece: Piece, *, has_underscores: bool) -> list[npt.NDArray[np.bool_]]:
    """Say for each byte whether a character, and whether a word ends with it.

    Words are those of the file: a newline that is left out ends one, and so does an underscore that may have
    been a space.

    Raises:
        ValueError: the bytes of the file are no UTF-8.
    """
    characters = character_ends(piece.text)
    # What follows may be cut inside its second character, of which nothing is asked.
    after = piece.following.decode(errors="ignore")[:1] or "\n"
    points = np.append(code_points(piece.text), np.uint32(ord(after)))
    is_space = _is_space(points)
    if has_underscores:
        is_space |= points == ord("_")
    is_before_space = is_space[1:].copy()
    if piece.left_out is not None:
        begins = np.append(True, characters[:-1])
        if piece.left_out[~begins].any():
            raise ValueError("a newline stood inside a character")
        is_before_space[:-1] |= piece.left_out[begins][1:] > 0
    words = np.zeros(len(piece.text), dtype=np.bool_)
    words[characters] = ~is_space[:-1] & is_before_space
    return [characters, words]


def _is_space(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    spaces: npt.NDArray[np.bool_] = _space_table()[np.minimum(points, 0x3001)]
    return spaces


@functools.cache
def _space_table() -> npt.NDArray[np.bool_]:
    # No character beyond U+3000 is white space.
    return np.array([chr(point).isspace() for point in range(0x3002)])


def _differences(marks: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Sum marks per byte between one end and the next."""
    running = np.zeros(len(marks) + 1, dtype=np.uint32)
    np.cumsum(marks, out=running[1:])
    at_end = running[ends]
    at_end[1:] -= at_end[:-1].copy()
    return at_end


def _check_length(part: Part, info: SplitInfo, least_tokens: int, tokenizer: Tokenizer) -> None:
    if info.n_tokens >= least_tokens:
        return
    got = f"got {info.n_tokens} token{'s' * (info.n_tokens != 1)}, needs at least {least_tokens}"
    if part.split == "train":
        remedy = ""
        if part.stop < part.corpus.n_bytes:
            remedy = "; hold less out with --valid-fraction"
        elif tokenizer.kind in ("word", "sentencepiece") and part.corpus.n_bytes >= least_tokens:
            remedy = f" of the {tokenizer.kind} vocabulary; use --tokenizer char or byte"
        raise UserError(f"{part.corpus.name}: too short to learn from; {got}{remedy}")
    raise UserError(f"{part.corpus.name}: too short to score; {got}")


def _is_under_two_tokens(tokenizer: Tokenizer, part: Part) -> bool:
    """Encode a part that is short enough to be a single token."""
    if part.stop - part.start > SAMPLE_BYTES:
        return False
    text = b"".join(chunk.text for chunk in read_chunks(part.corpus, part.start, part.stop))
    return _count_tokens(tokenizer, text) < 2


def _count_tokens(tokenizer: Tokenizer, text: bytes) -> int:
    """Count tokens; as many as bytes where the vocabulary does not have the text, which is refused later."""
    try:
        return len(tokenizer.encode(text))
    except OutsideVocabulary:
        return len(text)


def _check_space(parts: list[Part], tokenizer: Tokenizer, folder: Path, itemsize: int) -> None:
    """Refuse to begin where the disk is too small, by the tokens per byte of each part's beginning."""
    needed = 0
    for part in parts:
        chunk = next(read_chunks(part.corpus, part.start, part.stop), None)
        if chunk is not None:
            # Raw bytes may be the beginning of a character and no more.
            sample = chunk.text[: complete_utf8(chunk.text[:SAMPLE_BYTES])] or chunk.text
            tokens_per_byte = (
                _count_tokens(tokenizer, sample) / len(sample) * len(chunk.text) / max(chunk.source_bytes, 1)
            )
            n_tokens = tokens_per_byte * (part.stop - part.start)
            needed += int(n_tokens * (itemsize + (0 if part.split == "train" else 3)))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the disk is too full for the ids; needs about {needed / 1e6:,.1f} MB, "
            f"{free / 1e6:,.1f} MB are free; choose another place with --out"
        )


def _choose_start(tokenizer: Tokenizer, newline_id: int | None, frequencies: npt.NDArray[np.int64]) -> int:
    """Return what an empty prompt starts from: the newline, else the most frequent token that is text."""
    if newline_id is not None:
        return newline_id
    frequencies = frequencies.copy()
    frequencies[list(tokenizer.control_ids)] = -1
    return int(frequencies.argmax())
