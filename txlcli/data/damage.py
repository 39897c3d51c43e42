"""Whether the files of a store are those that were written.

Their sha256 says so for sure, and takes a second for each gigabyte. Files whose size, inode and modification
time are as recorded are therefore used at once, and hashed in a thread beside the first steps of a training,
which saves nothing of what it learns before that is done. All others are hashed first. Files that turn out
to be damaged get the time of now, so that from then on they are hashed first, by whoever shares them.
"""

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from txlcli import UserError, files
from txlcli.checksums import check_written
from txlcli.data.info import FileInfo, Split, StoreInfo, remedy_for, telling_remedy
from txlcli.sources import Progress

CHECKING = "checking the ids"

# Fewer bytes are hashed within a moment, of which nobody needs to be told.
WATCHED_BYTES = 1 << 26


def check_store(run_dir: Path, info: StoreInfo, splits: Sequence[Split]) -> Generator[Progress, None, None]:
    """Hold the files of some splits of a run against their checksums; one that is not held is passed over.

    A store of an older version has none: of its files no more is known than their sizes.

    Raises:
        UserError: one of them is gone or damaged; the message names it.
    """
    written = _written(run_dir, info, splits)
    done, total = 0, sum(file.n_bytes for file in written.values())
    for path, file in written.items():
        with telling_remedy(path):
            try:
                for n_read in check_written(path, file.n_bytes, file.sha256, remedy_for(path)):
                    done += n_read
                    if total >= WATCHED_BYTES:
                        yield Progress(CHECKING, done, total)
            except UserError:
                distrust(path)
                raise


def distrust(path: Path) -> None:
    """Let a damaged file pass for untouched no longer, as far as this user may."""
    with suppress(OSError, NotImplementedError):
        os.utime(path, follow_symlinks=False)


def is_untouched(run_dir: Path, info: StoreInfo, splits: Sequence[Split]) -> bool:
    """Say whether the files of some splits look as they did when they were written.

    Of a store of an older version nobody knows.
    """
    written = _written(run_dir, info, splits)
    return bool(written) and all(_is_untouched(path, file) for path, file in written.items())


class CheckBeside:
    """Does `check_store` in a thread, beside what uses the files already; it ends with the `with` block.

    Attributes:
        n_bytes: What there is to hash.
        n_read: The bytes hashed so far.
    """

    def __init__(self, run_dir: Path, info: StoreInfo, splits: Sequence[Split]) -> None:
        self.n_bytes = sum(file.n_bytes for file in _written(run_dir, info, splits).values())
        self.n_read = 0
        self._checking = check_store(run_dir, info, splits)
        self._fault: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._check, name=CHECKING, daemon=True)

    def __enter__(self) -> "CheckBeside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def is_done(self, timeout_s: float = 0) -> bool:
        """Say whether all files were found as they should be, within some seconds.

        Raises:
            UserError: as `check_store`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._fault is not None:
            raise self._fault
        return True

    def _check(self) -> None:
        try:
            with closing(self._checking) as checking:
                for done in checking:
                    self.n_read = done.done_bytes
                    if self._is_over:
                        return
        except BaseException as error:
            self._fault = error


def _written(run_dir: Path, info: StoreInfo, splits: Sequence[Split]) -> dict[Path, FileInfo]:
    """Return what is recorded of the files of some splits."""
    return {
        run_dir / "data" / f"{split}.{name}": file
        for split in splits
        if split in info.splits
        for name, file in info.splits[split].files.items()
    }


def _is_untouched(path: Path, file: FileInfo) -> bool:
    """Say whether a file looks as it did when it was written; one that cannot be looked at does not."""
    try:
        status = path.lstat()
    except OSError:
        return False
    now = (status.st_size, files.inode_of(status), status.st_mtime_ns)
    return file.inode is not None and now == (file.n_bytes, file.inode, file.mtime_ns)
