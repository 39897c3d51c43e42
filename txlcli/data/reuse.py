"""Finding the same text among the runs beside a new one, and taking their store."""

import dataclasses
import os
import shutil
import stat
import types
import typing
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from txlcli import UserError, files
from txlcli.data.damage import check_store, is_untouched
from txlcli.data.info import (
    SPLITS,
    StoreInfo,
    read_store_info,
    remedy_for,
    text_name,
    write_store_info,
)
from txlcli.data.origin import Look, Origin
from txlcli.data.store import open_counts, open_split
from txlcli.sources import Progress, Survey
from txlcli.tokenizer import Tokenizer, load_tokenizer

COPIED_BYTES = 1 << 22
MOST_BYTES = 1 << 60


class StoredRun(NamedTuple):
    """A run that has a store."""

    run_dir: Path
    info: StoreInfo


class Taken(NamedTuple):
    """A store that is now a run's own.

    Attributes:
        info: What it holds.
        tokenizer: Its vocabulary.
        is_linked: Nothing had to be copied.
        is_checked: Its files were held against their checksums.
    """

    info: StoreInfo
    tokenizer: Tokenizer
    is_linked: bool
    is_checked: bool


def stores_in(folder: Path) -> list[StoredRun]:
    """List the stores of the runs in a folder that another run may take; damaged ones are nobody's."""
    found = []
    with suppress(OSError):
        for run_dir in sorted(folder.iterdir()):
            # Quicker than to try and fail in each of the folders that are none.
            if os.path.isfile(run_dir / "data" / "store.json"):  # noqa: PTH113  # false where it is closed to us
                with suppress(UserError):
                    info = read_store_info(run_dir)
                    if info.rules:
                        found.append(StoredRun(run_dir, info))
    return found


def trusted_hash(stores: Sequence[StoredRun], look: Look) -> str | None:
    """Return the sha256 of files that were hashed before and have not changed since; None: unknown."""
    for known in stores:
        texts = [(known.info.corpus, known.info.sha256)]
        texts += [(text.sources, text.sha256) for text in known.info.others.values()]
        for sources, sha256 in texts:
            if sha256 is not None and look.is_as(sources):
                return sha256
    return None


def find_survey(stores: Sequence[StoredRun], sha256: str, rules: str, name: str) -> Survey | None:
    """Return what a pass over the same text, now called `name`, found before under the same rules."""
    for known in stores:
        survey = known.info.survey
        if known.info.sha256 == sha256 and survey is not None and survey.get("rules") == rules:
            with suppress(KeyError, TypeError, ValueError):
                found = _parse_survey(survey["found"])
                names = {text_name(known.info.corpus): name}
                told = tuple(_rename(notice, names) for notice in found.notices)
                # JSON has no order of its own.
                alphabet = dict(sorted(found.alphabet.items(), key=lambda item: (-item[1], item[0])))
                return dataclasses.replace(found, notices=told, alphabet=alphabet)
    return None


def survey_record(found: Survey, rules: str) -> dict[str, Any]:
    """Return a survey as JSON's values."""
    return {"rules": rules, "found": dataclasses.asdict(found)}


def _parse_survey(values: Any) -> Survey:
    """Check every field's type, since the file may be a stranger's."""
    hints = typing.get_type_hints(Survey)
    if set(values) != set(hints):
        raise ValueError("a survey of another version")
    found = Survey(**{name: _checked(value, hints[name]) for name, value in values.items()})
    numbers = [value for value in vars(found).values() if type(value) is int] + [*found.alphabet.values()]
    if not all(0 <= number <= MOST_BYTES for number in numbers) or found.n_bytes < max(
        found.split_at, found.n_valid_bytes
    ):
        raise ValueError("counts that cannot be")
    if not all(len(character) == 1 and not "\ud800" <= character < "\ue000" for character in found.alphabet):
        raise ValueError("characters that are none")
    return found


def _checked(value: Any, hint: Any) -> Any:
    """Return a value of JSON in the type that an annotation names.

    Raises:
        TypeError: it is of another.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in arguments:
            return None
        (hint,) = (one for one in arguments if one is not types.NoneType)
        return _checked(value, hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_checked(one, arguments[0]) for one in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {_checked(key, arguments[0]): _checked(one, arguments[1]) for key, one in value.items()}
    if origin is None and type(value) is hint:
        return value
    raise TypeError(f"{value!r:.40} is no {hint}")


def find_store(stores: Sequence[StoredRun], origin: Origin) -> StoredRun | None:
    """Return a store that holds what this text would become; its rules and all hashes are known.

    One whose files nobody has touched is taken rather than others.
    """
    if None in origin.hashes.values():
        return None  # a file changed as it was read
    others = {name: value for name, value in origin.hashes.items() if name != "train"}
    found = None
    for known in with_rules(stores, origin.rules):
        theirs = {name: text.sha256 for name, text in known.info.others.items()}
        if known.info.sha256 == origin.hashes["train"] and theirs == others:
            found = found or known
            if is_untouched(known.run_dir, known.info, SPLITS):
                return known
    return found


def with_rules(stores: Sequence[StoredRun], rules: str) -> list[StoredRun]:
    """Return the stores made under the same settings, of whatever text."""
    return [known for known in stores if known.info.rules == rules]


def take_store(
    known: StoredRun, origin: Origin, run_dir: Path, *, is_checked: bool
) -> Iterator[Progress | Taken]:
    """Give a run the store and the tokenizer of another; the last event is `Taken`.

    The store's files are hard links; where links cannot be, copies. The other run may be a stranger's: a link
    in place of a file, which could lead to anything of the user's, is refused.

    Args:
        known: The other run.
        origin: What is known of this run's texts.
        run_dir: This run.
        is_checked: All files are held against their checksums, also where nobody has touched them. Those of
            the test text, which no training looks at, always are.

    Raises:
        UserError: the other's are damaged, or the disk is too small.
    """
    data, is_linked = known.run_dir / "data", True
    try:
        names, is_checked = yield from _check(known, is_checked)
    except UserError as error:  # the text is prepared anew, so there is nothing to be done about it
        raise UserError(str(error).removesuffix(f"; {remedy_for(data / 'store.json')}")) from error
    tokenizer = load_tokenizer(known.run_dir)
    if tokenizer.fingerprint() != known.info.tokenizer:
        raise UserError(f"{data}: encoded with another tokenizer than the one beside it")
    tokenizer.save(run_dir)
    info = _renamed(known.info, origin)
    with files.folder_whole(run_dir / "data") as folder:
        for name in names:
            is_linked &= yield from _take(data / name, folder / name)
        if is_checked or not is_linked:
            info = _restamped(info, folder)
        write_store_info(folder, info)
    yield Taken(info, tokenizer, is_linked, is_checked)


def _check(known: StoredRun, is_checked: bool) -> Generator[Progress, None, tuple[list[str], bool]]:
    """Return the names of a store's files, which look as they were written, and whether all surely are.

    Raises:
        UserError: one is not as it was written.
    """
    names = []
    for split in SPLITS:
        if split in known.info.splits:
            # Opening compares their sizes with what the store says.
            open_split(known.run_dir, split).close()
            names.append(f"{split}.ids")
            if known.info.splits[split].counts_dtype is not None:
                with open_counts(known.run_dir, split) as counts:
                    names.append(counts.path.name)
                    names += [] if counts.left_out is None else [counts.left_out.name]
    is_checked |= not is_untouched(known.run_dir, known.info, SPLITS)
    yield from check_store(known.run_dir, known.info, SPLITS if is_checked else ("test",))
    return names, is_checked


def _take(source: Path, target: Path) -> Generator[Progress, None, bool]:
    """Link a file, or copy it; say which.

    Raises:
        UserError: it is a link to a file; or the disk is too small for a copy.
    """
    if not stat.S_ISREG(source.lstat().st_mode):
        raise UserError(f"{source}: is a link, not a file")
    try:
        os.link(source, target)
    except OSError:
        pass  # another file system, or one without links, or too many of them: what a copy cannot do it says
    else:
        return True
    n_bytes = source.stat().st_size
    free = shutil.disk_usage(target.parent).free
    if n_bytes > free:
        raise UserError(
            f"{target.parent}: the disk is too full for the ids; needs {n_bytes / 1e6:,.1f} MB, "
            f"{free / 1e6:,.1f} MB are free; choose another place with --out"
        )
    done = 0
    with source.open("rb") as file, target.open("xb") as copy:
        while block := file.read(COPIED_BYTES):
            copy.write(block)
            done += len(block)
            yield Progress("copying the ids", done, n_bytes)
    return False


def _renamed(info: StoreInfo, origin: Origin) -> StoreInfo:
    """Call the texts of a store as the user calls them now."""
    sources = {"train": info.corpus} | {name: text.sources for name, text in info.others.items()}
    names = {text_name(sources[name]): corpus.name for name, corpus in origin.corpora.items()}
    return dataclasses.replace(
        info,
        corpus=origin.looks["train"].recorded(),
        others=origin.others(),
        survey=origin.survey,
        notices=tuple(_rename(notice, names) for notice in info.notices),
    )


def _restamped(info: StoreInfo, folder: Path) -> StoreInfo:
    """Record the inodes and times that the files have here, so that they are known as untouched later."""
    splits = {
        split: dataclasses.replace(
            part, files={name: one.at(folder / f"{split}.{name}") for name, one in part.files.items()}
        )
        for split, part in info.splits.items()
    }
    return dataclasses.replace(info, splits=splits)


def _rename(notice: str, names: Mapping[str, str]) -> str:
    """Replace the name that a notice begins with."""
    for old, new in names.items():
        if notice.startswith(f"{old}: "):
            return new + notice.removeprefix(old)
    return notice
