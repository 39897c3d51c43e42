"""Whether the files of a store are those that were written."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from txlcli.checksums import check_written
from txlcli.data.info import Split, StoreInfo, remedy_for, telling_remedy
from txlcli.sources import Progress

# Fewer bytes are hashed within a moment, of which nobody needs to be told.
WATCHED_BYTES = 1 << 26


def check_store(run_dir: Path, info: StoreInfo, splits: Sequence[Split]) -> Iterator[Progress]:
    """Hold the files of some splits of a run against their checksums; one that is not held is passed over.

    A store of an older version has none: of its files no more is known than their sizes.

    Raises:
        UserError: one of them is gone or damaged; the message names it.
    """
    written = {
        run_dir / "data" / f"{split}.{name}": file
        for split in splits
        if split in info.splits
        for name, file in info.splits[split].files.items()
    }
    done, total = 0, sum(file.n_bytes for file in written.values())
    for path, file in written.items():
        with telling_remedy(path):
            for n_read in check_written(path, file.n_bytes, file.sha256, remedy_for(path)):
                done += n_read
                if total >= WATCHED_BYTES:
                    yield Progress("checking the ids", done, total)
