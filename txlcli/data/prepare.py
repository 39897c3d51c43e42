"""From text to a store of ids, chunk by chunk."""

import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from txlcli import UserError, files
from txlcli.data.encoding import (
    COUNTED_BYTES,
    Encoded,
    Piece,
    Rules,
    cut_chunk,
    cut_units,
    encode,
    whole_units,
)
from txlcli.data.info import Split, SplitInfo, StoreInfo, write_store_info
from txlcli.data.origin import Hashing, Origin
from txlcli.data.store import smallest_dtype
from txlcli.data.workers import Workers, worker_count
from txlcli.data.writing import SplitWriter
from txlcli.sources import (
    Chunk,
    Corpus,
    Progress,
    check_unchanged,
    complete_utf8,
    find_marks,
    find_place,
    read_chunks,
    told_replaced,
    told_unseparated,
)
from txlcli.tokenizer import OutsideVocabulary, Tokenizer

SAMPLE_BYTES = 1 << 16
# A gap is two integers of eight bytes, and few texts have shorter lines on average.
GAP_BYTES_PER_BYTE = 16 / 20


@dataclass(frozen=True)
class Prepared:
    """The store is complete; notices are what a user should know, one line each."""

    info: StoreInfo
    notices: tuple[str, ...]


class Part(NamedTuple):
    """The bytes of a corpus that become one split; of its documents all, or those of one part."""

    split: Split
    corpus: Corpus
    start: int
    stop: int
    documents: Literal["all", "train", "valid"] = "all"

    def chunks(self, *, sized: bool = False) -> Iterator[Chunk]:
        """Read them."""
        more: dict[str, Any] = {} if self.documents == "all" else {"part": self.documents}
        return read_chunks(self.corpus, self.start, self.stop, sized=sized, **more)


class Encoding(NamedTuple):
    """What encodes the parts of a store: a tokenizer, and maybe workers that have it too."""

    tokenizer: Tokenizer
    rules: Rules
    workers: Workers | None

    def run(self, part: Part, chunks: Iterator[Chunk]) -> Iterator[tuple[Piece, Encoded]]:
        """Yield each piece of a part and what it has become, in order.

        Raises:
            OutsideVocabulary: the text holds what has no id.
        """
        pieces, is_counted = whole_units(self.tokenizer, chunks), part.split != "train"
        if self.workers is not None:
            yield from self.workers.encode(pieces, is_counted=is_counted)
            return
        for piece in pieces:
            yield piece, encode(self.tokenizer, piece, self.rules, is_counted=is_counted)


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    run_dir: Path,
    *,
    split_at: int,
    valid: Corpus | None = None,
    test: Corpus | None = None,
    origin: Origin | None = None,
    tokenizer_folder: Path | None = None,
    n_processors: int | None = None,
) -> Iterator[Progress | Prepared]:
    """Encode a corpus into the store of a run, which appears at the end; the last event is `Prepared`.

    The corpus' bytes from `split_at` on are held out as `valid`, or every n-th of its documents if the corpus
    says so, unless a corpus is given for it. Where they are under two tokens nothing is held out, and all is
    trained on.

    Args:
        corpus: The text to learn from.
        tokenizer: The vocabulary.
        run_dir: The folder in which `data/` appears.
        split_at: The byte of the corpus at which the held-out text begins.
        valid: Other held-out text.
        test: Text for a final score.
        origin: What is known of these texts, for those who look for the same; None: nobody will.
        tokenizer_folder: Where the tokenizer is saved, so that workers can load it; None: it is not, and the
            text is encoded in this process.
        n_processors: How many workers may be used; None: as many as there are processors.

    Raises:
        UserError: a file cannot be read or is no text, there are too few tokens to learn from or to
            score, the disk is too small, or a worker was killed; nothing is left then.
    """
    notices = []
    split_at = corpus.n_bytes if valid is not None else split_at
    held_out = Part("valid", corpus, split_at, corpus.n_bytes)
    parts = [Part("train", corpus, 0, split_at)]
    if valid is None and corpus.valid_every is not None:
        parts = [Part("train", corpus, 0, corpus.n_bytes, "train")]
        held_out = Part("valid", corpus, 0, corpus.n_bytes, "valid")
    is_short = held_out.start < held_out.stop and _is_under_two_tokens(tokenizer, held_out)
    if is_short:
        split_at = corpus.n_bytes
        parts = [Part("train", corpus, 0, corpus.n_bytes)]
        what = "it" if corpus.valid_every is None else f"what --valid-every {corpus.valid_every:,} takes"
        notices.append(f"{corpus.name}: nothing is held out, {what} would be under two tokens; best is last")
    elif held_out.start < held_out.stop:
        parts.append(held_out)
    elif valid is None:
        notices.append(f"{corpus.name}: nothing is held out; best is last")
    if valid is not None:
        parts.append(Part("valid", valid, 0, valid.n_bytes))
    if test is not None:
        parts.append(Part("test", test, 0, test.n_bytes))
    n_bytes = sum(part.stop - part.start for part in parts)
    n_workers = 0 if tokenizer_folder is None else worker_count(tokenizer, n_bytes, n_processors)
    yield from _write_store(
        parts,
        tokenizer,
        run_dir,
        split_at,
        notices,
        origin=Origin.of(corpus, valid, test) if origin is None else origin,
        workers=(n_workers, tokenizer_folder or run_dir),
    )


def encode_text(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, least_tokens: int = 2
) -> Iterator[Progress | Prepared]:
    """Encode a text to be scored as the split `test` of a store in a folder of the caller's.

    Raises:
        UserError: as `prepare`.
    """
    parts = [Part("test", corpus, 0, corpus.n_bytes)]
    origin = Origin.of(corpus)
    yield from _write_store(
        parts, tokenizer, folder, corpus.n_bytes, [], least_tokens, origin=origin, workers=(0, folder)
    )


def _write_store(
    parts: list[Part],
    tokenizer: Tokenizer,
    run_dir: Path,
    split_at: int,
    notices: list[str],
    least_tokens: int = 2,
    *,
    origin: Origin,
    workers: tuple[int, Path],
) -> Iterator[Progress | Prepared]:
    rules = Rules.of(parts[0].corpus, smallest_dtype(tokenizer.n_vocab - 1))
    # The vocabulary of bytes has a newline even where none comes any more.
    newline_id = None if parts[0].corpus.newlines == "drop" else tokenizer.newline_id
    _check_space(parts, tokenizer, run_dir, np.dtype(rules.dtype).itemsize)
    corpus = parts[0].corpus
    splits: dict[str, SplitInfo] = {}
    n_before = 0
    with ExitStack() as stack:
        folder = stack.enter_context(files.folder_whole(run_dir / "data"))
        hashing = stack.enter_context(origin.hash_missing())
        pool = stack.enter_context(Workers(*workers, rules)) if workers[0] else None
        encoding = Encoding(tokenizer, rules, pool)
        frequencies = np.zeros(tokenizer.n_vocab, dtype=np.int64)
        for part in parts:
            encoded = _encode_part(
                part,
                encoding,
                folder,
                frequencies if part is parts[0] and newline_id is None else None,
                # The survey of a corpus to learn from has told of it already.
                notices if part.corpus is not corpus or part.split == "test" else None,
            )
            splits[part.split] = yield from _watched(encoded, hashing, n_before)
            n_before += part.stop - part.start
            _check_length(part, splits[part.split], least_tokens, tokenizer)
        origin.hashes.update(hashing.result())
        changed: list[str] = []
        for one in {id(part.corpus): part.corpus for part in parts}.values():
            changed.extend(check_unchanged(one))
        origin.settle()
        for split, one_info in splits.items():
            if one_info.n_unknown:
                share = one_info.n_unknown / one_info.n_tokens
                notices.append(f"{split}: {share:.2%} of the tokens are unknown to the vocabulary")
        info = StoreInfo(
            n_vocab=tokenizer.n_vocab,
            dtype=rules.dtype,
            start_id=_choose_start(tokenizer, newline_id, frequencies),
            tokenizer=tokenizer.fingerprint(),
            encoding=corpus.encoding,
            corpus=origin.looks["train"].recorded(),
            sha256=origin.hashes["train"],
            split_at=split_at,
            splits=splits,
            rules=origin.rules,
            others=origin.others(),
            survey=origin.survey,
            notices=tuple(notices),
        )
        write_store_info(folder, info)
    yield Prepared(info, (*notices, *changed))


def _watched(
    encoded: Generator[Progress, None, SplitInfo], hashing: Hashing, n_before: int
) -> Generator[Progress, None, SplitInfo]:
    """Let the same bytes be hashed as they are encoded."""
    while True:
        try:
            event = next(encoded)
        except StopIteration as end:
            info: SplitInfo = end.value
            return info
        hashing.allow(n_before + event.done_bytes)
        yield event


def _encode_part(
    part: Part,
    encoding: Encoding,
    folder: Path,
    frequencies: npt.NDArray[np.int64] | None,
    notices: list[str] | None,
) -> Generator[Progress, None, SplitInfo]:
    """Write the ids of one split and, if it is held out, their counts; add its tokens to `frequencies`.

    Bytes that were no text, and a separator of documents that is nowhere, are told in `notices`.
    """
    is_counted, n_bytes, n_replaced, is_separated = part.split != "train", 0, 0, False
    total = part.stop - part.start
    has_separator = notices is not None and part.corpus.document_separator is not None

    def counted() -> Iterator[Chunk]:
        nonlocal n_replaced, is_separated
        for chunk in part.chunks(sized=is_counted):
            n_replaced += chunk.n_replaced
            is_separated |= has_separator and chunk.has_separators
            yield from cut_chunk(chunk, COUNTED_BYTES) if is_counted else (chunk,)

    yield Progress(f"encoding {part.split}", 0, total)
    with ExitStack() as stack:
        has_gaps = part.corpus.newlines == "drop"
        writer = SplitWriter(folder, part.split, is_counted=is_counted, has_gaps=has_gaps)
        stack.callback(writer.close)
        try:
            for piece, encoded in encoding.run(part, counted()):
                writer.add(encoded)
                if frequencies is not None:
                    ids = np.frombuffer(encoded.ids, np.dtype(encoding.rules.dtype).newbyteorder("<"))
                    frequencies += np.bincount(ids, minlength=len(frequencies))
                n_bytes = piece.source_bytes
                yield Progress(f"encoding {part.split}", piece.read_bytes, total)
        except OutsideVocabulary:
            _refuse_outside(part, encoding.tokenizer)
        marks = find_marks(part.corpus, part.start, part.stop)
        info = replace(writer.finish(n_bytes), n_replaced=n_replaced, marks=marks)
    if notices is not None and n_replaced:
        notices.append(told_replaced(part.corpus, n_replaced))
    if notices is not None and n_bytes and has_separator and not is_separated:
        notices.append(told_unseparated(part.corpus))
    return info if is_counted or not part.corpus.raw else replace(info, n_characters=None)


def _refuse_outside(part: Part, tokenizer: Tokenizer) -> NoReturn:
    """Say where in its file the first symbol outside the vocabulary stands: read again for it."""
    n_before = 0
    for piece in cut_units(tokenizer, part.chunks()):
        try:
            tokenizer.encode(piece.text)
        except OutsideVocabulary as error:
            offset = n_before + error.offset
            place = find_place(part.corpus, part.start, part.stop, offset, part=part.documents)
            raise error.at(*place) from None
        n_before += len(piece.text)
    raise AssertionError("the same text was outside the vocabulary before")


def _check_length(part: Part, info: SplitInfo, least_tokens: int, tokenizer: Tokenizer) -> None:
    if info.n_tokens >= least_tokens:
        return
    got = f"got {info.n_tokens} token{'s' * (info.n_tokens != 1)}, needs at least {least_tokens}"
    if part.split == "train":
        remedy = ""
        if part.stop < part.corpus.n_bytes or part.documents == "train":
            remedy = "; hold less out with --valid-fraction"
        elif tokenizer.kind in ("word", "sentencepiece") and part.corpus.n_bytes >= least_tokens:
            remedy = f" of the {tokenizer.kind} vocabulary; use --tokenizer char or byte"
        raise UserError(f"{part.corpus.name}: too short to learn from; {got}{remedy}")
    raise UserError(f"{part.corpus.name}: too short to score; {got}")


def _is_under_two_tokens(tokenizer: Tokenizer, part: Part) -> bool:
    """Encode a part that is short enough to be a single token."""
    texts, n_bytes = [], 0
    for chunk in part.chunks():
        texts.append(chunk.text)
        n_bytes += len(chunk.text)
        if n_bytes > SAMPLE_BYTES:
            return False
    return _count_tokens(tokenizer, b"".join(texts)) < 2


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
        chunk = next(part.chunks(), None)
        if chunk is not None and chunk.text:
            # Raw bytes may be the beginning of a character and no more.
            sample = chunk.text[: complete_utf8(chunk.text[:SAMPLE_BYTES])] or chunk.text
            tokens_per_byte = (
                _count_tokens(tokenizer, sample) / len(sample) * len(chunk.text) / max(chunk.source_bytes, 1)
            )
            n_bytes = part.stop - part.start
            needed += int(tokens_per_byte * n_bytes * (itemsize + (0 if part.split == "train" else 3)))
            if part.split != "train" and part.corpus.newlines == "drop":
                needed += int(n_bytes * GAP_BYTES_PER_BYTE)
    free = shutil.disk_usage(folder).free
    if needed > free:
        # A text that is only scored goes to the folder of temporary files.
        place = "with --out" if parts[0].split == "train" else "by the environment variable TMPDIR"
        raise UserError(
            f"{folder}: the disk is too full for the ids; needs about {needed / 1e6:,.1f} MB, "
            f"{free / 1e6:,.1f} MB are free; choose another place {place}"
        )


def _choose_start(tokenizer: Tokenizer, newline_id: int | None, frequencies: npt.NDArray[np.int64]) -> int:
    """Return what an empty prompt starts from.

    It is the end of the document before, where there are documents, the newline, or the most frequent token.
    """
    start = newline_id if tokenizer.document_end is None else tokenizer.document_end
    if start is not None:
        return start
    frequencies = frequencies.copy()
    frequencies[list(tokenizer.control_ids)] = -1
    return int(frequencies.argmax())
