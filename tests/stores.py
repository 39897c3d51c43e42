"""Checksums of a store, given and taken away as a stranger or an older version would."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Write a store.json with the checksum of its values."""
    values.pop("checksum", None)
    text = json.dumps(values, indent=1, sort_keys=True) + "\n"
    values["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def seal_store(run_dir: Path) -> None:
    """Give a store the checksums of its files as they are now, if it has any and can be read."""
    path = run_dir / "data" / "store.json"
    with suppress(ValueError, RecursionError):
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or "checksum" not in values:
            return
        splits = values.get("splits")
        for split, part in splits.items() if isinstance(splits, dict) else ():
            files = part.get("files") if isinstance(part, dict) else None
            for name in files if isinstance(files, dict) else ():
                with suppress(OSError, ValueError):
                    data = (path.parent / f"{split}.{name}").read_bytes()
                    files[name] = {"n_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write_sealed(path, values)


def content_of(store_json: bytes) -> bytes:
    """Return what a store.json says, but for where its files lie on the disk and when they were written."""
    values = json.loads(store_json)
    values.pop("checksum", None)
    for part in values["splits"].values():
        for file in part["files"].values():
            del file["inode"], file["mtime_ns"]
    return json.dumps(values).encode()


def unseal_store(run_dir: Path) -> None:
    """Make a store one of an older version, which had no checksums."""
    path = run_dir / "data" / "store.json"
    values = json.loads(path.read_bytes())
    del values["checksum"]
    for part in values["splits"].values():
        del part["files"]
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
