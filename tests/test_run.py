"""The run folder: names, pointers, pruning, metrics, and what is said when something is amiss."""

import json
import math
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txlcli import UserError
from txlcli import run as runs
from txlcli.config import Config, dump
from txlcli.run import Pointers, Run
from txlcli.run.checkpoints import remove_checkpoint
from txlcli.tokenizer import build_tokenizer


def make_run(folder: Path, steps: tuple[int, ...] = ()) -> Run:
    run = Run(folder)
    run.checkpoints_folder.mkdir(parents=True)
    run.config_path.write_text(dump(Config()), encoding="utf-8")
    for step in steps:
        run.checkpoint_path(step).mkdir()
        (run.checkpoint_path(step) / "model.safetensors").write_bytes(b"x" * 10)
    return run


def refused(text: str) -> "pytest.RaisesExc[UserError]":
    return pytest.raises(UserError, match=f"^{re.escape(text)}$")


# Opening


def test_open_run_takes_a_folder_with_a_config(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert runs.open_run(str(tmp_path / "a")) == Run(tmp_path / "a")


def test_what_is_no_run_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with refused("nope: no such run folder; `txl runs` lists those under runs/"):
        runs.open_run("nope")
    with refused("file: not a run but a file; name the run's folder"):
        runs.open_run("file")
    with refused("folder: not a run, it has no config.yaml; `txl train` makes one, `txl runs` lists them"):
        runs.open_run("folder")


# Making


def test_a_new_run_is_named_after_the_corpus_and_numbered_when_taken() -> None:
    folders = [runs.new_run(None, "corpus").folder for _ in range(3)]
    assert folders == [Path("runs/corpus"), Path("runs/corpus-2"), Path("runs/corpus-3")]
    assert all(sorted(path.name for path in folder.iterdir()) == ["checkpoints"] for folder in folders)


@pytest.mark.parametrize(
    ("stem", "name"), [("", "corpus"), ("..", "corpus"), ("东" * 300, "东" * 66), ("a.b", "a.b")]
)
def test_any_stem_gives_a_name_directly_under_runs(stem: str, name: str) -> None:
    assert runs.new_run(None, stem).folder == Path("runs", name)


def test_a_given_folder_may_exist_if_it_is_empty() -> None:
    Path("out").mkdir()
    assert runs.new_run(Path("out"), "corpus").folder == Path("out")


def test_a_given_folder_in_use_is_refused_and_left_alone() -> None:
    Path("out").mkdir()
    Path("out/letter").write_bytes(b"dear")
    with refused("--out: `out` exists and is not empty; name another"):
        runs.new_run(Path("out"), "corpus")
    Path("out/config.yaml").write_text("# a run")
    with refused("--out: `out` exists and is not empty; name another, or continue with `--resume out`"):
        runs.new_run(Path("out"), "corpus")
    assert Path("out/letter").read_bytes() == b"dear"


def test_a_given_file_is_refused() -> None:
    Path("out").write_bytes(b"")
    with refused("out: cannot write a run here; file exists; name another folder with --out DIR"):
        runs.new_run(Path("out"), "corpus")
    with refused("out/deep: cannot write a run here; not a directory; name another folder with --out DIR"):
        runs.new_run(Path("out/deep"), "corpus")


def test_a_file_named_runs_is_refused() -> None:
    Path("runs").write_bytes(b"")
    with refused("runs: a file has this name; name a folder with --out DIR"):
        runs.new_run(None, "corpus")


def test_a_folder_that_cannot_be_written_to_is_refused_and_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise UserError(f"{path}: cannot be written; read-only file system")

    monkeypatch.setattr("txlcli.run.making.write_whole", refuse)
    with refused("a/b: cannot write a run here; read-only file system; name another folder with --out DIR"):
        runs.new_run(Path("a/b"), "corpus")
    assert not Path("a").exists()
    with refused(
        "runs/corpus: cannot write a run here; read-only file system; name another folder with --out DIR"
    ):
        runs.new_run(None, "corpus")
    assert not Path("runs").exists()


def test_a_run_that_came_to_nothing_leaves_nothing_of_its_own() -> None:
    Path("kept").mkdir()
    for path in (Path("kept/a/b"), Path("kept"), None):
        run = runs.new_run(path, "corpus")
        run.data_folder.mkdir()
        (run.data_folder / "train.ids").write_bytes(b"1")
        run.config_path.write_bytes(b"")
        runs.discard_run(run)
    assert sorted(Path().rglob("*")) == [Path("kept")]


def test_discarding_spares_a_runs_folder_that_others_use() -> None:
    first, second = runs.new_run(None, "a"), runs.new_run(None, "a")
    runs.discard_run(first)
    assert second.folder.is_dir()


# The latest


def test_the_latest_run_is_the_one_that_saved_last() -> None:
    for name, moment in (("a", 100), ("b", 300), ("c", 200)):
        run = make_run(Path("runs", name), (0,))
        runs.write_pointers(run, Pointers(None, 0, None))
        os.utime(run.pointers_path, (moment, moment))
    make_run(Path("runs/d"))  # has never saved
    assert runs.latest_run() == Run(Path("runs/b"))
    assert [run.folder.name for run in runs.list_runs()] == ["a", "b", "c", "d"]


def test_no_run_to_take_is_told_with_what_to_do() -> None:
    text = "runs: no run with a checkpoint here; train one with `txl train FILE`, or name one with --run"
    with refused(text):
        runs.latest_run()
    make_run(Path("runs/a"))
    with refused(text):
        runs.latest_run()


def test_listing_nowhere_is_refused() -> None:
    with refused("nope: no folder of runs here (no such file or directory); train one with `txl train FILE`"):
        runs.list_runs(Path("nope"))


# Checkpoints


def test_only_whole_checkpoints_count() -> None:
    run = make_run(Path("a"), (100, 7, 12_345_678))
    for name in (".step-0000200.1a2b3c4d.tmp", "step-12", "step-0000300.deleted", "step-000030x"):
        (run.checkpoints_folder / name).mkdir()
    assert runs.list_checkpoints(run) == [7, 100, 12_345_678]
    assert runs.step_of(run.checkpoint_path(12_345_678)) == 12_345_678


def test_best_last_and_steps_are_found() -> None:
    run = make_run(Path("a"), (0, 50, 100))
    assert runs.choose_checkpoint(run, "best") == run.checkpoint_path(100)  # nothing evaluated yet
    runs.write_pointers(run, Pointers(50, 100, 1.5))
    assert runs.choose_checkpoint(run) == run.checkpoint_path(50)
    assert runs.choose_checkpoint(run, "last") == run.checkpoint_path(100)
    assert runs.choose_checkpoint(run, "0") == run.checkpoint_path(0)


def test_what_cannot_be_chosen_is_refused_with_what_can() -> None:
    empty, run = make_run(Path("empty")), make_run(Path("a"), tuple(range(10)))
    with refused("empty: has no checkpoint yet; continue it with `txl train --resume empty`"):
        runs.choose_checkpoint(empty)
    with refused("a: no checkpoint of step 77; it has 0, 1, 2, ..., 6, 7, 8, 9"):
        runs.choose_checkpoint(run, "77")
    for which in ("newest", "-1", "1.5", "", "²"):
        with refused(f"--checkpoint: must be best, last or a step; got `{which}`"):
            runs.choose_checkpoint(run, which)
    with pytest.raises(
        UserError, match=r"^a: no checkpoint of step 9{19}; it has 0, 1, 2, \.\.\., 6, 7, 8, 9$"
    ):
        runs.choose_checkpoint(run, "9" * 10_000)
    runs.write_pointers(run, Pointers(50, 9, 1.5))
    with refused("a: no checkpoint of step 50; take another with --checkpoint last"):
        runs.choose_checkpoint(run, "best")


@given(
    steps=st.sets(st.integers(0, 9_999_999), min_size=1, max_size=8),
    keep=st.integers(1, 5),
    data=st.data(),
)
def test_pruning_keeps_the_newest_and_the_best(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int, data: st.DataObject
) -> None:
    run = make_run(tmp_path_factory.mktemp("run") / "a", tuple(steps))
    best = data.draw(st.sampled_from([None, *sorted(steps)]))
    runs.write_pointers(run, Pointers(best, max(steps), None))
    gone = runs.prune_checkpoints(run, keep)
    expected = {*sorted(steps)[-keep:]} | ({best} - {None})
    assert set(runs.list_checkpoints(run)) == expected
    assert gone == sorted(steps - expected)
    assert {path.name for path in run.checkpoints_folder.iterdir()} == {
        f"step-{step:07d}" for step in expected
    }


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(Path("a"), (1, 2))

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(run.checkpoint_path(1))
    assert runs.list_checkpoints(run) == [2]
    assert len(list(run.checkpoints_folder.iterdir())) == 2
    runs.sweep_run(run)
    assert list(run.checkpoints_folder.iterdir()) == [run.checkpoint_path(2)]


def test_sweeping_clears_temporary_names_only() -> None:
    run = make_run(Path("a"), (1,))
    run.data_folder.mkdir()
    for folder in (run.folder, run.checkpoints_folder, run.data_folder):
        (folder / ".begun.1a2b3c4d.tmp").mkdir()
    (run.folder / ".hidden").write_bytes(b"the user's")
    assert len(runs.sweep_run(run)) == 3
    assert sorted(path.name for path in run.folder.iterdir()) == [
        ".hidden",
        "checkpoints",
        "config.yaml",
        "data",
    ]
    assert runs.list_checkpoints(run) == [1]


# Pointers


@given(
    best=st.none() | st.integers(0, 10**9),
    last=st.none() | st.integers(0, 10**9),
    nll=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_pointers_come_back(
    tmp_path_factory: pytest.TempPathFactory, best: int | None, last: int | None, nll: float | None
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    runs.write_pointers(run, Pointers(best, last, nll))
    assert runs.read_pointers(run) == Pointers(best, last, nll)


def test_no_pointers_yet_are_none(tmp_path: Path) -> None:
    assert runs.read_pointers(Run(tmp_path)) == Pointers(None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"best": -1, "best_nll": null, "last": 1}',
        '{"best": true, "best_nll": null, "last": 1}',
        '{"best": "../../x", "best_nll": null, "last": 1}',
        '{"best": 1.5, "best_nll": null, "last": 1}',
        '{"best": 1, "best_nll": "low", "last": 1}',
        '{"best": 1, "best_nll": null, "last": 1, "more": 1}',
    ],
)
def test_pointers_of_other_kinds_are_refused(tmp_path: Path, text: str) -> None:
    Run(Path("a")).folder.mkdir()
    Path("a/pointers.json").write_text(text)
    with refused(
        "a/pointers.json: damaged; must hold `best`, `best_nll` and `last`; "
        "delete it, and best is last until the next evaluation"
    ):
        runs.read_pointers(Run(Path("a")))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON; expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe\xfd", "not valid JSON; not UTF-8 at byte 2"),
        (b'{"best": NaN}', "not valid JSON; nan is no number in JSON"),
        (b"[" * 3000, "not valid JSON; "),
        (b"[1]", "must hold a JSON object, got list"),
    ],
)
def test_pointers_that_are_no_json_are_refused(data: bytes, reason: str) -> None:
    Path("pointers.json").write_bytes(data)
    with pytest.raises(UserError, match=r"^pointers\.json: damaged") as caught:
        runs.read_pointers(Run(Path()))
    assert reason.split(";")[0] in str(caught.value)


# Metrics


def test_metrics_are_one_json_object_a_line_and_finite() -> None:
    run = make_run(Path("a"))
    runs.append_metrics(run, {"event": "step", "step": 1, "loss": math.nan, "lr": 0.1})
    runs.append_metrics(run, {"event": "skip", "step": 2, "reason": "loss\nis ∞"})
    lines = run.metrics_path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith('{"event": "step", ')
    assert [json.loads(line) for line in lines] == [
        {"event": "step", "step": 1, "loss": None, "lr": 0.1},
        {"event": "skip", "step": 2, "reason": "loss\nis ∞"},
    ]


def test_metrics_are_cut_to_a_recorded_length_and_never_grown() -> None:
    run = make_run(Path("a"))
    assert runs.metrics_length(run) == 0
    runs.append_metrics(run, {"event": "step", "step": 1})
    length = runs.metrics_length(run)
    kept = run.metrics_path.read_bytes()
    assert length == len(kept)
    runs.append_metrics(run, {"event": "step", "step": 2})
    assert runs.cut_metrics(run, length)
    assert run.metrics_path.read_bytes() == kept
    assert runs.cut_metrics(run, length)
    assert not runs.cut_metrics(run, length + 1)
    assert run.metrics_path.read_bytes() == kept


@pytest.mark.parametrize("line", [b'{"a": 1}\n', b"x" * 100_000 + b"\n"])
def test_of_metrics_that_were_cut_short_whole_lines_are_kept(line: bytes) -> None:
    run = make_run(Path("a"))
    for whole, broken in ((line, b'{"event": "sa'), (b"", line[:-1][:1000]), (line, b"")):
        run.metrics_path.write_bytes(whole + broken)
        assert not runs.cut_metrics(run, len(whole + broken) + 1)
        assert run.metrics_path.read_bytes() == whole


def test_a_folder_that_looks_like_a_run_is_listed_and_its_fault_told() -> None:
    make_run(Path("runs/a"))
    Path("runs/b/config.yaml").mkdir(parents=True)
    Path("runs/c").mkdir(parents=True)  # none
    b = runs.list_runs()[1]
    assert b == Run(Path("runs/b"))
    with refused("runs/b/config.yaml: is a folder, not a file"):
        runs.describe_run(b)


# Summary


def test_a_run_is_described_with_its_best_and_its_size() -> None:
    run = make_run(Path("a"), (50, 100))
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter([b"abc"]), n_bytes=3, seed=0)
    tokenizer.save(run.tokenizer_folder)
    runs.write_pointers(run, Pointers(50, 100, 1.25))
    for step, bits in ((50, 2.5), (100, 2.75)):
        runs.append_metrics(run, {"event": "eval", "step": step, "nll": 1.0, "bits_per_byte": bits})
    # A last step may be scored a second time, then on all held-out text; the first score chose the best.
    runs.append_metrics(run, {"event": "eval", "step": 50, "nll": 1.1, "bits_per_byte": 2.6})
    summary = runs.describe_run(run)
    assert (summary.tokenizer, summary.n_vocab) == ("byte", tokenizer.n_vocab)
    assert (summary.step, summary.steps, summary.best_step) == (100, None, 50)
    assert (summary.best_nll, summary.best_bits_per_byte) == (1.25, 2.5)
    assert summary.config == Config()
    files = [path for path in Path("a").rglob("*") if path.is_file()]
    assert summary.n_bytes == sum(path.stat().st_size for path in files)


def test_a_summary_does_without_metrics() -> None:
    run = make_run(Path("a"), (50,))
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter([b"abc"]), n_bytes=3, seed=0)
    tokenizer.save(run.tokenizer_folder)
    runs.write_pointers(run, Pointers(50, 50, 1.25))
    assert runs.describe_run(run).best_bits_per_byte is None
    run.metrics_path.write_bytes(b'{"event": "eval", "step": 50, "bits_per_byte": 2.0}\n{"eval" cut')
    assert runs.describe_run(run).best_bits_per_byte == 2.0


# JSON


@given(
    st.dictionaries(
        st.text(max_size=9),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
            lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_json_comes_back_and_equal_values_give_equal_bytes(values: dict[str, object]) -> None:
    data = runs.dump_json(values)
    assert runs.parse_json(data, "x") == values
    assert runs.dump_json(dict(reversed(values.items()))) == data


def test_no_file_of_a_run_is_executable() -> None:
    run = make_run(Path("a"))
    runs.write_pointers(run, Pointers())
    assert not stat.S_IMODE(run.pointers_path.stat().st_mode) & 0o111
