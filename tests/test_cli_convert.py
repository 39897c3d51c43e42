"""`txl convert` and what can be done with the runs that it makes."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from txlcli import load
from txlcli.cli import main
from txlcli.cli.convert import _prompt
from txlcli.config import Config, DataConfig, ModelConfig, flatten
from txlcli.convert import Converted, Row
from txlcli.files import shell_name
from txlcli.report import Screen, converted_facts, tensors_table
from txlcli.run import Run
from txlcli.tokenizer import CorpusWordTokenizer, MosesTokenizer, TableTokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
CASES = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/case.json"))}


def golden(text):
    """Find a source by the vocabulary that it has."""
    return GOLDEN / next(name for name, case in CASES.items() if case["text"] == text)


WORDS, BYTES, LETTERS = golden("vocab.bin"), golden("bytes"), golden("letters")
VOCABULARY = next(WORDS.glob("vocab.*"))
NAMES = {WORDS: "words", BYTES: "bytes", LETTERS: "letters"}


def run(*args, code=0, stdin=None):
    """Run a command line in this process; return what it wrote and check its exit code."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result


def refusal(*args):
    """Run a command line that is refused; return the last line on stderr without `error: `."""
    result = run(*args, code=2)
    assert result.stdout == ""
    return result.stderr.splitlines()[-1].removeprefix("error: ")


@pytest.fixture(scope="module", params=NAMES, ids=NAMES.get)
def converted(request, tmp_path_factory):
    """A source, and a run made of it, to be read only."""
    out = tmp_path_factory.mktemp("converted") / "run"
    run("convert", request.param, "--out", out, "--quiet")
    return request.param, out


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    out = tmp_path_factory.mktemp("words") / "run"
    run("convert", WORDS, "--out", out, "--quiet")
    return out


@pytest.fixture
def weights_only(tmp_path):
    """A source that has no vocabulary."""
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(WORDS / name, folder)
    return folder


# What the command prints


@pytest.mark.parametrize("source", NAMES, ids=NAMES.get)
def test_the_command_tells_every_tensor_the_conventions_and_what_is_next(source):
    result = run("convert", source, "--out", "out")
    table, _, facts = result.stdout.partition("\n\n")
    names = ["source", "run", "memory", "keys", "distances", "norm", "text"]
    assert [line.split()[0] for line in facts.splitlines()] == names
    assert facts.splitlines()[0].startswith(f"source     {source}/")
    assert re.match(r"run        out · [\d.]+ k weights$", facts.splitlines()[1])
    header, _, *lines = table.splitlines()
    assert re.split(r"\s{2,}", header.strip()) == ["their tensor", "ours", "shape", "what was done"]
    key = r"(transformer\.)?layers\.0–1\.dec_attn\.qkv_net\.weight +layers\.0–1\.attention\.k\.weight +"
    assert any(re.fullmatch(key + r"\d+ × \d+ +cut: rows \d+ to \d+ of \d+", line) for line in lines)
    assert any(re.fullmatch(r"\S*pos_emb\.inv_freq +– +\d+ +dropped: computed here", line) for line in lines)
    before, _, hints = result.stderr.partition("\n\n")
    first, *notes = before.splitlines()
    assert first == f"reading {source}"
    assert all(note.startswith("note: ") for note in notes)
    prompt = _prompt(load_tokenizer(Path("out")))
    assert prompt
    raw = "   (raw text: --moses)" if source == WORDS else ""
    assert hints.splitlines() == [
        f"next  txl eval FILE --run out{raw}",
        f"      txl generate --run out --prompt {prompt}",
        "      txl train CORPUS --init out",
    ]


def make(kind="authors", vocabulary=None, step=0, *, data=None, **settings):
    """A conversion of no file."""
    return Converted(
        run=Run(Path("runs/x")),
        kind=kind,
        source=Path("a/model.pt"),
        step=step,
        config=Config(data=DataConfig(**(data or {})), model=ModelConfig(**settings)),
        n_vocab=30_000,
        n_parameters=1_234_567,
        tokenizer=vocabulary,
        rows=(),
        notices=(),
    )


def test_the_prompt_is_of_the_vocabulary_itself():
    def points(text):
        return tuple(map(ord, text))

    assert _prompt(TableTokenizer("char", points("_etaoinsrhldcu"))) == "once"
    assert _prompt(TableTokenizer("char", points("_ДОб"))) == "ДОб"
    assert _prompt(TableTokenizer("byte", (32, 101, 116, 195, 164))) == "et"
    assert _prompt(TableTokenizer("byte", (32, 195))) == ""
    words = ("<eos>", "<unk>", ",", "The", "the", "Once")
    assert _prompt(CorpusWordTokenizer(words)) == "Once"
    assert _prompt(CorpusWordTokenizer(words[:-1])) == "The"
    assert _prompt(CorpusWordTokenizer(words, is_lowered=True)) == "the"
    assert _prompt(CorpusWordTokenizer(words[:3])) == ""


def test_names_with_line_ends_stay_on_one_line():
    assert shell_name("a b") == "'a b'"
    assert shell_name("a\nb'c\\") == r"$'a\nb\'c\\'"
    assert shell_name("runs/caf\udce9") == r"$'runs/caf\xe9'"
    assert dict(converted_facts(replace(make(), source=Path("a\nb"))))["source"] == r"a\nb · the authors"


def test_the_conventions_in_words():
    words, lines = CorpusWordTokenizer(("<S>", "<unk>"), "<S>"), converted_facts
    zeros = {"memory_start": "zeros", "mem_len": 1600, "tgt_len": 128, "same_length": "mem_len"}
    text = {"tokenizer": "word", "newlines": "eos"}
    made = make("huggingface", words, data=text, clamp_len=1000, norm="post", norm_eps=1e-3, **zeros)
    assert lines(made) == [
        ("source", "a/model.pt · Hugging Face"),
        ("run", "runs/x · 1.23 M weights"),
        ("memory", "begins as mem_len rows of zeros · mem_len 1,600 · tgt_len 128"),
        ("keys", "a query sees mem_len keys · same_length mem_len"),
        ("distances", "alike from clamp_len 1,000 on"),
        ("norm", "post · norm_eps 0.001"),
        ("text", "30,000 words, split at white space · a newline is the word <S>"),
    ]
    table = TableTokenizer("char", (97,))
    rules = {"norm": "pre", "final_norm": False, "same_length": "mem_len+1", "mem_len": 4, "tgt_len": 4}
    text = {"tokenizer": "char", "newlines": "drop", "spaces": "underscore"}
    made = make("nvidia", table, 40_000, data=text, **rules)
    assert lines(made) == [
        ("source", "a/model.pt · NVIDIA · step 40,000"),
        ("run", "runs/x · 1.23 M weights"),
        ("memory", "begins empty · mem_len 4 · tgt_len 4"),
        ("keys", "a query sees mem_len + 1 keys · same_length mem_len+1"),
        ("distances", "each has its own"),
        ("norm", "pre · none after the last layer · norm_eps 1e-05"),
        ("text", "30,000 characters · newlines are left out of the text · a space is an underscore"),
    ]
    made = dict(lines(make("authors", TableTokenizer("byte", (97,)), data={"tokenizer": "byte"})))
    assert made["text"] == "bytes, 30,000 of the 256 · a newline is a symbol"
    assert made["keys"] == "a query sees all keys before it · same_length off"
    assert made["norm"] == "pre · one more after the last layer · norm_eps 1e-05"
    assert dict(lines(make()))["text"] == "no vocabulary: no text can be read or written"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_json_of_names_that_are_no_text():
    source = shutil.copytree(BYTES, "from\udce9")
    found = json.loads(run("convert", source, "--out", "to\udce9", "--json", "--quiet").stdout)
    assert found["source"].startswith("from\udce9/")
    assert found["run"] == "to\udce9"


def test_json_lists_every_tensor_and_all_settings():
    result = run("convert", BYTES, "--out", "out", "--json", "--quiet")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    tensors = found.pop("tensors")
    bias = next(row for row in tensors if row["target"] == "content_bias")
    assert (bias["source"], bias["shape"][1:], bias["what"]) == ("r_w_bias", [6], "as is")
    # All layers, one by one.
    assert sum(row["target"] == f"layers.{n}.attention.q.weight" for n in (0, 1) for row in tensors) == 2
    lm = load("out")
    assert found.pop("settings") == json.loads(json.dumps(flatten(lm.config)))
    case = CASES[BYTES.name]
    assert found == {
        "run": "out",
        "kind": {"hf": "huggingface"}.get(BYTES.name.split("-")[0], BYTES.name.split("-")[0]),
        "source": found["source"],
        "step": lm.step,
        "n_vocab": lm.tokenizer.n_vocab,
        "n_parameters": sum(weight.numel() for weight in lm.model.state_dict().values()),
        "tokenizer": "byte",
        "notices": found["notices"],
    }
    assert Path(found["source"]).parent == BYTES
    assert case["text"] == "bytes"


def screen(width):
    return Screen(sys.stdout, False, False, False, True, width)


def test_the_table_of_a_large_model_fits_a_window_of_80_columns():
    rows = []
    for n in range(18):
        there, here = f"transformer.layers.{n}", f"layers.{n}"
        qkv, part = f"{there}.dec_attn.qkv_net.weight", (1024, 1024)
        rows += [
            Row(f"{there}.dec_attn.r_w_bias", "content_bias", (1, 16), f"joined: as rows {n} to {n} of 18"),
            Row(qkv, f"{here}.attention.q.weight", part, "cut: rows 0 to 1,023 of 3,072"),
            Row(qkv, f"{here}.attention.k.weight", part, "cut: rows 1,024 to 2,047 of 3,072"),
            Row(f"{there}.pos_ff.layer_norm.bias", f"{here}.feedforward.norm.bias", (1024,), "as is"),
            Row(f"{there}.dec_attn.r_r_bias", None, (16, 64), f"dropped: the same as {there}.dec_attn.x"),
        ]
    assert screen(80).render(tensors_table(rows, 80)).splitlines() == [
        "their tensor",
        "  ours                               shape          what was done",
        "─" * 80,
        "transformer.layers.0–17.dec_attn.r_w_bias",
        "  content_bias                       1 × 16         joined: as rows 0 to 17 of",
        "                                                    18",
        "transformer.layers.0–17.dec_attn.qkv_net.weight",
        "  layers.0–17.attention.q.weight     1,024 × 1,024  cut: rows 0 to 1,023 of",
        "                                                    3,072",
        "  layers.0–17.attention.k.weight     1,024 × 1,024  cut: rows 1,024 to 2,047 of",
        "                                                    3,072",
        "transformer.layers.0–17.pos_ff.layer_norm.bias",
        "  layers.0–17.feedforward.norm.bias  1,024          as is",
        "transformer.layers.0–17.dec_attn.r_r_bias",
        "  dropped: the same as transformer.layers.0–17.dec_attn.x",
    ]
    wide = screen(200).render(tensors_table(rows, 200)).splitlines()
    assert len(wide) == 2 + 5
    assert wide[3].split("  ")[0] == "transformer.layers.0–17.dec_attn.qkv_net.weight"
    # Layers that are treated unlike one another keep lines of their own.
    odd = [Row("layers.0.x.a", "layers.0.b", (2,), "as is"), Row("layers.1.x.a", "layers.1.b", (3,), "as is")]
    assert len(screen(80).render(tensors_table(odd, 80)).splitlines()) == 2 + 2


# What is refused


def test_a_source_that_is_none_is_one_line_and_leaves_nothing(tmp_path):
    assert refusal("convert", tmp_path / "no", "--out", "out") == (
        f"{tmp_path / 'no'}: no such file or folder; name a checkpoint to convert"
    )
    (tmp_path / "text.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00lsR.")
    assert "os.system" in refusal("convert", "text.pt", "--out", "out")
    assert refusal("convert").startswith("SOURCE: ")
    for flag in ("--out", "--vocab"):
        assert refusal("convert", WORDS, flag, "") == f"{flag}: must not be empty; got ``"
    assert not Path("out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert refusal("convert", WORDS, "--out", "out") == (
        "--out: `out` exists and is not empty; name a new or empty folder"
    )
    assert os.listdir("out") == ["mine"]  # noqa: PTH208


def test_a_vocabulary_of_another_model_is_refused_and_leaves_nothing(weights_only, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("<eos>\na\n")
    assert refusal("convert", weights_only, "--out", "out", "--vocab", vocab) == (
        f"{vocab}: not the model's vocabulary; got 2 symbols, the model has 30; "
        "name the model's own with --vocab FILE"
    )
    assert not Path("out").exists()


def test_an_interruption_leaves_nothing():
    code = (
        "import os, signal, time\n"
        "from txlcli import convert\n"
        "begun = convert.convert\n"
        "def interrupted(*args, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"  # until the thread that listens has heard it
        "    return begun(*args, **kwargs)\n"
        "convert.convert = interrupted\n"
        "from txlcli.cli import main\n"
        f"main(['convert', {str(WORDS)!r}, '--out', 'out'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(GOLDEN.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=env, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (130, b""), done.stderr
    assert done.stderr.decode().splitlines()[-1] == "stopped; nothing was written"
    assert not Path("out").exists()


# What can be done with the runs


def test_a_converted_run_scores_and_continues_text(converted):
    source, folder = converted
    file, text = source / "text.txt", (source / "text.txt").read_bytes()
    result = json.loads(run("eval", file, "--run", folder, "--json", "--quiet").stdout)
    protocol = result["protocol"]
    lm = load(folder)
    model = lm.config.model
    assert (protocol["memory_start"], protocol["norm_eps"]) == (model.memory_start, model.norm_eps)
    assert (protocol["same_length"], protocol["clamp_len"]) == (model.same_length, model.clamp_len)
    (row,) = result["rows"]
    assert row["total_nll"] == lm.score(file).total_nll
    # Bytes of newlines that are left out belong to no token; the first token is not scored.
    is_word = source == WORDS
    n_first, n_dropped = len(text.split()[0]) if is_word else 1, 0 if is_word else text.count(b"\n")
    assert row["bytes_scored"] == len(text) - n_first - n_dropped
    start = "a memory of zeros" if model.memory_start == "zeros" else "empty memory"
    table = run("eval", file, "--run", folder).stdout
    assert f"from {start} over" in table
    assert (f" · norm_eps {model.norm_eps:g} · " in table) == (model.norm_eps != 1e-5)
    flags = ["--max-tokens", "5", "--seed", "1", "--run", folder]
    prompt = text.decode()[:9]
    result = run("generate", "--prompt", prompt, *flags, "--json")
    assert json.loads(result.stdout)["text"] == lm.generate(prompt, max_tokens=5, seed=1).text
    assert run("generate", *flags, "--quiet").stdout == lm.generate(max_tokens=5, seed=1).text


def test_a_converted_run_can_be_trained_on(converted, tmp_path):
    source, folder = converted
    text, path = (source / "text.txt").read_text() * 20, tmp_path / "text.txt"
    path.write_text(text)
    flags = ["--steps", "2", "--batch-size", "2", "--tgt-len", "4", "--mem-len", "4", "--optimizer", "adamw"]
    machine = ["--device", "cpu", "--precision", "fp32"]
    run("train", path, "--init", folder, *flags, *machine, "--out", "tuned")
    assert (tmp_path / "tuned/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert load("tuned", "last").step == 2
    assert "tokens" in run("eval", "--run", "tuned").stdout
    if source == WORDS:
        return
    path.write_text(text + "\n\n東")
    refused = refusal("train", path, "--init", folder, *flags, *machine, "--out", "again")
    assert refused.startswith(f"{path}: not in the vocabulary; got ")
    assert f" at byte {len(text.encode()) + 2}; " in refused
    assert not Path("again").exists()


def test_a_converted_run_has_no_text_and_no_training_of_its_own(words):
    assert "has no held-out text; name a file" in refusal("eval", "--run", words)
    assert f"txl train CORPUS --init {words}" in refusal("train", "--resume", words)


def test_without_a_vocabulary_all_but_text_works(weights_only, tmp_path):
    result = run("convert", weights_only, "--out", "runs/alone")
    assert "text       no vocabulary: no text can be read or written" in result.stdout.splitlines()
    assert "note: vocabulary: none in " in result.stderr
    assert result.stderr.splitlines()[-2:] == ["next  txl bench --run runs/alone", "      txl runs"]
    assert not Path("runs/alone/tokenizer.json").exists()
    (tmp_path / "text.txt").write_text("a b c d e f")
    has_none = "runs/alone: has no tokenizer, since its source had none that txl can use; "
    for command in (
        ["generate", "--run", "runs/alone"],
        ["eval", "text.txt", "--run", "runs/alone"],
        ["train", "text.txt", "--init", "runs/alone", "--device", "cpu"],
    ):
        assert refusal(*command).startswith(has_none)
    (row,) = json.loads(run("runs", "--json").stdout)
    assert (row["tokenizer"], row["n_vocab"], row["step"]) == ("none", 30, 0)
    assert re.search(r"runs/alone +2 × \d+ +none 30 ", run("runs").stdout)
    named = run("convert", weights_only, "--out", "named", "--vocab", VOCABULARY)
    assert "30 words" in named.stdout


# Raw text


def test_moses_goes_with_words_of_a_corpus_and_with_a_file(converted, words, tmp_path, monkeypatch):
    source, folder = converted
    monkeypatch.setattr("txlcli.tokenizer.moses.find_spec", lambda name: object())
    assert refusal("eval", "--run", words, "--moses") == (
        "--moses: goes with FILE only; held-out text is stored as tokens"
    )
    if source != WORDS:
        kind = "byte" if source == BYTES else "char"
        assert refusal("generate", "--run", folder, "--moses") == (
            "--moses: goes with words that white space separates (tokenizer word, newlines eos); "
            f"{folder} has tokenizer {kind}; leave it out"
        )
    monkeypatch.setattr("txlcli.tokenizer.moses.find_spec", lambda name: None)
    missing = "--moses: needs sacremoses, which is not installed; pip install sacremoses"
    assert refusal("generate", "--run", words, "--moses") == missing
    (tmp_path / "text.txt").write_text("The sea.")
    assert refusal("eval", "text.txt", "--run", words, "--moses") == missing


class _Rules:
    """Stands for the library: signs are words, and come back without a space before them."""

    def normalize(self, text):
        return text

    def tokenize(self, text, **_):
        return re.sub(r"([^\w\s])", r" \1 ", text).split()

    def detokenize(self, words, **_):
        return re.sub(r" ([,.=])", r"\1", " ".join(words)).replace(" @-@ ", "-")


def test_raw_text_is_read_split_and_written_joined(words, tmp_path, monkeypatch):
    monkeypatch.setattr("txlcli.tokenizer.moses.find_spec", lambda name: object())
    monkeypatch.setattr(MosesTokenizer, "_rules", (_Rules(), _Rules(), _Rules()))
    raw, split = "the winter, over\nthe sea.\n", "the winter , over\nthe sea .\n"
    (tmp_path / "raw.txt").write_text(raw)
    (tmp_path / "split.txt").write_text(split)
    result = run("eval", "raw.txt", "--run", words, "--moses", "--per-token", "raw.tsv")
    lines = dict(re.findall(r"^(\w+)  +(.*)$", result.stdout, re.MULTILINE))
    assert lines["words"] == (
        "raw text, split by Moses' rules; bytes, characters and words counted are the raw text's"
    )
    assert "byte offsets beside characters that Moses' rules replaced are a guess" in result.stdout
    assert lines["text"].startswith("raw.txt · 26 bytes")
    assert (
        "of the white space only newlines are scored, and other characters are as Moses' rules write them, "
        "so bits per byte and character are lower bounds"
    ) in re.sub(r"\s+", " ", result.stdout)
    scores = [
        json.loads(run("eval", file, "--run", words, "--json", *flags).stdout)["rows"][0]
        for file, flags in (("raw.txt", ["--moses"]), ("split.txt", []))
    ]
    assert scores[0]["total_nll"] == scores[1]["total_nll"]
    assert [row["bytes_scored"] for row in scores] == [len(raw) - 3, len(split) - 3]
    offsets = [line.split("\t")[3] for line in Path("raw.tsv").read_text().splitlines()[1:]]
    assert offsets == [
        str(raw.find(word)) for word in (" winter", ",", " over", "\n", "the sea", " sea", ".")
    ] + ["25"]

    flags = ["--run", words, "--max-tokens", "60", "--seed", "5"]
    plain = run("generate", "--prompt", "the winter ,", *flags, "--no-echo")
    joined = run("generate", "--prompt", "the winter,", *flags, "--no-echo", "--moses")
    rules = _Rules()
    first, *lines = plain.stdout.split("\n")
    texts = [rules.detokenize(line.split()).strip() for line in ("the winter ," + first, *lines)]
    assert joined.stdout == "\n".join(texts).removeprefix("the winter,")
    assert "text split into words; raw text with --moses" in plain.stderr
    assert "raw text, split by Moses' rules" in joined.stderr
    found = json.loads(run("generate", "--prompt", "the winter,", *flags, "--moses", "--json").stdout)
    assert (found["prompt"], found["text"]) == ("the winter,", joined.stdout)
    assert load(words, moses=True).generate("the winter,", max_tokens=60, seed=5).text == joined.stdout


def test_help_of_the_command_loads_no_torch():
    code = (
        "import sys\n"
        "from txlcli.cli import main\n"
        "try:\n"
        "    main(['convert', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'numpy', 'sacremoses'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = {**os.environ, "PYTHONPATH": str(GOLDEN.parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"checkpoint" in done.stdout


def test_a_run_is_not_a_source(words):
    assert refusal("convert", words) == (f"{words}: is a run of txl already; use it with --run or --init")
