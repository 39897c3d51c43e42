"""What a store of ids holds, as `store.json` says it."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from txlcli import UserError, files
from txlcli.checksums import checksum

Split: TypeAlias = Literal["train", "valid", "test"]

SPLITS: tuple[Split, ...] = ("train", "valid", "test")

LARGEST_STORE_JSON = 1 << 26

_MOST_VALUES = 1 << 22
_LATEST_NS = 1 << 63


class DamagedStore(UserError):
    """A file of a store is not what was written; `fault` is the message without what to do."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(f"{fault}; {remedy}")
        self.fault = fault


@dataclass(frozen=True)
class FileInfo:
    """A file as it was written.

    `inode` and `mtime_ns` tell that nobody has touched it since, and nothing of what it holds; None in stores
    of before, and where the system has no inodes.
    """

    n_bytes: int
    sha256: str
    inode: int | None = field(default=None, compare=False)
    mtime_ns: int | None = field(default=None, compare=False)

    def at(self, path: Path) -> "FileInfo":
        """Return what is known of the same file where it lies now."""
        status = path.stat()
        inode = files.inode_of(status)
        return dataclasses.replace(self, inode=inode, mtime_ns=None if inode is None else status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """What one split holds; `n_bytes` in the source's own encoding, None: unknown.

    `n_replaced` counts the bytes that are no text in that encoding and are read as U+FFFD, where every n-th
    document is held out also some of those around it. `marks` are the byte-order marks of its files, which
    are no part of the text: how many bytes stand before each, marks left out, and how many it has itself.
    Both are None in stores of before, which do not tell.
    `files` are those of the split by the ends of their names, `ids` among them; empty in stores that were
    written without checksums.
    """

    n_tokens: int
    n_bytes: int
    n_characters: int | None
    n_words: int | None
    n_unknown: int
    counts_dtype: str | None
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    n_replaced: int | None = None
    marks: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """One file that the text came from, as it was then; the path as the user gave it.

    `n_bytes` is its size on the disk. `inode` and `ctime_ns` are None where they prove nothing: in stores
    that were written without them, and where the file had changed only just before it was read, so that the
    clock of the file system may not tell a further change from that one.
    """

    path: str
    n_bytes: int
    mtime_ns: int
    inode: int | None = None
    ctime_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextInfo:
    """The files of one text, and the sha256 of their bytes end to end; None: they changed meanwhile."""

    sources: tuple[SourceInfo, ...]
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """The contents of `store.json`.

    `start_id` is what an empty prompt starts from: the end of a document, the newline, or the most frequent
    token of the training text. `tokenizer` is the fingerprint of the one that made the ids. `split_at` is the
    byte of the corpus at which the held-out text begins, `sha256` that of the whole corpus; None: its files
    changed meanwhile.

    The rest lets another run take this store as its own (see `reuse`): `rules` is the hash of all settings
    that shape tokenizer and ids, empty where nobody may take it; `others` the texts of other files, by split;
    `survey` what one pass over the corpus found; `notices` what a user was told about the text.
    """

    n_vocab: int
    dtype: str
    start_id: int
    tokenizer: str
    encoding: str
    corpus: tuple[SourceInfo, ...]
    sha256: str | None
    split_at: int
    splits: Mapping[str, SplitInfo]
    rules: str = ""
    others: Mapping[str, TextInfo] = field(default_factory=dict)
    survey: Mapping[str, Any] | None = None  # Any: JSON's values, checked by whoever takes them
    notices: tuple[str, ...] = ()


def read_store_info(run_dir: Path) -> StoreInfo:
    """Read what the store of a run holds.

    Raises:
        UserError: there is no store, or `store.json` is damaged; the message names it.
    """
    path = run_dir / "data" / "store.json"
    with telling_remedy(path):
        data = files.read_bounded(path, LARGEST_STORE_JSON)
        try:
            values = files.load_json(data, _MOST_VALUES)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged, not valid JSON; {files.json_fault(error)}") from error
        try:
            return _parse_store_info(_unsealed(values))
        except KeyError as error:
            raise UserError(f"{path}: damaged; has no `{error.args[0]}`") from error
        except ValueError as error:
            raise UserError(f"{path}: damaged; {error}") from error
        except (TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged; its values have another form than a store's") from error


def write_store_info(folder: Path, info: StoreInfo) -> None:
    """Write `store.json` into the folder of the store."""
    values = dataclasses.asdict(info)
    data = _dump({**values, "checksum": checksum(_dump(values))})
    (folder / "store.json").write_text(data.decode(), encoding="utf-8")


def _dump(values: Mapping[str, Any]) -> bytes:
    # In ASCII, since names of files may hold what UTF-8 cannot.
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def _unsealed(values: Any) -> dict[str, Any]:
    """Return the values of `store.json` without the checksum, which fits them; a store of before has none."""
    if not isinstance(values, dict):
        raise ValueError(f"must hold a JSON object, got {type(values).__name__}")
    expected = values.pop("checksum", None)
    is_old = expected is None and not any("files" in part for part in values["splits"].values())
    if not is_old and checksum(_dump(values)) != expected:
        raise ValueError("its checksum does not fit")
    return values


def text_name(sources: Sequence[SourceInfo]) -> str:
    """Return what messages called a text: its first file, and how many more there are."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return "".join(source.path for source in sources[:1]) + more


def remedy_for(path: Path) -> str:
    """Say what to do about a damaged file of a run's store."""
    run_dir = path.parent.parent
    stdin = run_dir / "stdin.txt"
    corpus = f"{files.shell_name(stdin)} " if stdin.exists() else ""  # it cannot be piped in twice
    config = files.shell_name(run_dir / "config.yaml")
    return f"put it back, or repeat the run from its texts: txl train {corpus}-c {config}"


@contextmanager
def telling_remedy(path: Path) -> Iterator[None]:
    """End each error of the block about this file with what to do; one that cannot be read is no damage."""
    try:
        yield
    except UserError as error:
        remedy = remedy_for(path)
        fault = str(error).removesuffix(f"; {remedy}")
        if isinstance(error.__cause__, OSError):
            raise UserError(f"{fault}; {remedy}") from error.__cause__
        raise DamagedStore(fault, remedy) from error


def _parse_store_info(data: Any) -> StoreInfo:  # Any: JSON of unknown shape, checked field by field
    """Check every field's type and bound; the errors that this raises name the field."""
    n_vocab = _integer(data, "n_vocab", 1, 1 << 31)
    splits: dict[str, SplitInfo] = {}
    for name in SPLITS:
        if name in data["splits"]:
            part = data["splits"][name]
            splits[name] = SplitInfo(
                n_tokens=_integer(part, "n_tokens"),
                n_bytes=_integer(part, "n_bytes"),
                n_characters=_integer_or_none(part, "n_characters"),
                n_words=_integer_or_none(part, "n_words"),
                n_unknown=_integer(part, "n_unknown"),
                counts_dtype=None if part["counts_dtype"] is None else _dtype(part, "counts_dtype"),
                files=_files(part),
                n_replaced=_integer_or_none({"n_replaced": None, **part}, "n_replaced"),
                marks=_marks(part),
            )
    others = {
        split: TextInfo(sources=_sources(one["sources"]), sha256=_text_or_none(one, "sha256"))
        for split, one in data.get("others", {}).items()
    }
    survey = data.get("survey")
    if not isinstance(survey, dict | None):
        raise ValueError("`survey` is no object")
    return StoreInfo(
        n_vocab=n_vocab,
        dtype=_dtype(data, "dtype"),
        start_id=_integer(data, "start_id", 0, n_vocab - 1),
        tokenizer=_text(data, "tokenizer"),
        encoding=_text(data, "encoding"),
        corpus=_sources(data["corpus"]),
        sha256=_text_or_none(data, "sha256"),
        split_at=_integer(data, "split_at"),
        splits=splits,
        rules=_text({"rules": "", **data}, "rules"),
        others=others,
        survey=survey,
        notices=tuple(_text({"notices": text}, "notices") for text in data.get("notices", ())),
    )


def _files(part: Any) -> dict[str, FileInfo]:
    """Return what a split says of its files, which is all of them or, in a store of before, nothing."""
    if "files" not in part:
        return {}
    expected = {"ids"} if part["counts_dtype"] is None else {"ids", "counts"}
    if set(part["files"]) - {"left_out"} != expected:
        raise ValueError("`files` are not those of the split")
    return {
        name: FileInfo(
            n_bytes=_integer(one, "n_bytes"),
            sha256=_text(one, "sha256"),
            inode=_inode(one),
            mtime_ns=_time_or_none(one, "mtime_ns"),
        )
        for name, one in part["files"].items()
    }


def _marks(part: Any) -> tuple[tuple[int, int], ...] | None:
    if part.get("marks") is None:
        return None
    marks = [dict(zip(("place", "size"), one, strict=True)) for one in part["marks"]]
    return tuple((_integer(one, "place"), _integer(one, "size", 1, 4)) for one in marks)


def _sources(data: Any) -> tuple[SourceInfo, ...]:
    return tuple(
        SourceInfo(
            path=_text(one, "path"),
            n_bytes=_integer(one, "n_bytes"),
            mtime_ns=_integer(one, "mtime_ns", -_LATEST_NS, _LATEST_NS),
            inode=_inode(one),
            ctime_ns=_time_or_none(one, "ctime_ns"),
        )
        for one in data
    )


def _inode(data: Any) -> int | None:
    """Return the inode of a file; a store of before has none."""
    return _integer_or_none({"inode": None, **data}, "inode", 1 << 64)


def _time_or_none(data: Any, key: str) -> int | None:
    """Return a time of a file; a store of before may have none."""
    return None if data.get(key) is None else _integer(data, key, -_LATEST_NS, _LATEST_NS)


def _integer(data: Any, key: str, least: int = 0, most: int = 1 << 60) -> int:
    value = data[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"`{key}` is {value!r:.40}, not a number from {least} to {most}")
    return value


def _integer_or_none(data: Any, key: str, most: int = 1 << 60) -> int | None:
    return None if data[key] is None else _integer(data, key, most=most)


def _text(data: Any, key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is {value!r:.40}, not a text")
    return value


def _text_or_none(data: Any, key: str) -> str | None:
    return None if data[key] is None else _text(data, key)


def _dtype(data: Any, key: str) -> str:
    value = _text(data, key)
    if value not in ("uint8", "uint16", "uint32"):
        raise ValueError(f"`{key}` is {value!r:.40}, not uint8, uint16 or uint32")
    return value
