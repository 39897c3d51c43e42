"""How a run comes by its store: prepared on all processors, taken from a run beside it, begun again."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import write_sealed
from tests.test_train import TINY, make_run, of_kind, train_run, write_corpus
from txlcli import UserError
from txlcli.config import Sourced, build, from_flags, read_settings
from txlcli.data import (
    Prepared,
    StoreInfo,
    encode_text,
    open_split,
    origin,
    prepare,
    read_store_info,
    reuse,
    store,
    workers,
)
from txlcli.data.encoding import Piece, Rules, encode
from txlcli.data.workers import Workers, worker_count
from txlcli.run import Run, describe_run, read_asked
from txlcli.sources import blocks, find_corpus
from txlcli.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from txlcli.train import Event, Finished, Notice, Progress, Ready, begin, evaluating, resume, train

PACKAGE_PARENT = Path(store.__file__).parents[2]
HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 3)


@pytest.fixture
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the files of a test, which are a moment old, for files that have long been as they are."""
    monkeypatch.setattr(origin, "CLOCK_NS", -HOUR_NS)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def store_of(run_dir: Path) -> tuple[dict[str, bytes], StoreInfo]:
    """Return what a store holds, whatever the inodes and times of its files are."""
    files = files_of(run_dir / "data")
    del files["store.json"]
    return files, read_store_info(run_dir)


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in of_kind(events, Notice)]


def begun(folder: Path, name: str, **flags: object) -> tuple[Run, list[str]]:
    """Prepare a run of `words.txt`, and return it with what was told."""
    corpus = folder / "words.txt"
    events = list(begin(from_flags({**TINY, "corpus": (str(corpus),), **flags}), out=folder / name))
    ready = events[-1]
    assert isinstance(ready, Ready)
    return ready.run, notices(events)


def inodes(run: Run) -> dict[str, int]:
    shared = ("train.ids", "valid.ids", "valid.counts")
    return {name: (run.data_folder / name).stat().st_ino for name in shared}


# Workers


def tokenizer_of(kind: str, text: bytes, folder: Path) -> Tokenizer:
    tokenizer = build_tokenizer(
        kind,
        vocab_size={"sentencepiece": 400, "word": 60}.get(kind),
        text=lambda: iter([text]),
        n_bytes=len(text),
        seed=0,
        newlines="eos" if kind == "word" else "keep",
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    return tokenizer


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize("kind", ["word", "sentencepiece"])
def test_the_store_is_the_same_whatever_the_chunks_and_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text = ("the quick brown fox\u3000jumps, 紅樓夢 🐙\r\n" * 300 + "x" * 9000 + "\n\n  one ").encode() * 2
    (tmp_path / "a.txt").write_bytes(text)
    newlines: Any = "eos" if kind == "word" else "keep"
    corpus = find_corpus([str(tmp_path / "a.txt")], newlines=newlines)
    tokenizer = tokenizer_of(kind, text, tmp_path / "tokenizer")
    monkeypatch.setattr(workers, "LEAST_BYTES", 0)
    stores = []
    for chunk, n_processors in ((1 << 20, 1), (997, 1), (7000, 2), (50_000, 3)):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", chunk)
        run_dir = tmp_path / f"{chunk}-{n_processors}"
        run_dir.mkdir()
        events = prepare(
            corpus,
            tokenizer,
            run_dir,
            split_at=20_000,
            tokenizer_folder=tmp_path / "tokenizer",
            n_processors=n_processors,
        )
        *_, last = events
        assert isinstance(last, Prepared)
        stores.append(store_of(run_dir))
        assert [path.name for path in run_dir.iterdir()] == ["data"]
    assert all(one == stores[0] for one in stores[1:])


def test_what_workers_are_worth(tmp_path: Path) -> None:
    symbols, words = (tokenizer_of(kind, b"a b\n", tmp_path / kind) for kind in ("char", "word"))
    assert worker_count(symbols, 1 << 40, 64) == 0
    assert [worker_count(words, n_bytes, 64) for n_bytes in (1 << 20, 1 << 30)] == [0, 64]
    assert worker_count(words, 1 << 30, 1) == 0
    assert worker_count(words, 1 << 30) == (
        len(os.sched_getaffinity(0)) if len(os.sched_getaffinity(0)) > 1 else 0
    )


def piece_of(text: bytes) -> Piece:
    return Piece(text, following=b"\n", source_bytes=len(text), read_bytes=len(text))


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_does_not_load_torch_and_ends_with_the_block(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("word", b"a b\n", tmp_path / "tokenizer")
    rules = Rules("uint8", is_text=True, has_underscores=False, n_separator=0)
    with Workers(1, tmp_path / "tokenizer", rules) as pool:
        (encoded,) = pool.encode(iter([piece_of(b"a b b\n")]), is_counted=True)
        assert encoded[1].ids == bytes(tokenizer.encode(b"a b b\n").tolist())
        (process,) = pool.process_ids
        maps = Path(f"/proc/{process}/maps")
        if maps.exists():
            loaded = maps.read_text()
            assert "numpy" in loaded
            assert "torch" not in loaded
    assert not is_running(process)


def test_a_worker_makes_of_a_piece_what_this_process_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("char", "aé\n".encode(), tmp_path / "tokenizer")
    rules = Rules("uint16", is_text=True, has_underscores=True, n_separator=2)
    text = "aé_b aé".encode()
    pieces = [
        piece_of(text),
        piece_of(text)._replace(sizes=np.arange(len(text), dtype=np.uint32) + 300),
        piece_of(text)._replace(left_out=np.arange(len(text)) % 3 * [1, 0, 0, 1, 1, 1, 1, 0, 0]),
        piece_of(text)._replace(document_ends=np.array([3, 9]), end_sizes=np.array([2, 0])),
        piece_of(b"\xff"),
        piece_of(b""),
    ]
    with Workers(2, tmp_path / "tokenizer", rules) as pool:
        for is_counted in (True, False):
            got = [encoded for _, encoded in pool.encode(iter(pieces), is_counted=is_counted)]
            for piece, one in zip(pieces, got, strict=True):
                here = encode(tokenizer, piece, rules, is_counted=is_counted)
                for name, value in here._asdict().items():
                    assert np.array_equal(getattr(one, name), value), name


def test_a_worker_that_is_killed_ends_the_preparation_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEAST_BYTES", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 50)
    (tmp_path / "a.txt").write_bytes(b"a b b a\n" * 100)
    corpus = find_corpus([str(tmp_path / "a.txt")])
    tokenizer = tokenizer_of("word", b"a b\n", tmp_path / "tokenizer")
    started: list[Workers] = []
    real = Workers.__enter__
    monkeypatch.setattr(Workers, "__enter__", lambda pool: started.append(pool) or real(pool))
    (tmp_path / "run").mkdir()
    events = prepare(
        corpus,
        tokenizer,
        tmp_path / "run",
        split_at=800,
        tokenizer_folder=tmp_path / "tokenizer",
        n_processors=2,
    )
    next(events)
    os.kill(started[0].process_ids[1], signal.SIGKILL)
    with pytest.raises(UserError) as caught:
        list(events)
    assert str(caught.value) == (
        "encoding: one of 2 processes was killed by signal 9; too little memory may be the cause; "
        "start again, with --threads 1 in one process"
    )
    assert list((tmp_path / "run").iterdir()) == []


def test_what_fails_in_a_worker_keeps_its_traceback_and_a_word_outside_its_place(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    rules = Rules("uint8", is_text=True, has_underscores=False, n_separator=0)
    with (
        Workers(1, tmp_path / "tokenizer", rules) as pool,
        pytest.raises(RuntimeError, match=r"(?s)process that encodes text failed:\nTraceback .*damaged"),
    ):
        list(pool.encode(iter([piece_of(b"a")] * 5), is_counted=False))


TRAIN = """
import sys, time
sys.path.insert(0, {path!r})
from txlcli.data import workers, writing
from txlcli.sources import blocks
workers.LEAST_BYTES, blocks.BLOCK_BYTES = 0, 1000
add = writing.SplitWriter.add
def slow(writer, encoded):
    time.sleep(0.05)
    add(writer, encoded)
writing.SplitWriter.add = slow
if __name__ == "__main__":
    from txlcli.cli import main
    main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_to_all_processes_ends_them_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "slow.py").write_text(TRAIN.format(path=str(PACKAGE_PARENT)))
    write_corpus(tmp_path, 60_000)
    line = ["train", "words.txt", "--tokenizer", "word", "--steps", "2", "--device", "cpu", "--threads", "2"]
    with subprocess.Popen(
        [sys.executable, "slow.py", *line], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for told in process.stderr:
            if told.startswith("encoding"):
                break
        time.sleep(0.2)
        # As a terminal does: to the whole group, workers among it.
        os.killpg(process.pid, number)
        rest = process.stderr.read()
    assert rest == "stopping, saving what there is; once more to stop at once\n"
    assert process.returncode == code
    assert not (tmp_path / "runs").exists()
    for _ in range(100):  # what multiprocessing runs beside workers ends a moment later
        if not alive_in_group(process.pid):
            return
        time.sleep(0.05)
    raise AssertionError(alive_in_group(process.pid))


def alive_in_group(group: int) -> list[str]:
    """Name the processes of a group that are no zombies, which wait for somebody to look at them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, _, group_id = rest.split()[:3]
        if int(group_id) == group and state != "Z":
            found.append(name)
    return found


# Stores of runs beside


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize("kind", ["byte", "char", "word", "sentencepiece"])
def test_a_text_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write_corpus(tmp_path, 3000)
    flags = {"tokenizer": kind, "vocab_size": 300 if kind == "sentencepiece" else None}
    first, told = begun(tmp_path, "first", **flags)
    assert not [text for text in told if "prepared before" in text]

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("this was done before")

    with monkeypatch.context() as patch:
        for name in ("texts.survey", "ids.build_tokenizer", "ids.prepare"):
            patch.setattr(f"txlcli.train.{name}", fail)
        patch.setattr(origin.Hashing, "_hash", fail)
        second, told_again = begun(tmp_path, "second", **flags, n_layer=1)
    assert told_again == [
        *[text for text in told if "unknown" not in text and "asked for" not in text],
        f"{tmp_path}/words.txt: prepared before; vocabulary and ids are those of {tmp_path}/first, "
        "by hard links",
        *[text for text in told if "unknown" in text],
        *[text for text in told if "asked for" in text],
    ]
    assert inodes(first) == inodes(second)
    assert (first.folder / "tokenizer.json").read_bytes() == (second.folder / "tokenizer.json").read_bytes()
    assert read_store_info(first.folder) == read_store_info(second.folder)
    # Neither depends on the other, and a third may take it from either.
    shutil.rmtree(first.folder)
    ready = begun(tmp_path, "third", **flags)
    assert inodes(ready[0]) == inodes(second)
    events = list(train(second, build(read_settings(second.config_path))))
    assert isinstance(events[-1], Finished)


@pytest.mark.usefixtures("_settled")
def test_text_that_was_replaced_behind_its_time_stamp_is_used(tmp_path: Path) -> None:
    path = write_corpus(tmp_path)
    before = path.stat()
    begun(tmp_path, "first")
    text = path.read_bytes()
    path.write_bytes(text[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    run, told = begun(tmp_path, "second")
    assert told == []
    with open_split(run.folder, "train") as ids:
        assert bytes(ids.read(0, ids.n_tokens).tolist()) == text[::-1][: ids.n_tokens]
    # The old text again: known by its content alone.
    path.write_bytes(text)
    run, told = begun(tmp_path, "third")
    assert told == [
        f"{path}: prepared before; vocabulary and ids are those of {tmp_path}/first, by hard links"
    ]


def test_a_file_changed_just_before_it_was_read_proves_nothing(tmp_path: Path) -> None:
    """Within one tick of the file system's clock a second change leaves the times of the first."""
    write_corpus(tmp_path)
    run, _ = begun(tmp_path, "first")
    (source,) = read_store_info(run.folder).corpus
    assert (source.inode, source.ctime_ns) == (None, None)
    assert read_store_info(run.folder).sha256 is not None


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize("kind", ["byte", "char"])
def test_a_text_is_known_by_its_content_whatever_its_name(tmp_path: Path, kind: str) -> None:
    path = write_corpus(tmp_path)
    begun(tmp_path, "first", tokenizer=kind)
    copy = path.with_name("copy.txt")
    shutil.copy(path, copy)
    run, told = begun(tmp_path, "second", tokenizer=kind, corpus=(str(copy),))
    assert told[-1].startswith(f"{copy}: prepared before")
    assert [one.path for one in read_store_info(run.folder).corpus] == [str(copy)]
    os.utime(copy)
    _, told = begun(tmp_path, "third", tokenizer=kind, corpus=(str(copy),))
    assert told[-1].startswith(f"{copy}: prepared before")
    with copy.open("ab") as file:
        file.write(b"more")
    _, told = begun(tmp_path, "fourth", tokenizer=kind, corpus=(str(copy),))
    assert not [text for text in told if "prepared before" in text]


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": "char", "vocab_size": None},
        {"vocab_size": 50},
        {"valid_fraction": 0.2},
        {"valid": "words.txt"},
        {"test": "words.txt"},
        {"newlines": "eos"},
        {"encoding": "latin-1"},
        {"encoding_errors": "replace"},
        {"corpus": ("words.txt", "copy.txt")},
    ],
)
def test_other_settings_of_text_and_vocabulary_make_another_store(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_corpus(tmp_path)
    shutil.copy(path, path.with_name("copy.txt"))
    flags: dict[str, Any] = {"tokenizer": "word", "vocab_size": 60, "corpus": ("words.txt",)}
    begun(tmp_path, "first", **flags)
    changed = {**flags, **changes}
    for name in ("second", "third"):
        _, told = begun(tmp_path, name, **changed)
        assert any("prepared before" in text for text in told) == (name == "third"), told
    assert "those of " + str(tmp_path / "second") in " ".join(told)


@pytest.mark.usefixtures("_settled")
def test_the_seed_makes_another_store_only_where_it_chooses_what_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, 3000)
    flags = {"tokenizer": "sentencepiece", "vocab_size": 300}
    begun(tmp_path, "first", **flags)
    assert "prepared before" in " ".join(begun(tmp_path, "second", **flags, seed=1)[1])
    monkeypatch.setattr("txlcli.train.ids.sampled_bytes", lambda kind, newlines: 1000)
    begun(tmp_path, "third", **flags, seed=1)
    assert not [text for text in begun(tmp_path, "fourth", **flags, seed=2)[1] if "prepared before" in text]


@pytest.mark.usefixtures("_settled")
def test_held_out_files_are_compared_too(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    valid = tmp_path / "valid.txt"
    valid.write_text("the lazy dogs jump over more foxes\n")
    begun(tmp_path, "first", valid=str(valid))
    assert "prepared before" in begun(tmp_path, "second", valid=str(valid))[1][-1]
    valid.write_text("the lazy dogs jump over more oxen.\n")
    assert begun(tmp_path, "third", valid=str(valid))[1] == []


@pytest.mark.usefixtures("_settled")
def test_where_links_cannot_be_the_store_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    first, _ = begun(tmp_path, "first")

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    second, told = begun(tmp_path, "second")
    assert told[-1].endswith(f"those of {tmp_path}/first, as copies")
    assert not set(inodes(first).values()) & set(inodes(second).values())
    assert store_of(first.folder) == store_of(second.folder)
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(reuse.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"third: the disk is too full for the ids; needs about 0\.0 MB"):
        begun(tmp_path, "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize("name", ["data/train.ids", "data/valid.counts", "tokenizer.json", "data/store.json"])
def test_a_damaged_store_beside_is_not_taken(tmp_path: Path, name: str) -> None:
    write_corpus(tmp_path)
    first, _ = begun(tmp_path, "first", tokenizer="char")
    whole = files_of(first.data_folder)
    path = first.folder / name
    path.write_bytes(path.read_bytes()[:-2])
    second, told = begun(tmp_path, "second", tokenizer="char")
    del whole["store.json"]
    assert files_of(second.data_folder).items() > whole.items()
    assert load_tokenizer(second.folder).n_vocab > 256
    if name == "data/store.json":  # then it is no store
        assert told == []
    else:
        (line,) = told
        assert line.startswith(
            f"{first.folder}: has prepared the same text, but it cannot be taken: {path}: damaged"
        )


def test_a_store_written_before_others_could_take_it_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path).run
    path = run.data_folder / "store.json"
    values = json.loads(path.read_text())
    for name in ("rules", "others", "survey", "notices", "checksum"):
        del values[name]
    for part in values["splits"].values():
        del part["files"]
    for source in values["corpus"]:
        del source["inode"], source["ctime_ns"]
    path.write_text(json.dumps(values))
    info = read_store_info(run.folder)
    assert isinstance(info, StoreInfo)
    assert (info.rules, info.others, info.survey, info.notices) == ("", {}, None, ())
    assert begun(tmp_path, "second")[1] == []
    assert isinstance(list(resume(run, {}))[-1], Ready)


@pytest.mark.usefixtures("_settled")
@pytest.mark.parametrize(
    "value", [None, 3, {}, {"n_bytes": "many"}, {"alphabet": {"a": "x"}}, {"notices": [1]}]
)
def test_what_a_strangers_store_says_of_a_survey_is_checked(tmp_path: Path, value: Any) -> None:
    write_corpus(tmp_path)
    run, _ = begun(tmp_path, "first", tokenizer="char")
    path = run.data_folder / "store.json"
    values = json.loads(path.read_text())
    found = values["survey"]["found"]
    values["survey"]["found"] = {**found, **value} if isinstance(value, dict) and value else value
    write_sealed(path, values)
    _, told = begun(tmp_path, "second", tokenizer="char")
    assert "prepared before" in told[-1]


@pytest.mark.usefixtures("_settled")
def test_standard_input_is_copied_and_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path)
    begun(tmp_path, "first", tokenizer="char")
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": file})())
        run, told = begun(tmp_path, "second", tokenizer="char", corpus=("-",))
    assert told[-1].startswith("-: prepared before")
    assert (run.folder / "stdin.txt").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["char", "word"])
def test_standard_input_stays_where_its_preparation_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It cannot be had again; only while it is still read there is nothing to keep."""
    path = write_corpus(tmp_path)
    settings = from_flags({**TINY, "corpus": ("-",), "tokenizer": kind})
    n_kept, n_allowed = 0, 0
    while True:
        asked = iter([False] * n_allowed)
        with path.open("rb") as file:
            monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": file})())
            events = list(
                begin(
                    settings,
                    out=tmp_path / "run",
                    should_stop=lambda asked=asked: next(asked, True),  # type: ignore[misc]
                )
            )
        run = Run(tmp_path / "run")
        if of_kind(events, Ready):
            break
        if run.folder.exists():
            n_kept += 1
            assert run.stdin_path.read_bytes() == path.read_bytes()
            assert notices(events)[-1] == (
                f"{run.folder}: keeps the text of standard input; "
                f"`txl train --resume {run.folder}` prepares it anew"
            )
            assert sorted(os.listdir(run.folder)) == ["checkpoints", "config.yaml", "stdin.txt"]  # noqa: PTH208
            kept = run.folder.rename(tmp_path / f"kept-{n_allowed}")
        n_allowed += 1
    assert n_kept > 2
    assert isinstance(list(resume(Run(kept), {}))[-1], Ready)
    assert store_of(kept)[0] == store_of(run.folder)[0]


@pytest.mark.usefixtures("_settled")
def test_nothing_is_written_beside_the_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_corpus(folder)
    before = [(path.name, path.stat()) for path in sorted(folder.rglob("*"))], folder.stat()
    for name in ("first", "second"):
        begun(tmp_path, name, corpus=(str(folder),))
    assert ([(path.name, path.stat()) for path in sorted(folder.rglob("*"))], folder.stat()) == (
        [(name, status) for name, status in before[0]],
        before[1],
    )


@pytest.mark.usefixtures("_settled")
def test_a_dry_run_takes_a_store_too_and_leaves_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    first, _ = begun(tmp_path, "first")
    before = files_of(first.data_folder)
    settings = from_flags({**TINY, "corpus": (str(tmp_path / "words.txt"),)})
    told = notices(list(begin(settings, out=tmp_path / "dry", dry_run=True)))
    assert "prepared before" in told[-1]
    assert files_of(first.data_folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "words.txt"]


def test_a_text_that_changes_while_it_is_prepared_is_nobody_elses(tmp_path: Path) -> None:
    path = write_corpus(tmp_path)
    corpus = find_corpus([str(path)], raw=True)
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    events = prepare(corpus, tokenizer, tmp_path, split_at=600)
    next(events)
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    *_, last = events
    assert isinstance(last, Prepared)
    assert last.info.sha256 is None


# Preparations that were cut off


def killed_at(tmp_path: Path, name: str, n_events: int, **flags: object) -> tuple[Run, Event] | None:
    """Leave what a process leaves that is killed after so many events; None: there were fewer."""
    events = begin(from_flags({**TINY, "corpus": ("words.txt",), **flags}), out=Path(name))
    event: Event | None = None
    for _ in range(n_events):
        event = next(events, None)  # type: ignore[arg-type]  # of an iterator that is at its end
    assert event is not None
    if isinstance(event, Ready):
        return None
    folder = tmp_path / name
    if folder.exists():
        shutil.copytree(folder, tmp_path / "left", copy_function=shutil.copy2)
    events.close()  # type: ignore[attr-defined]
    assert not folder.exists()
    if (tmp_path / "left").exists():
        (tmp_path / "left").rename(folder)
    return Run(folder), event


def trained(run: Run) -> dict[str, bytes]:
    path = run.checkpoint_path(12) / "model.safetensors"
    return {
        **files_of(run.data_folder),
        "store.json": b"",  # it has the times of its files
        "model": path.read_bytes(),
        "tokenizer": (run.folder / "tokenizer.json").read_bytes(),
    }


def go_on(run: Run, **changes: object) -> list[Event]:
    events = list(resume(run, from_flags(changes)))
    if isinstance(events[-1], Ready):
        events += train(events[-1].run, events[-1].config)
    return events


def test_a_preparation_killed_anywhere_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 300)
    write_corpus(tmp_path)
    (tmp_path / "whole").mkdir()
    shutil.copy(tmp_path / "words.txt", tmp_path / "whole")
    whole = train_run(tmp_path / "whole", "run", tokenizer="char", corpus=("words.txt",))[0]
    expected = trained(whole)
    n_events = 0
    while (left := killed_at(tmp_path, "run", n_events := n_events + 1, tokenizer="char")) is not None:
        run, _ = left
        if not run.folder.exists():
            continue
        assert read_asked(run) is False
        with pytest.raises(UserError, match=r"run: its text is not prepared; .* `txl train --resume "):
            describe_run(run)
        events = go_on(run)
        assert (
            notices(events)[0]
            == f"{run.folder}: its text was not prepared to the end; it is prepared anew, from words.txt"
        )
        assert trained(run) == expected
        assert read_asked(run) is None
        assert (run.config_path).read_text() == whole.config_path.read_text()
        shutil.rmtree(run.folder)
    assert n_events > 10


def test_what_was_asked_in_a_file_stays_so_when_begun_again(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    asked = {**TINY, "corpus": ("words.txt",)}
    settings = {
        name: Sourced(one.value, f"a.yaml:{i}") for i, (name, one) in enumerate(from_flags(asked).items())
    }
    events = begin(settings, out=Path("run"))
    for event in events:
        if isinstance(event, Progress) and event.stage.startswith("encoding"):
            break
    shutil.copytree("run", "left")
    events.close()  # type: ignore[attr-defined]
    Path("left").rename("run")
    assert read_asked(Run(Path("run"))) is True
    events = list(resume(Run(Path("run")), from_flags({"steps": 3})))
    assert isinstance(events[-1], Ready)
    assert events[-1].config.train.steps == 3
    assert events[-1].origins["d_model"] == settings["d_model"].origin
    # A plan would have chosen otherwise.
    assert events[-1].config.train.keep == 2
    assert events[-1].origins["norm"] == "default"


def test_what_stops_a_preparation_again_leaves_it_to_be_begun_again(tmp_path: Path) -> None:
    path = write_corpus(tmp_path)
    left = killed_at(tmp_path, "run", 3)
    assert left is not None
    run, _ = left
    before = files_of_run(run)
    text = path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match=r"^words.txt: cannot be read; no such file"):
        go_on(run)
    assert files_of_run(run)[0] == before[0]
    path.write_bytes(text)
    assert not of_kind(list(resume(run, {}, should_stop=lambda: True)), Ready)
    assert files_of_run(run)[0] == before[0]
    with pytest.raises(UserError, match=r"^--d-model: cannot change on resume"):
        go_on(run, d_model=32)
    assert isinstance(go_on(run)[-1], Finished)


def files_of_run(run: Run) -> tuple[bytes, list[str]]:
    left = sorted(path.name for path in run.folder.rglob("*") if path.is_file())
    return run.config_path.read_bytes(), left


def test_text_of_standard_input_is_prepared_again_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path)
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": file})())
        left = killed_at(tmp_path, "run", 3, corpus=("-",))
    assert left is not None
    run, event = left
    assert isinstance(event, Progress)
    events = go_on(run)
    assert isinstance(events[-1], Finished)
    with open_split(run.folder, "train") as ids:
        assert bytes(ids.read(0, ids.n_tokens).tolist()) == path.read_bytes()[: ids.n_tokens]
    shutil.rmtree(run.folder)
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": file})())
        left = killed_at(tmp_path, "run", 1, corpus=("-",))
    assert left is not None
    with pytest.raises(UserError) as caught:
        go_on(left[0])
    assert str(caught.value) == (
        f"{left[0].folder}: cannot be prepared anew; its text came through standard input, which was not "
        "read to the end; begin another run: ... | txl train -"
    )


# Disks


class FullDisk:
    """A file whose disk is full from the n-th write on, counted over all files."""

    def __init__(self, file: Any, count: Callable[[], None]) -> None:
        self.file, self.count = file, count

    def write(self, data: Any) -> int:
        self.count()
        written: int = self.file.write(data)
        return written

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def writes_of(monkeypatch: pytest.MonkeyPatch, n_good: int, run: Callable[[], object]) -> int:
    """Run with a disk that takes so many writes, and return how many were tried."""
    n_tried = 0

    def count() -> None:
        nonlocal n_tried
        n_tried += 1
        if n_tried > n_good:
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open

    def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real(path, mode, *args, **kwargs)
        return FullDisk(file, count) if "x" in mode or "w" in mode or "+" in mode else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        run()
    return n_tried


def test_a_disk_that_fills_up_at_any_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 300)
    write_corpus(tmp_path)

    def run() -> None:
        begun(tmp_path, "run", tokenizer="char", newlines="drop")

    n_writes = writes_of(monkeypatch, 10**9, run)
    shutil.rmtree(tmp_path / "run")
    assert n_writes >= 10
    for n_good in range(n_writes):
        with pytest.raises(UserError, match=r"; no space left on device") as caught:
            writes_of(monkeypatch, n_good, run)
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


def test_room_is_asked_for_counts_and_gaps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text\n" * 100_000)
    corpus = find_corpus([str(tmp_path / "a.txt")], raw=True, newlines="drop")
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    needed = {}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    for name, call in (
        ("train", lambda: prepare(corpus, tokenizer, tmp_path, split_at=1_000_000)),
        ("test", lambda: encode_text(corpus, tokenizer, tmp_path)),
    ):
        with pytest.raises(UserError) as caught:
            list(call())
        needed[name] = float(str(caught.value).split("about ")[1].split(" MB")[0])
    # A byte an id, three more for its counts, and 1.6 for a gap of 16 bytes in each line of ten.
    assert needed["train"] == pytest.approx(0.9, abs=0.1)
    assert needed["test"] >= 0.9 * 4 + 0.8
