"""Damage of a run's store: whoever would use the files is told, before anything is made of them."""

import errno
import os
import shlex
import shutil
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import txlcli
from tests.stores import unseal_store
from tests.test_train import TINY, of_kind, write_corpus
from txlcli import UserError, checksums
from txlcli.cli import main
from txlcli.cli.signals import Interruption
from txlcli.config import build, from_flags, override, read_settings
from txlcli.data import (
    DamagedStore,
    Origin,
    StoredRun,
    StoreInfo,
    check_store,
    damage,
    find_store,
    is_untouched,
    open_split,
    read_store_info,
)
from txlcli.data.info import SPLITS, write_store_info
from txlcli.report import Stages
from txlcli.run import Run
from txlcli.train import (
    Evaluated,
    Event,
    Finished,
    Notice,
    Progress,
    Ready,
    Saved,
    Stepped,
    begin,
    evaluating,
    loop,
    resume,
    train,
)

FILES = ("train.ids", "valid.ids", "valid.counts", "valid.left_out")
CHECKING = "checking the ids"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small run whose store has all files that a store can have."""
    folder = tmp_path_factory.mktemp("damage")
    torch.set_num_threads(1)
    settings = from_flags({**flags(write_corpus(folder, 3000)), "test": str(folder / "words.txt")})
    ready = list(begin(settings, out=folder / "run"))[-1]
    assert isinstance(ready, Ready)
    list(train(ready.run, ready.config))
    return folder / "run"


def flags(corpus: Path) -> dict[str, Any]:
    small = {"n_layer": 1, "d_model": 4, "n_head": 1, "steps": 2, "eval_every": 1}
    return {**TINY, **small, "corpus": (str(corpus),), "newlines": "drop"}


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    shutil.copytree(trained, tmp_path / "runs" / "words")
    return Run(tmp_path / "runs" / "words")


def harm(path: Path, how: str) -> None:
    """Zero a file, flip one bit of it, or shorten it."""
    data = bytearray(path.read_bytes())
    if how == "zeroed":
        data = bytearray(len(data))
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data = data[:-1]
    path.write_bytes(data)


FAULTS = {
    "zeroed": "its bytes are not those that were written",
    "flipped": "its bytes are not those that were written",
    "shortened": "got ",
}


def remedy(run: Run) -> str:
    return f"; put it back, or repeat the run from its texts: txl train -c {run.config_path}"


def refused(run: Run, what: str) -> str:
    """Return the one line in which resuming a run, or scoring one of its splits, is refused."""

    def use() -> None:
        if what == "resume":
            list(resume(run, from_flags({"steps": 3})))
        else:
            txlcli.load(run.folder, device="cpu").score_split(what)  # type: ignore[arg-type]

    with pytest.raises(UserError) as caught:
        use()
    text = str(caught.value)
    assert text.isprintable()
    assert text.endswith(remedy(run))
    return text.removesuffix(remedy(run))


def command(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.stderr
    return result


def told(events: list[Event]) -> list[str]:
    return [event.text for event in of_kind(events, Notice)]


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_whoever_uses_it(run: Run, name: str, how: str) -> None:
    path = run.data_folder / name
    before = run.config_path.read_bytes()
    sound = path.read_bytes()
    harm(path, how)
    expected = f"{path}: damaged; {FAULTS[how]}"
    assert refused(run, "resume").startswith(expected)
    assert run.config_path.read_bytes() == before
    if name == "train.ids":
        txlcli.load(run.folder, device="cpu").score_split("valid")
    else:
        assert refused(run, "valid").startswith(expected)
        result = command("eval", "--run", run.folder, "--split", "valid", "--device", "cpu", code=2)
        assert result.stderr.endswith(remedy(run) + "\n")
        assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    txlcli.load(run.folder, device="cpu").score_split("test")
    path.write_bytes(sound)  # the first remedy
    assert isinstance(list(resume(run, from_flags({"steps": 3})))[-1], Ready)


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("name", [*FILES, "test.ids"])
def test_a_damaged_store_is_not_taken(run: Run, trained: Path, name: str, how: str) -> None:
    """Not even for a text that it holds: that is prepared anew, and is what it should be."""
    path = run.data_folder / name
    harm(path, how)
    corpus = trained.parent / "words.txt"
    settings = from_flags({**flags(corpus), "test": str(corpus)})
    events = list(begin(settings, out=run.folder.parent / "second"))
    (line,) = [text for text in told(events) if "cannot be taken" in text]
    start = (
        f"{run.folder}: has prepared the same text, but it cannot be taken: {path}: damaged; {FAULTS[how]}"
    )
    assert line.startswith(start)
    assert "put it back" not in line
    for one in (*FILES, "test.ids"):
        assert (run.folder.parent / "second/data" / one).read_bytes() == (trained / "data" / one).read_bytes()


def test_the_remedy_repeats_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.folder.parent.parent)
    shutil.rmtree(run.data_folder)
    error = command("train", "--resume", "runs/words", "--steps", 3, code=2).stderr
    start = "error: runs/words/data/store.json: cannot be read; no such file or directory; put it back, or "
    assert error == f"{start}repeat the run from its texts: txl train -c runs/words/config.yaml\n"
    command(*error.rpartition(": txl ")[2].split())
    first, second = (
        Path(name, "checkpoints/step-0000002/model.safetensors") for name in ("runs/words", "runs/words-2")
    )
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["store.json", "train.ids", "valid.ids", "valid.counts", "valid.left_out"])
def test_a_file_that_is_gone_is_named(run: Run, name: str) -> None:
    path = run.data_folder / name
    path.unlink()
    expected = f"{path}: cannot be read; no such file or directory"
    assert refused(run, "resume") == expected
    if name != "train.ids":
        assert refused(run, "valid") == expected


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "damaged, not valid JSON; expecting value: line 1 column 1 (char 0)"),
        (b"{", "damaged, not valid JSON; "),
        (b"\0" * 500, "damaged, not valid JSON; "),
        (b"\xff", "damaged, not valid JSON; not UTF-8 at byte 0"),
        (b"[]", "damaged; must hold a JSON object, got list"),
        (b"{}", "damaged; has no `splits`"),
    ],
)
def test_a_damaged_description_is_refused_in_plain_words(run: Run, content: bytes, fault: str) -> None:
    path = run.data_folder / "store.json"
    path.write_bytes(content)
    for what in ("resume", "valid"):
        text = refused(run, what)
        assert text.startswith(f"{path}: {fault}")
        assert "Error" not in text


def test_no_bit_of_a_description_can_flip_unnoticed(run: Run) -> None:
    path = run.data_folder / "store.json"
    sound, info = path.read_bytes(), read_store_info(run.folder)
    for at in range(0, len(sound), 29):
        data = bytearray(sound)
        data[at] ^= 1 << zlib.crc32(bytes([at % 256, at // 256])) % 8
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"store\.json: damaged[;,] .*; put it back, or repeat the run"):
            read_store_info(run.folder)
    path.write_bytes(sound)
    assert read_store_info(run.folder) == info


def test_a_store_without_checksums_is_read_as_before(run: Run) -> None:
    unseal_store(run.folder)
    assert all(part.files == {} for part in read_store_info(run.folder).splits.values())
    score = txlcli.load(run.folder, device="cpu").score_split("valid")
    assert score.tokens > 0
    harm(run.data_folder / "train.ids", "zeroed")  # of which nothing can be known
    ready = list(resume(run, from_flags({"steps": 3})))[-1]
    assert isinstance(ready, Ready)
    assert isinstance(list(train(run, ready.config))[-1], Finished)
    harm(run.data_folder / "train.ids", "shortened")
    with pytest.raises(
        UserError, match=r"train\.ids: damaged; got [\d,]+ bytes, store\.json says .*; put it"
    ):
        list(train(run, ready.config))


# Files that nobody seems to have touched


def harm_unseen(path: Path) -> None:
    """Flip a bit of a file that keeps its size, inode and time: the damage of a disk."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def saved(run: Run) -> tuple[list[str], bytes, bytes]:
    """Return what a training leaves: the names of checkpoints, the pointers, the lines of metrics."""
    names = sorted(path.name for path in run.checkpoints_folder.iterdir())
    return names, run.pointers_path.read_bytes(), run.metrics_path.read_bytes()


@pytest.fixture
def second(run: Run, trained: Path) -> Run:
    """Prepare another run of the same text, which takes the files of `run`."""
    _, events = begin_second(run, trained, "first")
    assert any("those of" in text for text in told(events))
    return Run(run.folder.parent / "first")


def begin_second(beside: Run, trained: Path, name: str, **changes: Any) -> tuple[Ready, list[Event]]:
    corpus = trained.parent / "words.txt"
    settings = from_flags({**flags(corpus), "test": str(corpus), **changes})
    events = list(begin(settings, out=beside.folder.parent / name))
    ready = events[-1]
    assert isinstance(ready, Ready)
    return ready, events


def test_untouched_files_are_hashed_beside_the_steps(
    run: Run, trained: Path, second: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied run is hashed before; what was written or linked here is not, and trains to the same bytes."""
    ready = list(resume(run, from_flags({"steps": 3})))[-1]
    assert isinstance(ready, Ready)
    assert ready.is_checked
    hashed: list[Path] = []
    check = damage.check_written

    def note(path: Path, *rest: Any) -> Iterator[int]:
        hashed.append(path)
        return check(path, *rest)

    monkeypatch.setattr(damage, "check_written", note)
    third, _ = begin_second(second, trained, "third")
    assert not third.is_checked
    assert {path.name for path in hashed} == {"test.ids", "test.counts", "test.left_out"}
    hashed.clear()
    list(train(third.run, third.config, is_checked=third.is_checked, stop_at=1))
    assert sorted(hashed) == sorted(third.run.data_folder / name for name in FILES)
    hashed.clear()
    ready = list(resume(third.run, {}))[-1]
    assert isinstance(ready, Ready)
    assert (ready.is_checked, hashed) == (False, [])
    list(train(third.run, ready.config, is_checked=ready.is_checked))
    assert len(hashed) == len(FILES)
    model = Path("checkpoints/step-0000002/model.safetensors")
    assert (third.run.folder / model).read_bytes() == (trained / model).read_bytes()
    # What is set anew is written only where the run can go on, which is looked at before.
    hashed.clear()
    ready = list(resume(third.run, from_flags({"steps": 3})))[-1]
    assert isinstance(ready, Ready)
    assert ready.is_checked
    assert len(hashed) == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_damage_that_no_time_tells_ends_a_training_before_anything_is_saved(
    second: Run, trained: Path, name: str
) -> None:
    model = Path("checkpoints/step-0000002/model.safetensors")
    list(train(second, build(read_settings(second.config_path)), stop_at=1))
    before, sound = saved(second), (second.data_folder / name).read_bytes()
    harm_unseen(second.data_folder / name)
    ready = list(resume(second, {}))[-1]
    assert isinstance(ready, Ready)
    with pytest.raises(UserError) as caught:
        list(train(second, ready.config, is_checked=ready.is_checked))
    expected = f"{second.data_folder / name}: damaged; {FAULTS['flipped']}"
    assert str(caught.value) == expected + remedy(second)
    assert saved(second)[:2] == before[:2]
    assert saved(second)[2].startswith(before[2])
    # From now on it does not pass for untouched: it is refused at once, and no other run takes it.
    assert refused(second, "resume") == expected
    third, events = begin_second(second, trained, "third")
    assert len([text for text in told(events) if "cannot be taken" in text]) == 1
    for one in (*FILES, "test.ids"):
        assert (third.run.data_folder / one).read_bytes() == (trained / "data" / one).read_bytes()
    # Put back it goes on, to what another run of the same text comes to.
    (second.data_folder / name).write_bytes(sound)
    for run in (second, third.run):
        list(train(run, ready.config))
    assert (second.folder / model).read_bytes() == (third.run.folder / model).read_bytes()


def test_a_run_that_took_damage_is_removed_and_its_command_repeated_prepares_anew(
    second: Run, trained: Path
) -> None:
    harm_unseen(second.data_folder / "train.ids")
    third, _ = begin_second(second, trained, "third")
    assert (third.is_checked, third.is_taken) == (False, True)
    with pytest.raises(UserError) as caught:
        list(train(third.run, third.config, is_checked=False, is_taken=True))
    fault = f"{third.run.data_folder / 'train.ids'}: damaged; {FAULTS['flipped']}"
    assert str(caught.value) == (
        f"{fault}; so are those of the run that they were taken from; {third.run.folder} is removed again; "
        "repeat the command, which prepares the text anew"
    )
    assert not third.run.folder.exists()
    third, events = begin_second(second, trained, "third")
    assert len([text for text in told(events) if "cannot be taken" in text]) == 1
    assert not third.is_taken
    list(train(third.run, third.config, is_checked=third.is_checked, is_taken=third.is_taken))
    model = Path("checkpoints/step-0000002/model.safetensors")
    assert (third.run.folder / model).read_bytes() == (trained / model).read_bytes()


def test_a_run_whose_ids_cannot_be_read_is_not_removed(second: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: Any) -> Iterator[int]:
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        raise UserError(f"{path}: cannot be read; input/output error") from error

    monkeypatch.setattr(damage, "check_written", fail)
    with pytest.raises(UserError, match=r"train\.ids: cannot be read; input/output error; ") as caught:
        list(train(second, build(read_settings(second.config_path)), is_taken=True))
    assert not isinstance(caught.value, DamagedStore)
    assert second.data_folder.exists()


def test_what_was_learned_before_the_damage_is_never_removed(second: Run) -> None:
    config = build(read_settings(second.config_path))

    def train_on() -> None:
        for event in train(second, config, is_taken=True):
            if isinstance(event, Saved) and event.step == 1:
                (second.data_folder / "valid.ids").write_bytes(b"")

    with pytest.raises(UserError, match=r"valid\.ids: damaged; it ends before token"):
        train_on()
    assert second.checkpoint_path(1).exists()


def test_the_remedy_is_one_for_a_shell_and_knows_of_standard_input(run: Run) -> None:
    folder = run.folder.rename(run.folder.with_name("it's a run"))
    (folder / "data/train.ids").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        list(resume(Run(folder), {}))
    command = str(caught.value).split("txl train ")[1]
    assert shlex.split(command) == ["-c", str(folder / "config.yaml")]
    (folder / "stdin.txt").write_text("text")
    with pytest.raises(UserError) as caught:
        list(resume(Run(folder), {}))
    command = str(caught.value).split("txl train ")[1]
    assert shlex.split(command) == [str(Run(folder).stdin_path), "-c", str(folder / "config.yaml")]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what lets the hashing of files begin."""
    check, may_begin = damage.check_written, threading.Event()

    def wait(*args: Any) -> Iterator[int]:
        assert may_begin.wait(60)
        return check(*args)

    monkeypatch.setattr(damage, "check_written", wait)
    return may_begin


def test_what_waits_for_the_check_says_so(
    second: Run, trained: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TOLD_S", 0)
    monkeypatch.setattr(loop, "REFRESH_S", 0)
    kinds = []
    for event in train(second, build(read_settings(second.config_path))):
        kinds.append(type(event))
        if isinstance(event, Notice):
            assert event.text == (
                f"{second.data_folder}: nothing is scored or saved before its ids are checked; waiting"
            )
        if isinstance(event, Progress) and event.stage == CHECKING:
            gate.set()
    at = kinds.index(Notice)
    assert kinds[:1] == [Saved]  # the weights that it begins with
    assert not {Saved, Evaluated} & {*kinds[1:at]}
    assert kinds[at + 1] == Progress
    assert kinds.count(Notice) == 1
    model = Path("checkpoints/step-0000002/model.safetensors")
    assert (second.folder / model).read_bytes() == (trained / model).read_bytes()


@pytest.mark.parametrize("end", ["save", "stop", "interruption"])
def test_each_save_waits_for_the_check(
    second: Run, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(loop, "TOLD_S", 0)
    changes = from_flags({"steps": 4, "eval_every": 4, **({"save_every": 1} if end == "save" else {})})
    config = build(override(read_settings(second.config_path), changes))
    kinds = list[type[Event]]()
    for event in train(
        second,
        config,
        stop_at=1 if end == "stop" else None,
        should_stop=lambda: end == "interruption" and Stepped in kinds,
    ):
        kinds.append(type(event))
        if isinstance(event, Notice):
            assert kinds.count(Saved) == 1
            gate.set()
    assert gate.is_set()
    assert kinds.count(Notice) == 1
    assert kinds.count(Saved) == (5 if end == "save" else 2)


def test_a_training_that_is_left_leaves_no_thread(second: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def never_ends(*_: Any) -> Iterator[int]:
        while True:
            checksums.checksum(bytes(1 << 20))  # lets other threads run
            yield 1

    monkeypatch.setattr(damage, "check_written", never_ends)
    monkeypatch.setattr(damage, "WATCHED_BYTES", 1)
    events = train(second, build(read_settings(second.config_path)))
    assert isinstance(next(events), Saved)
    assert [one.name for one in threading.enumerate()].count(CHECKING) == 1
    events.close()  # type: ignore[attr-defined]
    assert [one.name for one in threading.enumerate()].count(CHECKING) == 0


def test_steps_are_timed_on_ids_that_are_checked(second: Run, trained: Path) -> None:
    """Timing reads them too, and what it met would be told of a run that is discarded."""
    harm_unseen(second.data_folder / "train.ids")
    with pytest.raises(UserError, match=r"train\.ids: damaged; its bytes are not those that were written"):
        list(resume(second, from_flags({"minutes": "0.0001"})))
    harm_unseen(second.data_folder / "train.ids")  # sound again
    list(check_store(second.folder, read_store_info(second.folder), SPLITS))
    third, _ = begin_second(second, trained, "third")
    harm_unseen(third.run.data_folder / "train.ids")
    _, events = begin_second(second, trained, "fourth", steps=None, minutes="0.0001")
    assert len([text for text in told(events) if "cannot be taken" in text]) == 1


@pytest.mark.parametrize("name", ["test.ids", "valid.ids", "train.ids"])
def test_damage_that_anybody_finds_is_handed_on_by_nobody(second: Run, trained: Path, name: str) -> None:
    """That of the test text is looked for at once: no training would."""
    path = second.data_folder / name
    harm_unseen(path)
    if name == "valid.ids":
        with pytest.raises(UserError, match=r"valid\.ids: damaged; its bytes"):
            list(check_store(second.folder, read_store_info(second.folder), ["valid"]))
    elif name == "train.ids":
        with open_split(second.folder, "train") as store:
            store.n_vocab = 1
            with pytest.raises(UserError, match="damaged; got id"):
                store.read(0, store.n_tokens)
    third, events = begin_second(second, trained, "third")
    assert len([text for text in told(events) if "cannot be taken" in text]) == 1
    assert (third.run.data_folder / name).read_bytes() == (trained / "data" / name).read_bytes()


def test_files_of_an_unknown_time_are_hashed_first(second: Run) -> None:
    """Those of stores of before, and where the system has no inodes."""
    info = read_store_info(second.folder)
    splits = {
        split: replace(
            part,
            files={name: replace(one, inode=None, mtime_ns=None) for name, one in part.files.items()},
        )
        for split, part in info.splits.items()
    }
    write_store_info(second.data_folder, replace(info, splits=splits))
    assert read_store_info(second.folder) == info  # what it holds is the same
    ready = list(resume(second, from_flags({"steps": 3})))[-1]
    assert isinstance(ready, Ready)
    assert ready.is_checked
    unseal_store(second.folder)
    assert not is_untouched(second.folder, read_store_info(second.folder), SPLITS)


def test_what_could_not_be_hashed_is_like_nothing_else() -> None:
    info = StoreInfo(
        n_vocab=1,
        dtype="uint8",
        start_id=0,
        tokenizer="",
        encoding="utf-8",
        corpus=(),
        sha256=None,
        split_at=0,
        splits={},
        rules="same",
    )
    origin = Origin({}, {}, {"train": None}, rules="same")
    assert find_store([StoredRun(Path("run"), info)], origin) is None
    origin.hashes["train"] = "ab"
    known = StoredRun(Path("run"), replace(info, sha256="ab"))
    assert find_store([known], origin) == known


def test_damage_ends_a_training_as_soon_as_it_is_found(second: Run, gate: threading.Event) -> None:
    harm_unseen(second.data_folder / "train.ids")
    changes = from_flags({"steps": 1000, "eval_every": 1000, "log_every": 1})
    config = build(override(read_settings(second.config_path), changes))
    steps = []

    def train_on() -> None:
        for event in train(second, config):
            if isinstance(event, Stepped):
                steps.append(event.step)
                if event.step == 3:
                    gate.set()
                    (thread,) = (one for one in threading.enumerate() if one.name == CHECKING)
                    thread.join()

    with pytest.raises(UserError, match=r"train\.ids: damaged; its bytes"):
        train_on()
    assert steps == [1, 2, 3]


# A large store


@pytest.fixture
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store of a test be as large as one that takes long to hash."""
    monkeypatch.setattr(damage, "WATCHED_BYTES", 1)
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 500)


def checks(events: list[Event]) -> list[Progress]:
    return [event for event in of_kind(events, Progress) if event.stage == CHECKING]


@pytest.mark.usefixtures("_watched")
def test_checking_a_large_store_is_shown(run: Run, trained: Path) -> None:
    total = sum((run.data_folder / name).stat().st_size for name in FILES)
    events = list(resume(run, from_flags({"steps": 3})))
    shown = checks(events)
    assert len(shown) > 8
    assert {(event.total, event.unit) for event in shown} == {(total, "bytes")}
    assert [event.done for event in shown] == sorted({event.done for event in shown})
    assert shown[-1].done == total
    assert isinstance(events[-1], Ready)
    assert CHECKING in command("eval", "--run", run.folder, "--split", "valid", "--device", "cpu").stderr
    corpus = trained.parent / "words.txt"
    settings = from_flags({**flags(corpus), "test": str(corpus)})
    events = list(begin(settings, out=run.folder.parent / "second"))
    assert any("prepared before" in text for text in told(events))
    assert len(checks(events)) > 8


@pytest.mark.usefixtures("_watched")
def test_checking_a_large_store_can_be_interrupted(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, asked = run.config_path.read_bytes(), count()
    events = list(resume(run, from_flags({"steps": 3}), should_stop=lambda: next(asked) >= 2))
    assert [type(event) for event in events] == [Progress] * 3
    assert run.config_path.read_bytes() == before

    corpus, seen = trained.parent / "words.txt", list[Event]()
    settings = from_flags({**flags(corpus), "test": str(corpus)})
    events_of_begin = begin(
        settings, out=run.folder.parent / "second", should_stop=lambda: len(checks(seen)) >= 2
    )
    for event in events_of_begin:
        seen.append(event)
    assert len(checks(seen)) == 2
    assert not (run.folder.parent / "second").exists()

    stages: list[str] = []

    def leave(_: Interruption) -> None:
        if stages[-1:] == [CHECKING]:
            raise typer.Exit(130)

    monkeypatch.setattr(Stages, "show", lambda _, stage, *__: stages.append(stage))
    monkeypatch.setattr(Interruption, "leave", leave)
    result = command("eval", "--run", run.folder, "--split", "valid", "--device", "cpu", code=130)
    assert result.stdout == ""
    assert stages.count(CHECKING) == 1
