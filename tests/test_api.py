import gzip
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import txlcli
from txlcli import UserError, config
from txlcli.api import LanguageModel, load
from txlcli.attention import BACKENDS, Backend, relative_attention
from txlcli.checkpoint import describe_weights, save_checkpoint
from txlcli.data import prepare
from txlcli.evaluate import Score, evaluate, final_score
from txlcli.generate import GeneratedText, Piece, SamplingOptions, in_order
from txlcli.model import TransformerXL
from txlcli.run import Pointers, Run, write_pointers
from txlcli.sources import find_corpus
from txlcli.tokenizer import build_tokenizer

TEXT = "".join(f"the {i} quick brown foxes\njump é over {i * i} dogs.\n" for i in range(40))


@pytest.fixture
def make_run(tmp_path):
    """Make a run with random weights, as training would leave it."""

    def make(kind="char", text=TEXT, name="a", **model):
        source = tmp_path / f"{name}.txt"
        source.write_bytes(text.encode())
        corpus = find_corpus([str(source)], raw=kind == "byte")
        tokenizer = build_tokenizer(
            kind, vocab_size=300, text=lambda: iter([text.encode()]), n_bytes=corpus.n_bytes, seed=0
        )
        run = Run(tmp_path / "runs" / name)
        run.folder.mkdir(parents=True)
        sizes = {"n_layer": 2, "d_model": 16, "n_head": 2, "tgt_len": 8, "mem_len": 12, **model}
        flags = config.from_flags({"corpus": (str(source),), "steps": 3, "tokenizer": kind, **sizes})
        settings = config.build(flags)
        run.config_path.write_text(config.dump(settings), encoding="utf-8")
        tokenizer.save(run.tokenizer_folder)
        list(prepare(corpus, tokenizer, run.folder, split_at=corpus.n_bytes - 200))
        network = TransformerXL(settings.model, tokenizer.n_vocab)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(5)
        for step in (1, 3):
            metadata = describe_weights(settings.model, tokenizer)
            save_checkpoint(run, network, step=step, metadata=metadata, tensors={}, values={})
            network.embed.weight.data.mul_(0.5)
        write_pointers(run, Pointers(best=1, last=3, best_nll=1.0))
        return run

    return make


def test_the_machine_is_set_as_asked(make_run):
    folder = make_run().folder
    with pytest.raises(UserError, match=r"^--attention: unknown backend; got `x`; choose from auto, eager, "):
        load(folder, device="cpu", attention="x")
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        load(folder, device="cpu", attention="eager", deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_load_is_an_attribute_of_the_package(make_run):
    assert txlcli.load is load
    assert txlcli.LanguageModel is LanguageModel
    lm = txlcli.load(make_run().folder, device="cpu")
    assert (lm.step, lm.device.type, lm.model.training) == (1, "cpu", False)
    assert load(str(lm.run.folder), "last", device="cpu").step == 3
    assert load(lm.run.folder, 3, device="cpu").step == 3
    assert load(device="cpu").run.folder.name == "a"  # the run under runs/ that saved last


@pytest.mark.parametrize("kind", ["byte", "char", "word", "sentencepiece"])
def test_generated_log_probs_are_the_scores_of_the_same_text(make_run, kind):
    lm = load(make_run(kind).folder, device="cpu")
    lm.model.double()
    prompt = "the 3 quick"
    result = lm.generate(prompt, max_tokens=30, seed=1, temperature=2, top_p=1, tgt_len=5, mem_len=7)
    assert (result.tokens, result.stop, result.seed, result.prompt) == (30, "length", 1, prompt)

    ids = np.array([*lm.read_prompt(prompt).ids, *result.ids], dtype=np.int64)
    generated = math.fsum(result.logprobs)
    expected = whole(lm, ids, 5, 7) - whole(lm, ids[: -result.tokens], 5, 7)
    assert abs(generated + expected) <= 1e-10 * max(1, abs(expected))


class Tokens:
    def __init__(self, ids):
        self.ids, self.n_tokens = ids, len(ids)

    def read(self, start, stop):
        return self.ids[start:stop]


def whole(lm, ids, tgt_len, mem_len):
    """Total nats of the tokens but the first, by the evaluation that commands use."""
    lengths = lm.model.lengths._replace(tgt_len=tgt_len, mem_len=mem_len)
    return final_score(evaluate(lm.model, Tokens(ids), lengths=lengths)).total_nll


@pytest.mark.parametrize("kind", ["byte", "char", "word", "sentencepiece"])
def test_pieces_are_whole_characters_and_join_to_the_text(make_run, kind):
    lm = load(make_run(kind).folder, device="cpu")
    options = SamplingOptions(max_tokens=60, seed=3, num_samples=2, temperature=3)
    events = list(in_order(lm.stream("the ", options)))
    for k in range(2):
        *pieces, result = (event for event in events if event.sample == k)
        assert isinstance(result, GeneratedText)
        assert all(isinstance(piece, Piece) and piece.text for piece in pieces)
        assert "".join(piece.text for piece in pieces) == result.text
        last = int(lm.read_prompt("the ").ids[-1])
        assert lm.tokenizer.decode(result.ids, after=last).decode("utf-8", "replace") == result.text
        assert not set(result.ids) & set(lm.tokenizer.control_ids)


@pytest.mark.parametrize(("text", "start"), [("abcabc\n" * 200, b"\n"), ("abcbbc" * 200, b"b")])
def test_unseen_characters_are_named_and_an_empty_prompt_works_with_any_corpus(make_run, text, start):
    lm = load(make_run(text=text).folder, device="cpu")
    assert lm.read_prompt("d?d").notices == ("prompt: not in the vocabulary, read as bytes: `d`, `?`",)
    for prompt in ("d?", "", b"\xe2\x98\x83"):
        assert lm.generate(prompt, max_tokens=5, seed=0).tokens == 5
    assert lm.tokenizer.decode([lm.start_id]) == start
    assert lm.read_prompt("").ids.tolist() == [lm.start_id]
    assert lm.generate(max_tokens=5, seed=0).prompt == ""


def test_options_of_generate_are_those_of_sampling(make_run):
    lm = load(make_run().folder, device="cpu")
    free = lm.generate("the", max_tokens=40, seed=2)
    stop = free.text[10:12]
    for given in (stop, [stop], ("\0\0", stop)):
        ended = lm.generate("the", max_tokens=40, seed=2, stop=given)
        assert (ended.text, ended.stop) == (free.text[: free.text.index(stop)], stop)
    several = lm.samples("the", SamplingOptions(max_tokens=40, seed=2, num_samples=3))
    assert [result.sample for result in several] == [0, 1, 2]
    assert [result.seed for result in several] == [2, 2, 2]
    with pytest.raises(UserError, match=r"^--temperature: must be a finite number, 0 or more; got -1$"):
        lm.generate("the", temperature=-1)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "sentencepiece"])
def test_a_text_its_bytes_and_its_file_score_the_same(make_run, tmp_path, kind):
    lm = load(make_run(kind).folder, device="cpu")
    text = TEXT[:150]
    (tmp_path / "text.txt").write_bytes(text.encode())
    scores = [lm.score(source) for source in (text, text.encode(), tmp_path / "text.txt")]
    first = scores[0]
    assert isinstance(first, Score)
    assert len({(s.total_nll, s.tokens, s.n_bytes, s.n_characters) for s in scores}) == 1
    assert first.tokens == len(lm.tokenizer.encode(text.encode())) - 1
    assert first.total_nll / math.log(2) == pytest.approx(first.bits_per_byte * first.n_bytes, rel=1e-12)
    latin = lm.score(text.encode("latin-1"), encoding="latin-1") if kind != "byte" else first
    assert latin.total_nll == first.total_nll


@pytest.mark.parametrize("kind", ["byte", "char"])
@pytest.mark.parametrize("text", ["\ufeffabc def", "PK\x03\x04 abc", "BZh91AY&SY abc", "(\xb5/\xfd abc"])
def test_what_is_no_file_is_scored_exactly_as_it_is(make_run, kind, text):
    lm = load(make_run(kind).folder, device="cpu")
    for source in (text, text.encode(), text.encode("utf-16-le")):
        encoding = None if source in (text, text.encode()) or kind == "byte" else "utf-16-le"
        read = text.encode() if isinstance(source, str) or encoding else source
        assert lm.score(source, encoding=encoding).tokens == len(lm.tokenizer.encode(read)) - 1
    # This mark tells the order of bytes.
    if kind == "char":
        assert lm.score(text.encode("utf-16"), encoding="utf-16").total_nll == lm.score(text).total_nll


def test_packed_bytes_are_scored_as_they_are_and_packed_files_unpacked(make_run, tmp_path):
    lm, packed = load(make_run("byte").folder, device="cpu"), gzip.compress(TEXT.encode())
    (tmp_path / "text.gz").write_bytes(packed)
    assert lm.score(packed).tokens == len(packed) - 1
    assert lm.score(tmp_path / "text.gz").tokens == len(TEXT.encode()) - 1
    with pytest.raises(UserError, match=r"^text: not utf-8 at byte 1, line 1; got 0x8b"):
        load(make_run(name="b").folder, device="cpu").score(packed)


def test_folders_are_read_by_the_patterns_of_the_run(make_run, tmp_path):
    lm = load(make_run().folder, device="cpu")
    data = replace(lm.config.data, include=("*.txt",), exclude=("no*",))
    lm = replace(lm, config=replace(lm.config, data=data))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.log", "no.txt"):
        (folder / name).write_text(name * 9)
    assert lm.score(folder).tokens == len("a.txt" * 9) - 1
    assert lm.score(folder / "b.log").tokens == len("b.log" * 9) - 1
    (folder / "a.txt").unlink()
    with pytest.raises(UserError) as caught:
        lm.score(folder)
    assert str(caught.value) == (
        f"{folder}: --include and --exclude leave no text in this folder; got `*.txt`, `no*`, "
        f"skipped {folder / 'b.log'} (not included), {folder / 'no.txt'} (excluded); it is read so because "
        f"the text of {lm.run.folder} was; name a file"
    )


def test_score_takes_lengths(make_run):
    lm = load(make_run().folder, device="cpu")
    assert lm.score(TEXT, mem_len=0, tgt_len=4).lengths[:2] == (4, 0)
    assert lm.score(TEXT).lengths == lm.model.lengths
    changed = lm.score(TEXT, clamp_len=3, same_length="mem_len+1")
    assert changed.lengths[2:4] == (3, "mem_len+1")
    one, many = (lm.score(TEXT, batch_size=n) for n in (1, 7))
    # Streams side by side change the order of float32 sums.
    assert one.total_nll == pytest.approx(many.total_nll, rel=1e-6)
    assert lm.score_split().tokens > 10
    with pytest.raises(UserError, match="holds no test text"):
        lm.score_split("test")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": "a\ud800"}, "text: not text; got U+D800 at character 1; remove it"),
        ({"text": "a"}, "text: too short to score; got 1 token, needs at least 2"),
        ({"text": b"caf\xe9 au lait"}, "text: not utf-8 at byte 3, line 1; got 0xe9"),
        ({"text": TEXT, "mem_len": -1}, "model.mem_len: must be"),
        ({"text": TEXT, "batch_size": 0}, "batch_size: must be 1 or more; got 0"),
    ],
)
def test_score_refuses_by_name(make_run, call, message):
    with pytest.raises(UserError) as caught:
        load(make_run().folder, device="cpu").score(**call)
    assert str(caught.value).startswith(message)


def test_a_machine_without_the_device_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match=r"^--precision: a CPU has no fp16 arithmetic"):
        load(tmp_path / "nothing", device="cpu", precision="fp16")
    with pytest.raises(UserError, match="no such run folder"):
        load(tmp_path / "nothing", device="cpu")


def test_a_named_attention_that_cannot_run_the_model_is_refused(make_run, monkeypatch):
    def refuses(demands):
        return "plain takes no rows for the values" if demands.has_values else None

    monkeypatch.setitem(BACKENDS, "plain", Backend(relative_attention, refuses))
    with pytest.raises(
        UserError,
        match=r"^--attention: cannot run here; got `plain`; plain takes no rows for the values; "
        r"leave it out, or give \w+$",
    ):
        load(make_run(position="shaw").folder, device="cpu", attention="plain")
    for name, scheme in (("b", {"position": "shaw", "shaw_values": False}), ("c", {})):
        load(make_run(name=name, **scheme).folder, device="cpu", attention="plain")


def test_generation_takes_the_training_precision_on_cuda_only(make_run):
    lm = load(make_run().folder, device="cpu")
    trained = replace(lm.config, machine=replace(lm.config.machine, precision="bf16"))
    on_cpu = replace(lm, config=trained)
    on_cuda = replace(on_cpu, device=torch.device("cuda"))
    assert on_cpu._precision(is_generating=True) == "fp32"
    assert on_cuda._precision(is_generating=False) == "fp32"
    assert replace(on_cuda, precision="fp32")._precision(is_generating=True) == "fp32"


def test_scores_and_prompts_read_text_as_the_run_does(tmp_path):
    from txlcli import train

    text = "the quick brown fox\njumps over\n\n the dog.\n" * 20
    (tmp_path / "text.txt").write_text(text)
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 2, "tgt_len": 8, "mem_len": 8, "batch_size": 2}
    common = {"corpus": (str(tmp_path / "text.txt"),), "steps": 1, "device": "cpu", "lr": 0.01, **sizes}
    for kind in ("byte", "char"):
        flags = config.from_flags({**common, "tokenizer": kind, "newlines": "drop", "spaces": "underscore"})
        *_, ready = train.begin(flags, out=tmp_path / kind)
        list(train.train(ready.run, ready.config))
        lm = load(tmp_path / kind, device="cpu")
        (tmp_path / "other.txt").write_text(text)
        read = text.replace("\n", "").replace(" ", "_")
        scores = [lm.score(one) for one in (text, text.encode(), tmp_path / "other.txt", read)]
        assert len({(one.total_nll, one.tokens, one.n_bytes, one.n_characters) for one in scores}) == 1
        assert scores[0].n_bytes == scores[0].n_characters == len(read) - 1
        assert len({one.n_words for one in scores[:3]}) == 1
        assert scores[0].n_words == len(text.split())
        prompt = lm.read_prompt("the\n dog\n")
        assert prompt.text == "the\n dog\n"
        assert prompt.notices == ()
        assert prompt.ids.tolist() == lm.tokenizer.encode(b"the_dog").tolist()
        assert lm.read_prompt("\n").ids.tolist() == [lm.start_id]
        assert lm.tokenizer.decode([lm.start_id]) == b"_"
        with pytest.raises(UserError, match=r"^text: too short to score; got 1 token, needs at least 2$"):
            lm.score("\na\n")
