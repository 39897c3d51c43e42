"""Every reader of files against damaged ones: it returns, or refuses in one line, and does nothing else."""

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
import pickle
import pty
import random
import re
import shutil
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.fuzzing import Findings, Reader, files_below, fuzz, read, restore
from tests.stores import seal_store, unseal_store
from tests.test_convert import BASE, N_VOCAB, WORDS, draw, naming_of, settle, state_of, write_huggingface
from tests.test_train import TINY, write_corpus
from txlcli import UserError
from txlcli.api import load as load_run
from txlcli.checkpoint import load_model
from txlcli.cli import main
from txlcli.config import build, from_flags, load, read_origins, read_settings
from txlcli.convert.settings import settings_of
from txlcli.convert.sources import open_source
from txlcli.convert.vocabulary import read_vocab, vocabulary_of
from txlcli.convert.weights import match
from txlcli.data import (
    Batches,
    Look,
    check_store,
    find_survey,
    open_counts,
    open_split,
    read_store_info,
    stores_in,
    trusted_hash,
)
from txlcli.run import (
    Conversion,
    Run,
    describe_run,
    dump_json,
    list_checkpoints,
    parse_json,
    read_asked,
    read_bits_per_byte,
    read_conversion,
    read_pointers,
    write_conversion,
)
from txlcli.sources import Survey, find_corpus, find_place, read_chunks, read_text, survey
from txlcli.tokenizer import build_tokenizer, load_tokenizer
from txlcli.train import NonFinite, Notice, Ready, begin, evaluating, resume, train
from txlcli.train.state import TrainState, optimize

SECONDS = float(os.environ.get("TXL_FUZZ_SECONDS", "180"))
"""How long the slow tests damage the files of each reader."""

STEP = "checkpoints/step-0000002"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small run that has all that a run can have."""
    folder = tmp_path_factory.mktemp("fuzz")
    torch.set_num_threads(1)
    flags = {**TINY, "corpus": (str(write_corpus(folder)),), "newlines": "drop", "steps": 2, "d_model": 4}
    flags |= {"test": str(folder / "words.txt"), "n_layer": 1, "eval_every": 1, "n_head": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "SAMPLE_TOKENS", 3)
        ready = list(begin(from_flags(flags), out=folder / "run"))[-1]
        assert isinstance(ready, Ready)
        list(train(ready.run, ready.config))
    return folder / "run"


# Readers: what of a folder is read, and how


def read_config(folder: Path) -> None:
    path = Run(folder).config_path
    read_asked(Run(folder))
    build(read_settings(path))
    read_origins(path)


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(range(tokenizer.n_vocab))


def read_store(folder: Path) -> None:
    info = read_store_info(folder)
    for _ in check_store(folder, info, ["train", "valid", "test"]):
        pass
    for split in info.splits:
        with open_split(folder, split) as store:
            if store.n_tokens >= 2:
                batches = Batches(store, 4, 8)
                batches.segment(0), batches.segment(batches.steps_per_epoch - 1)
            for start in range(0, store.n_tokens, 100):
                store.read(start, min(start + 100, store.n_tokens))
        if info.splits[split].counts_dtype is not None:
            with open_counts(folder, split) as counts:
                counts.read(0, counts.n_tokens)
                counts.left_out_before(0, counts.n_tokens)


def read_sibling(folder: Path) -> None:
    stores = stores_in(folder.parent)
    look = Look.at(find_corpus([str(folder / "config.yaml")]))
    trusted_hash(stores, look)
    sound = json.loads(SOUND_STORE)
    found = find_survey(stores, sound["sha256"], sound["survey"]["rules"], "here")
    if found is not None:
        "".join(found.alphabet).encode()


def read_small_files(folder: Path) -> None:
    run = Run(folder)
    pointers, _ = read_pointers(run), read_conversion(run)
    read_bits_per_byte(run, pointers.best)
    read_bits_per_byte(run, 2)


def seal(folder: Path) -> None:
    """Give a store and a checkpoint the checksums of their files, as a stranger can."""
    seal_store(folder)
    path = folder / STEP / "state.json"
    files = {name: (folder / STEP / name).read_bytes() for name in ("model.safetensors", "state.safetensors")}
    with suppress(ValueError, RecursionError, UserError):
        values = parse_json(path.read_bytes(), "state.json")
        if {"files", "checksum"} - values.keys():
            return
        values["files"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }
        del values["checksum"]
        values["checksum"] = hashlib.sha256(dump_json(values)).hexdigest()
        path.write_bytes(dump_json(values))


def mostly_seal(folder: Path) -> None:
    """Seal but for one time in eight, which depends on the files alone."""
    if sum(path.stat().st_size for place in ("data", STEP) for path in (folder / place).iterdir()) % 8:
        seal(folder)


def read_weights(folder: Path) -> None:
    load_model(Run(folder))


def read_state(folder: Path) -> None:
    """Restore the state and do one more step with it."""
    run = Run(folder)
    config = load(run.config_path)
    with open_split(folder, "train") as store:
        batches = Batches(store, config.optim.batch_size, config.model.tgt_len)
        state = TrainState.start(config, batches, 256, device=torch.device("cpu"), precision="fp32")
        state.restore(run.checkpoint_path(list_checkpoints(run)[-1]))
        optimize(state, rate=1e-3, clip=1.0)


def read_source(folder: Path) -> None:
    """Read a checkpoint of Hugging Face's, but for writing the run."""
    source = open_source(folder)
    settings = settings_of(source)
    matched = match(source, settings)
    vocabulary_of(source.vocabulary, source.vocabulary_place, settings.n_vocab)
    matched.read()


def read_words(folder: Path) -> None:
    for name in ("words.txt", "words.json"):
        vocabulary_of(read_vocab(folder / name), name, N_VOCAB)


TOKENIZERS = {
    "byte": {},
    "char": {},
    "word": {"vocab_size": 20},
    "eos": {"vocab_size": 20, "newlines": "eos"},
    "sentencepiece": {"vocab_size": 290},
}


def make_tokenizer(kind: str, folder: Path) -> None:
    text = "the quick brown fox é\n" * 20
    kwargs = {"vocab_size": None, "newlines": "keep"} | TOKENIZERS[kind]
    name = "word" if kind == "eos" else kind
    build_tokenizer(name, text=lambda: iter([text.encode()]), n_bytes=400, seed=0, **kwargs).save(folder)


def copied(trained: Path, name: str) -> Path:
    folder = Path("siblings", name).absolute()
    shutil.copytree(trained, folder)
    return folder


def use_run(folder: Path) -> None:
    """Summarize a run, generate with it and score with it."""
    describe_run(Run(folder))
    lm = load_run(folder)
    lm.generate("the", max_tokens=3, seed=1)
    lm.generate("", max_tokens=2, temperature=0)
    lm.score_split("valid")


def go_on(folder: Path) -> None:
    """Resume a run for a step or two."""
    n_asked = itertools.count()
    ready = list(resume(Run(folder), {}, should_stop=lambda: next(n_asked) > 5))[-1]
    if isinstance(ready, Ready):
        n_asked = itertools.count()
        with suppress(NonFinite):
            list(train(ready.run, ready.config, should_stop=lambda: next(n_asked) > 1))


def make_config(trained: Path) -> tuple[Path, Reader]:
    asked = (
        b"# As asked for; the text is yet to be prepared, and what this leaves open to be planned.\n"
        b'data:\n  corpus:\n  - a b.txt\n  - "c\\u00e9"\n  tokenizer: char\n'
        b"model: {n_layer: 2, cutoffs: [3, 5]}\n"
    )
    return copied(trained, "run"), Reader({"config.yaml": (asked,)}, read_config)


def make_tokenizers(trained: Path) -> tuple[Path, Reader]:
    folder = Path("run").absolute()
    folder.mkdir()
    examples = []
    for kind in TOKENIZERS:
        make_tokenizer(kind, folder)
        examples.append((folder / "tokenizer.json").read_bytes())
    examples.append(b'{"bytes": [97, 98, 10], "kind": "byte"}\n')
    examples.append(b'{"characters": ["a", "\\u00e9", "\\n"], "kind": "char"}\n')
    return folder, Reader({"tokenizer.json": tuple(examples), "tokenizer.model": ()}, read_tokenizer)


def make_store(trained: Path) -> tuple[Path, Reader]:
    names = ("store.json", "store.json", "store.json", "train.ids", "valid.counts", "valid.left_out")
    folder = copied(trained, "run")
    sound = (folder / "data/store.json").read_bytes()
    unseal_store(folder)
    older = (folder / "data/store.json").read_bytes()
    (folder / "data/store.json").write_bytes(sound)
    files = {f"data/{name}": (older,) if name == "store.json" else () for name in names}
    return folder, Reader(files, read_store, prepare=mostly_seal)


def make_sibling(trained: Path) -> tuple[Path, Reader]:
    global SOUND_STORE
    folder = copied(trained, "run")
    SOUND_STORE = (folder / "data/store.json").read_text()
    return folder, Reader({"data/store.json": ()}, read_sibling, prepare=mostly_seal)


def make_small_files(trained: Path) -> tuple[Path, Reader]:
    folder = copied(trained, "run")
    write_conversion(Run(folder), Conversion("nvidia", 204, True, 0))
    names = ("pointers.json", "converted.json", "metrics.jsonl")
    return folder, Reader(dict.fromkeys(names, ()), read_small_files)


def make_weights(trained: Path) -> tuple[Path, Reader]:
    return copied(trained, "run"), Reader(
        {f"{STEP}/model.safetensors": ()}, read_weights, prepare=mostly_seal
    )


def make_state(trained: Path) -> tuple[Path, Reader]:
    names = (f"{STEP}/state.safetensors", f"{STEP}/state.json")
    return copied(trained, "run"), Reader(dict.fromkeys(names, ()), read_state, prepare=mostly_seal)


def make_source(trained: Path) -> tuple[Path, Reader]:
    config = settle("huggingface", replace(BASE, div_val=2, cutoffs=(5,)))
    folder = write_huggingface(
        config, state_of(naming_of("huggingface", config), draw(config)), form="safetensors"
    )
    folder = folder.absolute()
    return folder, Reader({"config.json": (), "model.safetensors": ()}, read_source)


def make_words(trained: Path) -> tuple[Path, Reader]:
    folder = Path("words").absolute()
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(f"{word} 3" for word in WORDS.split()))
    tables = {"idx2sym": WORDS.split(), "sym2idx": {word: id for id, word in enumerate(WORDS.split())}}
    (folder / "words.json").write_text(json.dumps({**tables, "lower_case": True, "unk_idx": 8}))
    plain = json.dumps(tables["sym2idx"]).encode()
    return folder, Reader({"words.txt": (), "words.json": (plain,)}, read_words)


def make_whole(trained: Path) -> tuple[Path, Reader]:
    names = ("config.yaml", "tokenizer.json", "data/store.json", "data/valid.ids", "data/valid.counts")
    names += ("data/valid.left_out", "pointers.json", f"{STEP}/model.safetensors")
    return copied(trained, "run"), Reader(dict.fromkeys(names, ()), use_run, prepare=mostly_seal)


def make_resumed(trained: Path) -> tuple[Path, Reader]:
    folder = copied(trained, "run")
    for path in folder.glob("checkpoints/step-0000000"):
        shutil.rmtree(path)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("steps: 2", "steps: 4"))
    names = ("config.yaml", "data/store.json", "data/train.ids", "metrics.jsonl", "pointers.json")
    names += (f"{STEP}/state.json", f"{STEP}/state.safetensors", f"{STEP}/model.safetensors")
    return folder, Reader(dict.fromkeys(names, ()), go_on, writes=True, prepare=mostly_seal)


CORPORA: dict[str, dict[str, Any]] = {
    "lines.jsonl": {"text_field": "text", "valid_every": 2},
    "lines.gz": {"text_field": "text"},
    "text.xz": {"document_separator": "\n"},
    "text.bz2": {"newlines": "drop"},
    "text.zst": {},
    "documents.txt": {"document_separator": "|", "valid_every": 2},
    "chinese.txt": {"encoding": "gb18030", "document_separator": "。"},
    "japanese.txt": {"encoding": "iso2022_jp", "document_per_file": True},
    "wide.txt": {"encoding": "utf-16", "newlines": "drop"},
}
"""Files of a corpus, each with how it is read."""


def read_corpora(folder: Path, sound: dict[str, bytes]) -> None:
    """Read the files that are not as they were, all where each is; from the middle too."""
    names = [name for name, data in sound.items() if (folder / name).read_bytes() != data]
    hows: list[dict[str, Any]] = [{"errors": "replace"}, {"raw": True}, {}]  # what refuses least comes first
    for name in names or sound:
        for how in hows:
            corpus = find_corpus([str(folder / name)], **CORPORA[name], **how)
            *_, found = survey(corpus, valid_fraction=0.3)
            assert isinstance(found, Survey)
            text = b"".join(read_text(corpus, 0, corpus.n_bytes))
            chunks = [*read_chunks(corpus, 0, corpus.n_bytes, sized=True)]
            assert b"".join(chunk.text for chunk in chunks) == text
            assert sum(chunk.read_bytes for chunk in chunks) <= corpus.n_bytes or corpus.text_field
            for _ in read_text(corpus, found.split_at, corpus.n_bytes):
                pass
            if text:
                find_place(corpus, 0, corpus.n_bytes, len(text) - 1)


def make_corpora(trained: Path) -> tuple[Path, Reader]:
    folder = Path("corpora").absolute()
    folder.mkdir()
    text = "the quick brown fox, é|jumps over 紅樓夢。\n" * 12
    lines = "".join(json.dumps({"id": i, "text": line}) + "\n" for i, line in enumerate(text.splitlines()))
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    if find_spec("zstandard") is not None:
        import zstandard

        packers[".zst"] = zstandard.ZstdCompressor(write_checksum=True).compress
    for name, rules in CORPORA.items():
        data = lines if "text_field" in rules else text
        if "japanese" in name:
            data = text.replace("é", "e")
        whole = data.encode(rules.get("encoding", "utf-8"))
        suffix = Path(name).suffix
        (folder / name).write_bytes(packers[suffix](whole) if suffix in packers else whole)
    sound = {name: (folder / name).read_bytes() for name in CORPORA}
    # Several streams in one file, and checksums of other kinds.
    more = {
        "text.xz": (lzma.compress(text.encode(), check=lzma.CHECK_CRC32),),
        "lines.gz": (gzip.compress(lines[:200].encode()) + gzip.compress(lines[200:].encode()) + b"\0" * 9,),
    }
    reader = Reader({name: more.get(name, ()) for name in CORPORA}, lambda place: read_corpora(place, sound))
    return folder, reader


READERS: dict[str, Callable[[Path], tuple[Path, Reader]]] = {
    "config": make_config,
    "tokenizer": make_tokenizers,
    "store": make_store,
    "sibling": make_sibling,
    "small files": make_small_files,
    "weights": make_weights,
    "state": make_state,
    "source": make_source,
    "words": make_words,
    "corpus": make_corpora,
    "generate": make_whole,
    "resume": make_resumed,
}


def assert_sound(found: Findings) -> None:
    assert not found.faults, "\n".join(
        f"{name}: {data!r:.500}\n  {fault}" for name, data, fault in found.faults.values()
    )


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, trained: Path) -> None:
    folder, reader = READERS[name](trained)
    found = fuzz(folder, reader, seed=0, n_inputs=150 if reader.prepare is None else 50)
    assert_sound(found)
    assert found.n_refused > 0 or name == "sibling"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Walk the items of a JSON value, each as what holds it and its key there."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("store", "data/store.json"),
        ("sibling", "data/store.json"),
        ("small files", "pointers.json"),
        ("small files", "converted.json"),
        ("state", f"{STEP}/state.json"),
        ("tokenizer", "tokenizer.json"),
        ("source", "config.json"),
        ("words", "words.json"),
    ],
)
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_in_place_of_any_value_is_read_or_refused(
    name: str, file: str, trained: Path, data: st.DataObject
) -> None:
    if not data_folders or data_folders[-1][0] != (name, file, Path.cwd()):
        data_folders.append(((name, file, Path.cwd()), *READERS[name](trained)))
    _, folder, reader = data_folders[-1]
    sound = (folder / file).read_bytes()
    value = json.loads(sound)
    holder, key = data.draw(st.sampled_from([*places(value)]))
    if isinstance(holder, dict) and data.draw(st.booleans()):
        holder[data.draw(st.text(max_size=3))] = holder.pop(key)
    else:
        holder[key] = data.draw(JSON)
    try:
        (folder / file).write_text(json.dumps(value))
        fault, _ = read(folder, reader)
        assert fault is None
    finally:
        (folder / file).write_bytes(sound)


data_folders: list[tuple[tuple[str, str, Path], Path, Reader]] = []
"""The folder that all examples of one test damage."""


# What damage has found: the reader, the file, what is replaced in it by what, and what is said of it
FOUND: tuple[tuple[str, str, bytes, bytes, str], ...] = (
    # A number that is none, where a whole one was expected.
    (
        "store",
        "data/store.json",
        rb'"mtime_ns": \d+',
        b'"mtime_ns": Infinity',
        "`mtime_ns` is inf, not a number",
    ),
    (
        "store",
        "data/store.json",
        rb'"ctime_ns": \w+',
        b'"ctime_ns": 1e999',
        "`ctime_ns` is inf, not a number",
    ),
    # What the library quotes of a file: control codes, and thousands of characters.
    ("weights", f"{STEP}/model.safetensors", b'"F32"', b'"\\u001b[31m"', r"unknown variant `\x1b[31m`"),
    (
        "weights",
        f"{STEP}/model.safetensors",
        b'"F32"',
        b'"\xc2\x9b\xe2\x80\xae"',
        r"unknown variant `\x9b\u202e`",
    ),
    (
        "weights",
        f"{STEP}/model.safetensors",
        b'"F32"',
        b'"' + b"x" * 5000 + b'"',
        "xxx...; take another step",
    ),
    # A state that lacks what the optimizer needs, or has it in another form.
    ("state", f"{STEP}/state.safetensors", rb"exp_avg_sq\.embed", b"exp_avg_xx.embed", "is incomplete"),
    ("state", f"{STEP}/state.safetensors", b'"F32"', b'"I32"', "must be float32"),
    # A number too large for any, which could later not be written.
    (
        "state",
        f"{STEP}/state.json",
        rb'"smoothed": [\d.]+',
        b'"smoothed": 1e999',
        "1e999 is too large a number",
    ),
    ("state", f"{STEP}/state.json", rb'"step": 2', b'"step": -2', "`step` must be"),
    # A whole number too large for a float.
    (
        "small files",
        "pointers.json",
        rb'"best_nll": [\d.]+',
        b'"best_nll": ' + b"9" * 400,
        "more than 40 digits",
    ),
    ("source", "config.json", rb'"dropatt": [\d.]+', b'"dropatt": ' + b"9" * 400, "more than 40 digits"),
    # Models that no machine holds, before any is built; a vocabulary other than the model's.
    ("resume", "config.yaml", rb"n_layer: 1\b", b"n_layer: 1000000000", "n_layer must be a whole number of"),
    ("resume", "config.yaml", rb"d_inner: \d+", b"d_inner: 1000000000", "config.yaml says 1000000000; put"),
    ("generate", "data/store.json", rb'"n_vocab": 256', b'"n_vocab": 300', "a tokenizer of 256 ids"),
    ("resume", "data/store.json", rb'"n_vocab": 256', b'"n_vocab": 300', "put the run's own tokenizer back"),
    ("resume", "data/store.json", rb'"n_vocab": 256', b'"n_vocab": 9000', "put the run's own tokenizer back"),
    # More values than a vocabulary has, in few bytes.
    ("tokenizer", "tokenizer.json", b"$", b" " + b"[]," * 1_100_000, "expected JSON"),
)


@pytest.mark.parametrize(("name", "file", "old", "new", "text"), FOUND)
def test_what_was_found_is_refused(
    name: str, file: str, old: bytes, new: bytes, text: str, trained: Path
) -> None:
    folder, reader = READERS[name](trained)
    data = (folder / file).read_bytes()
    is_binary = file.endswith(".safetensors")
    end = 8 + int.from_bytes(data[:8], "little") if is_binary else len(data)
    head, n_changed = re.subn(old, lambda _: new, data[8 * is_binary : end], count=1)
    assert n_changed == 1
    (folder / file).write_bytes(struct.pack("<Q", len(head)) * is_binary + head + data[end:])
    seal(folder) if reader.prepare is not None else None
    fault, form = read(folder, reader)
    assert fault is None
    assert form
    with pytest.raises(UserError) as caught:
        reader.read(folder)
    assert text in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_files_damaged_for_minutes_are_read_or_refused(name: str, trained: Path) -> None:
    folder, reader = READERS[name](trained)
    found = fuzz(folder, reader, seed=random.randrange(1 << 32), seconds=SECONDS)
    sys.stderr.write(
        f"{name}: {found.n_read:,} read, {found.n_refused:,} refused in {len(found.forms):,} ways\n"
    )
    assert_sound(found)


# What else a stranger's run may hold


def run_command(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result


@pytest.mark.parametrize("name", ["data", "checkpoints", "metrics.jsonl", "stdin.txt", STEP])
def test_nothing_is_written_or_deleted_through_a_link(trained: Path, name: str) -> None:
    """What a link in a run leads to is not emptied, added to or cleared, not even of files that look ours."""
    folder, outside = copied(trained, "run"), Path("outside").absolute()
    path = folder / name
    if not path.exists():
        path.write_text("the text\n")
    path.rename(outside)
    path.symlink_to(outside)
    if outside.is_dir():
        (outside / ".mine.tmp").write_text("mine")
        (outside / "step-0000005").mkdir()
        (outside / "step-0000005" / "mine").write_text("mine")
    before = files_below(outside) or outside.read_bytes()
    result = run_command("train", "--resume", folder, "--steps", 4, "--keep", 1, code=2)
    assert result.stdout == ""
    kind = "file" if name.endswith(("jsonl", "txt")) else "folder"
    assert result.stderr == (
        f"error: {path}: is a link or no {kind}, and a run is written only within its own folder; "
        "put the thing itself there, or link the whole run\n"
    )
    assert (files_below(outside) or outside.read_bytes()) == before
    assert path.is_symlink()
    if name != "stdin.txt":  # reading does no harm
        run_command("generate", "--run", folder, "--max-tokens", 2)


def test_a_run_may_be_a_link(trained: Path) -> None:
    folder = copied(trained, "run")
    Path("link").symlink_to(folder)
    run_command("train", "--resume", "link", "--steps", 3)
    assert list_checkpoints(Run(folder))[-1] == 3


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "tokenizer.json", "data/store.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(trained: Path, name: str) -> None:
    folder = copied(trained, "run")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    run_command("runs", folder.parent)
    if name != "metrics.jsonl":
        for command in ("generate", "eval", "config"):
            run_command(
                command, "--run", folder, code=0 if name != "config.yaml" and command == "config" else 2
            )
    run_command("train", "--resume", folder, "--steps", 3, code=2)


def test_a_strangers_store_leads_to_nothing_of_the_users(tmp_path: Path) -> None:
    """A store beside, whose ids are a link to another file, is not taken; nor is what is no part of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "SAMPLE_TOKENS", 3)
        corpus, secret = write_corpus(tmp_path), tmp_path / "secret"
        flags = from_flags({**TINY, "corpus": (str(corpus),)})
        list(begin(flags, out=tmp_path / "stranger"))
        ids = tmp_path / "stranger" / "data" / "train.ids"
        secret.write_bytes(ids.read_bytes())
        ids.unlink()
        ids.symlink_to(secret)
        (tmp_path / "stranger" / "tokenizer.extra").symlink_to("/etc/passwd")
        events = list(begin(flags, out=tmp_path / "own"))
    told = [event.text for event in events if isinstance(event, Notice)]
    assert told == [
        f"{tmp_path}/stranger: has prepared the same text, but it cannot be taken: {ids}: is a link, "
        "not a file"
    ]
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in files_below(tmp_path / "own"))
    assert not (tmp_path / "own" / "tokenizer.extra").exists()


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_no_file_of_a_run_is_unpickled(trained: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in turn is replaced by a pickle whose loading would leave a mark."""
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 1)

    class Mark:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(Path("pwned").absolute()),)

    data = pickle.dumps(Mark())
    if form == "torch":
        torch.save(Mark(), "mark.pt")
        data = Path("mark.pt").read_bytes()
    folder = copied(trained, "run")
    commands = {
        "generate": ["--run", folder, "--max-tokens", 1],
        "eval": ["--run", folder, "--split", "valid"],
        "config": ["--run", folder],
        "runs": [folder.parent],
        "train": ["--resume", folder, "--steps", 3, "--quiet"],
    }
    whole = files_below(folder)
    for path in whole:
        path.write_bytes(data)
        for command, arguments in commands.items():
            result = CliRunner().invoke(main, [command, *map(str, arguments)], catch_exceptions=False)
            assert result.exit_code in (0, 2), (path, command)
            assert not Path("pwned").exists(), (path, command)
        restore(folder, whole)
    pickle.loads(pickle.dumps(Mark()))
    assert Path("pwned").exists(), "the mark is real"


def test_the_texts_of_a_strangers_run_are_named_before_they_are_read(trained: Path) -> None:
    folder = Path("run")
    folder.mkdir()
    corpus, valid = trained.parent / "words.txt", trained.parent / "words.txt"
    folder.joinpath("config.yaml").write_text(
        "# As asked for; the text is yet to be prepared, and what this leaves open to be planned.\n"
        f"data:\n  corpus: [{corpus}]\n  valid: {valid}\n  tokenizer: byte\ntrain:\n  steps: 2\n"
    )
    first = next(iter(resume(Run(folder), {})))
    assert first == Notice(
        f"run: its text was not prepared to the end; it is prepared anew, from {corpus}, {valid}"
    )


# Terminals


def on_a_terminal(*args: object) -> str:
    """Run a command line whose stdout and stderr are a terminal, and return what that is told."""
    ours, theirs = pty.openpty()
    told = bytearray()

    def listen() -> None:
        with suppress(OSError):  # nobody holds the other end any more
            while part := os.read(ours, 4096):
                told.extend(part)

    listener = threading.Thread(target=listen)
    listener.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "dumb")  # then nothing of what is told is ours
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        with suppress(SystemExit):
            main([str(arg) for arg in args])
    listener.join()
    os.close(ours)
    return told.decode()


HOSTILE = "a\x1b]0;title\x07b\x9bc\u202ed\te\nf\r\ng\x7f"
SHOWN = "a\\x1b]0;title\\x07b\\x9bc\\u202ed\te\nf\r\ng\\x7f"


def test_control_codes_are_shown_on_a_terminal_and_kept_elsewhere(trained: Path) -> None:
    command = ("generate", "--run", trained, "--prompt", HOSTILE, "--max-tokens", 300, "--temperature", 2)
    command += ("--seed", 1, "--device", "cpu")
    plain = run_command(*command).stdout_bytes.decode()
    assert plain.startswith(HOSTILE)
    told = on_a_terminal(*command)
    # The terminal itself begins each line with a carriage return.
    assert SHOWN.replace("\n", "\r\n") in told
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", told)
    assert re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", plain.removeprefix(HOSTILE)), (
        "the model made some itself"
    )


def test_control_codes_of_names_and_samples_are_shown_in_training(tmp_path: Path) -> None:
    corpus = tmp_path / "a\x1b[31m\nb.txt"
    corpus.write_text("red \x1b[31mand\x9b more\u202e\n" * 40)
    settings = ["--tokenizer", "byte", "--steps", 2, "--n-layer", 1, "--d-model", 4, "--n-head", 1]
    told = on_a_terminal("train", corpus, *settings, "--out", tmp_path / "r\x1b[2Jn", "--batch-size", 2)
    assert "a\\x1b[31m\\nb.txt" in told
    assert "»" in told
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", told)
    told = on_a_terminal("train", corpus, *settings, "--dry-run")
    assert "red \\x1b[31mand\\x9b more\\u202e" in told
    told = on_a_terminal("generate", "--run", "no\x1b[2J\nerror: such")
    assert (
        told == "error: no\\x1b[2J\\nerror: such: no such run folder; `txl runs` lists those under runs/\r\n"
    )
