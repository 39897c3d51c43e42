import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.config import FLAG, LEAVES, LENGTHS, Config, ModelConfig, Settings, Sourced, build, from_flags
from txlcli.data import steps_per_epoch
from txlcli.plan import (
    ADAPTIVE_FROM,
    EVAL_SHARE,
    EVALUATIONS,
    Facts,
    Known,
    Measured,
    changed_by_plan,
    fit_streams,
    heads,
    intervals,
    is_planned,
    last_eval_is_whole,
    plan_length,
    plan_text,
    plan_vocabulary,
    run_s,
    step_tokens,
    steps_within,
    take_from_run,
)

quick = settings(deadline=None, max_examples=100)

BOOK = Facts(
    n_bytes=3_190_524,
    n_characters=3_030_998,
    alphabet_size=78,
    script="latin",
    device_kind="cpu",
    has_bf16=True,
    has_muon=True,
    n_train_tokens=900_000,
    n_valid_tokens=45_000,
)
CHINESE_NOVEL = dataclasses.replace(
    BOOK, n_bytes=2_570_501, n_characters=818_916, alphabet_size=4_232, script="cjk"
)
SHORT = dataclasses.replace(BOOK, n_bytes=40_000, n_characters=38_000, alphabet_size=50)
MODEL_OF_A_BOOK = {"n_layer": 4, "d_model": 160, "n_head": 4, "tgt_len": 64, "mem_len": 64, "norm": "pre"}
QUICK_MACHINE = Measured(step_s=0.1, eval_s=0.5, eval_token_s=5e-5, save_s=0.05, spent_s=20.0)


def values(planned: Settings) -> dict[str, object]:
    return {name: sourced.value for name, sourced in planned.items()}


def planned(facts: Facts = BOOK, **flags: str) -> dict[str, object]:
    return values(plan_text(from_flags(flags), facts))


def test_a_book_on_a_cpu() -> None:
    found = plan_text({}, BOOK)
    assert values(found) == {
        "device": "cpu",
        "precision": "bf16",
        "attention": "eager",
        "tokenizer": "sentencepiece",
        "vocab_size": 4096,
        "n_layer": 4,
        "d_model": 160,
        "norm": "pre",
        "n_head": 4,
        "d_head": 40,
        "d_inner": 640,
        "tgt_len": 64,
        "mem_len": 64,
        "clamp_len": 96,
        "batch_size": 16,
        "optimizer": "muon",
        "lr": 0.004,
        "schedule": "cosine",
        "lr_end": 0.0,
    }
    assert found["n_layer"].origin == "plan: 4 layers of 160 on a cpu"
    assert found["tokenizer"].origin == "plan: 1 MB of text or more"
    assert found["precision"].origin == "plan: this cpu has bf16 units"
    assert all(sourced.origin.startswith("plan: ") for sourced in found.values())


def test_cuda_takes_a_larger_model() -> None:
    found = planned(dataclasses.replace(BOOK, device_kind="cuda"))
    sizes = ("n_layer", "d_model", "n_head", "d_head", "tgt_len", "mem_len", "batch_size", "device")
    assert [found[name] for name in sizes] == [6, 384, 6, 64, 256, 256, 32, "cuda"]


@pytest.mark.parametrize(
    ("facts", "tokenizer", "vocab_size"),
    [
        (BOOK, "sentencepiece", 4096),
        (CHINESE_NOVEL, "sentencepiece", 8192),
        (dataclasses.replace(BOOK, n_bytes=1_000_000, n_characters=950_000), "sentencepiece", 1024),
        (dataclasses.replace(BOOK, n_bytes=999_999), "char", None),
        (dataclasses.replace(BOOK, n_bytes=10**12, n_characters=10**12), "sentencepiece", 32_768),
        (SHORT, "char", None),
    ],
)
def test_the_unit_follows_the_text(facts: Facts, tokenizer: str, vocab_size: int | None) -> None:
    found = planned(facts)
    assert (found["tokenizer"], found.get("vocab_size")) == (tokenizer, vocab_size)


@pytest.mark.parametrize(
    ("flags", "tokenizer"),
    [
        ({"newlines": "eos"}, "word"),
        ({"newlines": "drop"}, "char"),
        ({"spaces": "underscore"}, "char"),
        ({"newlines": "drop", "spaces": "underscore"}, "char"),
        ({"newlines": "drop", "tokenizer": "byte"}, "byte"),
        ({"newlines": "keep", "spaces": "keep"}, "sentencepiece"),
    ],
)
def test_the_unit_follows_the_rule_for_newlines_and_spaces(flags: dict[str, str], tokenizer: str) -> None:
    assert planned(**flags)["tokenizer"] == tokenizer


def test_vocabulary_of_a_tokenizer_asked_for() -> None:
    assert planned(SHORT, tokenizer="sentencepiece")["vocab_size"] == 512
    assert planned(BOOK, tokenizer="word")["vocab_size"] == 16_384
    assert planned(BOOK, tokenizer="word", vocab_size="none")["vocab_size"] is None
    assert planned(BOOK, tokenizer="word", vocab_size="77")["vocab_size"] == 77
    assert "vocab_size" not in planned(BOOK, tokenizer="char")
    raw = dataclasses.replace(BOOK, n_characters=None, alphabet_size=0, script="none")
    assert "vocab_size" not in planned(raw, tokenizer="byte")


@pytest.mark.parametrize(
    ("kind", "has_bf16", "precision"),
    [
        ("cpu", True, "bf16"),
        ("cpu", False, "fp32"),
        ("cuda", True, "bf16"),
        ("cuda", False, "fp32"),
        ("mps", True, "fp32"),
    ],
)
def test_precision_follows_the_device(kind: str, has_bf16: bool, precision: str) -> None:
    facts = dataclasses.replace(BOOK, device_kind=kind, has_bf16=has_bf16)
    assert planned(facts)["precision"] == precision
    assert planned(facts, precision="auto")["precision"] == precision
    assert planned(facts, precision="fp16")["precision"] == "fp16"


def test_auto_is_left_to_the_plan_and_a_name_is_not() -> None:
    facts = dataclasses.replace(BOOK, device_kind="cuda")
    assert planned(facts, device="auto", attention="auto")["device"] == "cuda"
    assert planned(facts, device="cuda:1")["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("flags", "d_model", "n_head", "d_head", "d_inner"),
    [
        ({"d_model": "64"}, 64, 2, 32, 256),
        ({"d_model": "256"}, 256, 8, 32, 1024),
        ({"d_model": "194"}, 194, 2, 97, 776),
        ({"d_model": "2"}, 2, 1, 2, 8),
        ({"n_head": "5"}, 160, 5, 32, 640),
        ({"n_head": "3"}, 162, 3, 54, 648),
        ({"n_head": "7"}, 154, 7, 22, 616),
        ({"d_head": "64"}, 160, 2, 64, 640),
        ({"d_head": "300"}, 160, 1, 300, 640),
        ({"d_inner": "99"}, 160, 4, 40, 99),
        ({"n_head": "3", "d_head": "10"}, 160, 3, 10, 640),
        ({"d_model": "128", "n_head": "8"}, 128, 8, 16, 512),
    ],
)
def test_widths_fit_the_one_given(
    flags: dict[str, str], d_model: int, n_head: int, d_head: int, d_inner: int
) -> None:
    model = build(plan_text(from_flags(flags), BOOK)).model
    assert (model.d_model, model.n_head, model.d_inner) == (d_model, n_head, d_inner)
    assert model.d_head == d_head or "d_head" not in flags


@quick
@given(d_model=st.integers(1, 5000).map(lambda half: 2 * half), kind=st.sampled_from(["cpu", "cuda", "mps"]))
def test_any_width_alone_gives_heads_that_divide_it(d_model: int, kind: str) -> None:
    facts = dataclasses.replace(BOOK, device_kind=kind)
    model = build(plan_text(from_flags({"d_model": str(d_model)}), facts)).model
    assert model.n_head * model.d_head == d_model


@quick
@given(n_head=st.integers(1, 2000))
def test_any_number_of_heads_alone_gives_a_width_that_they_divide(n_head: int) -> None:
    model = build(plan_text(from_flags({"n_head": str(n_head)}), BOOK)).model
    assert (model.n_head, model.n_head * model.d_head) == (n_head, model.d_model)


def test_heads_that_do_not_divide_a_width_are_refused_not_mended() -> None:
    with pytest.raises(UserError) as error:
        build(plan_text(from_flags({"d_model": "100", "n_head": "3"}), BOOK))
    assert str(error.value).startswith("--n-head: n_head 3 does not divide d_model 100")


def test_memory_is_as_long_as_the_segment_asked_for() -> None:
    assert planned(tgt_len="32")["mem_len"] == 32
    assert planned(mem_len="0")["tgt_len"] == 64
    assert (planned(mem_len="0")["mem_len"], planned(mem_len="7")["mem_len"]) == (0, 7)


def test_distances_that_training_hardly_sees_share_one_encoding() -> None:
    lengths = [("64", "64"), ("64", "0"), ("64", "256"), ("256", "64"), ("1", "1")]
    found = [planned(tgt_len=tgt_len, mem_len=mem_len)["clamp_len"] for tgt_len, mem_len in lengths]
    assert found == [96, 64, 288, 256, 1]
    assert planned(clamp_len="none")["clamp_len"] is None
    assert planned(clamp_len="5")["clamp_len"] == 5


@pytest.mark.parametrize("position", ["shaw", "sinusoid", "learned"])
@pytest.mark.parametrize("facts", [BOOK, dataclasses.replace(BOOK, device_kind="cuda")])
def test_only_the_relative_encoding_is_clamped_unasked(position: str, facts: Facts) -> None:
    found = planned(facts, position=position)
    assert "clamp_len" not in found
    assert found["position"] == position
    assert planned(facts, position="relative")["clamp_len"] is not None
    assert planned(facts, position="shaw", clamp_len="5")["clamp_len"] == 5


def test_rows_of_shaw_reach_as_far_as_the_lengths_that_the_plan_finds() -> None:
    model = build(plan_text(from_flags({"position": "shaw"}), dataclasses.replace(BOOK, device_kind="cuda")))
    assert model.model.max_relative_position == 256
    assert build(plan_text(from_flags({"position": "shaw", "mem_len": "99"}), BOOK)).model == ModelConfig(
        **{**MODEL_OF_A_BOOK, "position": "shaw", "mem_len": 99, "max_relative_position": 99}
    )


def clusters(n_vocab: int, *, from_file: bool = False, **flags: str) -> Sourced | None:
    facts = dataclasses.replace(BOOK, n_vocab=n_vocab)
    before = plan_text(from_flags(flags), facts, from_file=from_file)
    after = plan_vocabulary(before, facts, from_file=from_file)
    assert {name: sourced for name, sourced in after.items() if name != "cutoffs"} == {
        name: sourced for name, sourced in before.items() if name != "cutoffs"
    }
    return after.get("cutoffs")


def test_clusters_stand_where_the_authors_put_them() -> None:
    words = {"tokenizer": "word", "d_model": "1024", "n_head": "16"}
    assert clusters(267_735, **words) == Sourced(
        (13_000, 40_000, 110_000), "plan: for a vocabulary of 267,735"
    )
    assert clusters(793_471, **words).value == (40_000, 120_000, 320_000)
    assert clusters(ADAPTIVE_FROM, **words).value == (400, 1_200, 3_200)


def test_clusters_are_for_many_words_unless_asked_for() -> None:
    none = Sourced((), "plan: no gain from clusters below a vocabulary of 8,000")
    assert clusters(ADAPTIVE_FROM - 1, tokenizer="word") == none
    assert clusters(1, tokenizer="word", cutoffs="auto", div_val="4") == none
    for tokenizer in ("byte", "char", "sentencepiece"):
        unasked = clusters(ADAPTIVE_FROM, tokenizer=tokenizer)
        assert unasked == Sourced((), "plan: clusters are for vocabularies of words")
        assert clusters(ADAPTIVE_FROM, tokenizer=tokenizer, cutoffs="auto").value == (400, 1_200, 3_200)
        assert clusters(3, tokenizer=tokenizer, cutoffs="auto", div_val="4") == none


def test_cutoffs_that_are_set_stay() -> None:
    for tokenizer in ("word", "char"):
        assert clusters(50_000, tokenizer=tokenizer, cutoffs="none") == Sourced((), FLAG)
        assert clusters(50_000, tokenizer=tokenizer, cutoffs="7,100") == Sourced((7, 100), FLAG)


def test_with_a_file_clusters_are_derived_only_where_it_says_auto() -> None:
    assert clusters(50_000, from_file=True, tokenizer="word") is None
    assert clusters(50_000, from_file=True, tokenizer="word", cutoffs="none") == Sourced((), FLAG)
    found = clusters(50_000, from_file=True, tokenizer="word", cutoffs="auto")
    assert found == Sourced((2_500, 7_500, 20_000), "plan: for a vocabulary of 50,000")


@pytest.mark.parametrize(
    ("flags", "n_clusters"),
    [
        ({"d_embed": "64", "div_val": "4"}, 3),
        ({"d_embed": "63", "div_val": "4"}, 2),
        ({"d_embed": "15", "div_val": "4"}, 1),
        ({"d_embed": "3", "div_val": "4"}, 0),
        ({"d_model": "16", "div_val": "4"}, 2),
        ({"d_embed": "1"}, 3),
        ({"d_embed": "none", "div_val": "5"}, 3),
        ({"d_embed": "none", "div_val": "6"}, 2),
    ],
)
def test_there_are_no_more_clusters_than_have_a_width(flags: dict[str, str], n_clusters: int) -> None:
    found = clusters(50_000, tokenizer="word", **flags)
    assert found.value == (2_500, 7_500, 20_000)[:n_clusters]
    assert found.origin.endswith(" leaves no width for more") == (n_clusters < 3)


@quick
@given(
    n_vocab=st.integers(1, 2_000_000),
    d_embed=st.integers(1, 2000),
    div_val=st.integers(1, 1024),
    tokenizer=st.sampled_from(["byte", "char", "word", "sentencepiece"]),
)
def test_derived_clusters_fit_any_vocabulary(
    n_vocab: int, d_embed: int, div_val: int, tokenizer: str
) -> None:
    flags = {"cutoffs": "auto", "d_embed": str(d_embed), "div_val": str(div_val), "tokenizer": tokenizer}
    found = clusters(n_vocab, **flags)
    assert is_planned(found)
    assert isinstance(found.value, tuple)
    # 5 %, 15 % and 40 %, rounded to two figures: by 5 % at most.
    for start, share in zip(found.value, (0.05, 0.15, 0.4), strict=False):
        assert start == pytest.approx(share * n_vocab, rel=0.05)


@pytest.mark.parametrize(
    ("origin", "place"),
    [(FLAG, "--cutoffs:"), ("c.yaml:4", "c.yaml:4: cutoffs"), ("init: a", "model.cutoffs:")],
)
def test_clusters_beyond_the_vocabulary_are_refused_at_their_place(origin: str, place: str) -> None:
    before = {"cutoffs": Sourced((20, 204), origin)}
    with pytest.raises(UserError) as error:
        plan_vocabulary(before, dataclasses.replace(BOOK, n_vocab=204), from_file=True)
    assert str(error.value) == (
        f"{place} must stay below the vocabulary of 204; got 20,204; "
        "give smaller ones, or auto to derive them"
    )
    assert plan_vocabulary(before, dataclasses.replace(BOOK, n_vocab=205), from_file=True) == before


def test_streams_split_into_the_parts_asked_for() -> None:
    assert [planned(accumulate=parts)["batch_size"] for parts in ("1", "3", "16", "40")] == [16, 18, 16, 40]


def test_optimizer() -> None:
    assert planned(dataclasses.replace(BOOK, has_muon=False))["optimizer"] == "adamw"
    assert planned(optimizer="sgd")["lr"] == 0.3
    assert planned(lr="1")["lr"] == 1.0


def test_with_a_file_only_the_machine_is_found() -> None:
    file = {"n_layer": Sourced(9, "c.yaml:2"), "precision": Sourced("auto", "c.yaml:3")}
    found = plan_text(file, BOOK, from_file=True)
    assert set(found) == {"n_layer", "device", "precision", "attention"}
    assert found["precision"] == Sourced("bf16", "plan: this cpu has bf16 units")
    length = plan_length(found | {"steps": Sourced(40, "c.yaml:9")}, BOOK, from_file=True)
    assert "warmup" not in length
    assert build(length).optim.warmup == 50


def test_steps_given_are_not_measured() -> None:
    def measure(settings: Settings) -> Measured:
        raise AssertionError("nothing is measured for a length in steps")

    length = plan_length(plan_text(from_flags({"steps": "4000"}), BOOK), BOOK, measure)
    assert length["steps"] == Sourced(4000, FLAG)
    names = ("eval_every", "save_every", "log_every", "warmup", "eval_tokens")
    # 0.05 x 4,000 steps x (899,999 / 879) tokens / (20 evaluations x 2/3)
    assert [length[name].value for name in names] == [200, 200, 20, 200, 15_358]
    assert length["eval_tokens"].origin == "plan: evaluations cost at most 5% of the run"


def test_epochs_become_steps() -> None:
    length = plan_length(plan_text(from_flags({"epochs": "1.5"}), BOOK), BOOK)
    assert length["steps"] == Sourced(1318, "plan: 1.5 epochs of 879 steps")
    assert "epochs" not in length
    tiny = plan_length(plan_text(from_flags({"epochs": "0.001"}), SHORT), SHORT)
    assert tiny["steps"].value == 1


def test_minutes_become_steps_that_end_in_time() -> None:
    asked = []

    def measure(settings: Settings) -> Measured:
        asked.append(settings)
        return QUICK_MACHINE

    length = plan_length(plan_text(from_flags({"minutes": "3"}), BOOK), BOOK, measure)
    steps = length["steps"].value
    assert isinstance(steps, int)
    assert length["steps"].origin == "plan: 3 minutes at 0.1 s a step"
    assert not set(LENGTHS) & set(length) - {"steps"}
    assert len(asked) == 1
    assert asked[0]["minutes"] == Sourced(3.0, FLAG)
    known = Known({name: sourced for name, sourced in length.items() if name in asked[0]})
    seconds = run_s(steps, known, BOOK, QUICK_MACHINE)
    assert 0.98 * 160 < seconds <= 160


def test_nothing_said_of_the_length_is_ten_minutes() -> None:
    length = plan_length(plan_text({}, BOOK), BOOK, lambda settings: QUICK_MACHINE)
    assert length["steps"].origin == "plan: 10 minutes at 0.1 s a step"
    assert "minutes" not in length


def test_without_a_measurement_the_length_stays_open() -> None:
    length = plan_length(plan_text({}, BOOK), BOOK)
    assert length["minutes"] == Sourced(10.0, "plan: nothing said of the length")
    assert "steps" not in length


@quick
@given(
    seconds=st.floats(-100, 1e5),
    step_s=st.floats(1e-4, 100),
    eval_s=st.floats(0, 10),
    eval_token_s=st.floats(0, 1e-3),
    save_s=st.floats(0, 10),
    flags=st.sampled_from([{}, {"eval_every": "7"}, {"save_every": "3", "eval_tokens": "500"}]),
    n_valid=st.sampled_from([0, 2, 45_000]),
)
def test_steps_fill_the_time_and_no_more(
    seconds: float,
    step_s: float,
    eval_s: float,
    eval_token_s: float,
    save_s: float,
    flags: dict[str, str],
    n_valid: int,
) -> None:
    facts = dataclasses.replace(BOOK, n_valid_tokens=n_valid)
    measured = Measured(step_s=step_s, eval_s=eval_s, eval_token_s=eval_token_s, save_s=save_s, spent_s=0)
    known = Known(plan_text(from_flags(flags), facts))
    steps = steps_within(seconds, known, facts, measured)
    assert steps >= 1
    assert steps == 1 or run_s(steps, known, facts, measured) <= seconds
    assert run_s(steps + 1, known, facts, measured) > seconds


@quick
@given(
    steps=st.integers(1, 10**6), n_valid=st.integers(2, 10**7), precision=st.sampled_from(["fp32", "bf16"])
)
def test_evaluations_are_at_most_twenty_and_cheap(steps: int, n_valid: int, precision: str) -> None:
    facts = dataclasses.replace(BOOK, n_valid_tokens=n_valid)
    known = Known(plan_text(from_flags({"precision": precision}), facts))
    found = values(intervals(known, facts, steps))
    every, n_slice = found["eval_every"], found["eval_tokens"]
    assert isinstance(every, int)
    assert isinstance(n_slice, int)
    n_evals = -(-steps // every)
    assert n_evals <= EVALUATIONS
    assert steps < EVALUATIONS or n_evals > EVALUATIONS / 2
    assert 2 <= n_slice <= n_valid
    trained = steps * step_tokens(known, facts)
    cost = {"fp32": 1 / 3, "bf16": 2 / 3}[precision]
    assert n_slice == 2 or n_evals * n_slice * cost <= EVAL_SHARE * trained
    assert n_slice == n_valid or n_evals * (n_slice + 1) * cost > EVAL_SHARE * trained or n_slice == 2


def test_nothing_held_out_is_never_evaluated() -> None:
    facts = dataclasses.replace(BOOK, n_valid_tokens=1)
    length = plan_length(plan_text(from_flags({"steps": "50"}), facts), facts)
    assert "eval_every" not in length
    assert "eval_tokens" not in length
    assert length["save_every"].value == 3


def test_eval_tokens_none_scores_all_held_out_text() -> None:
    length = plan_length(from_flags({"steps": "5", "eval_tokens": "none"}), BOOK)
    assert length["eval_tokens"].value == 45_000


@pytest.mark.parametrize(("n_valid", "n_trained", "is_whole"), [(10, 100, True), (11, 100, False)])
def test_the_last_evaluation_scores_all_if_that_is_little(
    n_valid: int, n_trained: int, is_whole: bool
) -> None:
    assert last_eval_is_whole(n_valid, n_trained) == is_whole


@pytest.mark.parametrize(
    ("n_tokens", "flags", "n_stream", "accumulate"),
    [
        (2049, {}, 16, 1),
        (2048, {}, 15, 1),
        (600, {}, 4, 1),
        (12, {}, 1, 1),
        (1, {}, 1, 1),
        (12, {"batch_size": "64"}, 11, 1),
        (12, {"batch_size": "64", "accumulate": "4"}, 11, 1),
        (13, {"batch_size": "64", "accumulate": "8"}, 12, 4),
        (1000, {"batch_size": "64"}, 64, 1),
    ],
)
def test_streams_fit_a_short_text(
    n_tokens: int, flags: dict[str, str], n_stream: int, accumulate: int
) -> None:
    facts = dataclasses.replace(SHORT, n_train_tokens=n_tokens)
    before = plan_text(from_flags(flags), facts)
    config = build(plan_length(before | from_flags({"steps": "5"}), facts))
    assert (config.optim.batch_size, config.optim.accumulate) == (n_stream, accumulate)


def test_what_was_asked_for_and_not_taken_is_said() -> None:
    facts = dataclasses.replace(SHORT, n_train_tokens=12)
    before = plan_text(from_flags({"batch_size": "64", "steps": "5"}), facts)
    assert list(changed_by_plan(before, plan_length(before, facts))) == [
        "batch_size: 64 asked for, 11 taken: the text has only 12 tokens"
    ]
    before = plan_text(from_flags({"steps": "5"}), facts)
    assert list(changed_by_plan(before, plan_length(before, facts))) == []
    before = plan_text(from_flags({"steps": "5", "precision": "auto"}), BOOK)
    assert list(changed_by_plan(from_flags({"precision": "auto"}), before)) == []


@quick
@given(n_tokens=st.integers(2, 10**7), n_stream=st.integers(1, 300), tgt_len=st.integers(1, 300))
def test_epochs_are_those_of_the_batches(n_tokens: int, n_stream: int, tgt_len: int) -> None:
    facts = dataclasses.replace(BOOK, n_train_tokens=n_tokens)
    flags = {"batch_size": str(n_stream), "tgt_len": str(tgt_len), "epochs": "1"}
    length = plan_length(from_flags(flags), facts)
    assert length["steps"].value == steps_per_epoch(n_tokens, min(n_stream, n_tokens - 1), tgt_len)


def test_the_plan_changes_nothing_that_is_set() -> None:
    config = Config(
        model=ModelConfig(n_layer=2, d_model=32, n_head=2), optim=dataclasses.replace(Config().optim, lr=0.1)
    )
    given_settings = {
        item.name: Sourced(getattr(getattr(config, item.section), item.name), FLAG) for item in LEAVES
    }
    given_settings["steps"] = Sourced(7, FLAG)
    after = plan_length(plan_text(given_settings, BOOK), BOOK)
    changed = {name for name, sourced in after.items() if sourced != given_settings[name]}
    left_open = {name for name, sourced in given_settings.items() if sourced.value in (None, "auto")}
    assert changed <= left_open


@quick
@given(
    position=st.sampled_from(["relative", "shaw", "sinusoid", "learned"]),
    cutoffs=st.sampled_from(["none", "10", "10,20000"]),
    tokenizer=st.sampled_from(["word", "sentencepiece"]),
    div_val=st.sampled_from(["1", "2"]),
    mem_len=st.sampled_from(["0", "7", "640"]),
    from_file=st.booleans(),
)
def test_the_plan_leaves_scheme_and_clusters_as_they_are_set(from_file: bool, **flags: str) -> None:
    facts = dataclasses.replace(BOOK, n_vocab=50_000)
    before = from_flags({**flags, "steps": "7"})
    after = plan_vocabulary(plan_text(before, facts, from_file=from_file), facts, from_file=from_file)
    after = plan_length(after, facts, from_file=from_file)
    assert {name: after[name] for name in before} == before
    model = build(after).model
    assert (model.clamp_len is None) == (from_file or flags["position"] != "relative")


def test_the_plan_finds_exactly_the_settings_marked_so() -> None:
    found: set[str] = set()
    for facts, has_muon in itertools.product((BOOK, SHORT), (True, False)):
        one = dataclasses.replace(facts, has_muon=has_muon)
        before = plan_vocabulary(plan_text({}, one), one)
        found |= set(plan_length(before, one, lambda settings: QUICK_MACHINE))
    assert found == {item.name for item in LEAVES if item.is_planned}


def test_every_plan_builds() -> None:
    for kind, muon, facts in itertools.product(
        ("cpu", "cuda", "mps"), (True, False), (BOOK, CHINESE_NOVEL, SHORT)
    ):
        one = dataclasses.replace(facts, device_kind=kind, has_muon=muon)
        for n_vocab in (2, 50_000):
            one = dataclasses.replace(one, n_vocab=n_vocab)
            before = plan_vocabulary(plan_text({}, one), one)
            config = build(plan_length(before, one, lambda settings: QUICK_MACHINE))
            assert config.machine.device == kind
            assert muon or config.optim.optimizer != "muon"
            steps = config.train.steps
            assert steps is not None
            assert 0 < config.train.eval_every <= steps
            assert 0 < config.train.save_every <= steps


def test_rules_do_not_write_into_what_they_are_given() -> None:
    before = from_flags({"batch_size": "64", "steps": "5"})
    copy = dict(before)
    plan_length(plan_text(before, SHORT), dataclasses.replace(SHORT, n_train_tokens=5))
    heads(Known(before), BOOK)
    fit_streams(Known(before), dataclasses.replace(SHORT, n_train_tokens=5))
    plan_vocabulary(before, dataclasses.replace(SHORT, n_vocab=50_000))
    assert before == copy


def test_weights_of_another_run_bring_their_settings() -> None:
    theirs = Config(model=ModelConfig(n_layer=3, d_model=48, n_head=2, mem_len=99, dropout=0.3))
    ours = take_from_run(from_flags({"mem_len": "10", "n_layer": "3"}), theirs, "runs/a")
    assert ours["d_model"] == Sourced(48, "init: runs/a")
    assert ours["tokenizer"] == Sourced("sentencepiece", "init: runs/a")
    assert ours["mem_len"] == Sourced(10, FLAG)
    assert "dropout" not in ours
    assert build(plan_text(ours, BOOK)).model == dataclasses.replace(
        theirs.model, mem_len=10, clamp_len=64, dropout=0.0
    )


SHAPED = ModelConfig(
    n_layer=3,
    d_model=48,
    n_head=2,
    position="shaw",
    max_relative_position=9,
    shaw_values=False,
    d_embed=32,
    cutoffs=(10, 40),
    div_val=2,
    tie_projs="all",
    proj_same_dim=False,
    tied=False,
)


def test_scheme_and_clusters_come_with_weights() -> None:
    ours = take_from_run(from_flags({"cutoffs": "auto", "div_val": "2"}), Config(model=SHAPED), "runs/a")
    assert ours["cutoffs"] == Sourced((10, 40), "init: runs/a")
    assert "tgt_len" not in ours
    facts = dataclasses.replace(BOOK, n_vocab=50_000)
    for from_file in (False, True):
        after = plan_vocabulary(plan_text(ours, facts, from_file=from_file), facts, from_file=from_file)
        # The plan adds neither a clamp_len nor clusters of its own.
        assert build(after).model == SHAPED


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("cutoffs", "10,50", "--cutoffs: comes with --init; got 10,50, runs/a has 10,40; leave it out"),
        ("cutoffs", "none", "--cutoffs: comes with --init; got none, runs/a has 10,40; leave it out"),
        (
            "position",
            "relative",
            "--position: comes with --init; got relative, runs/a has shaw; leave it out",
        ),
        ("shaw_values", "true", "--shaw-values: comes with --init; got true, runs/a has false; leave it out"),
        ("untie_r", "true", "--untie-r: comes with --init; got true, runs/a has false; leave it out"),
        ("tied", "true", "--tied: comes with --init; got true, runs/a has false; leave it out"),
        (
            "max_relative_position",
            "8",
            "--max-relative-position: comes with --init; got 8, runs/a has 9; leave it out",
        ),
    ],
)
def test_another_scheme_or_clusters_cannot_go_with_weights(flag: str, value: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        take_from_run(from_flags({flag: value}), Config(model=SHAPED), "runs/a")
    assert str(error.value) == text


def test_a_learned_table_comes_with_its_length() -> None:
    theirs = Config(model=ModelConfig(position="learned", tgt_len=48, mem_len=10))
    ours = take_from_run(from_flags({"mem_len": "7"}), theirs, "runs/a")
    assert ours["tgt_len"] == Sourced(48, "init: runs/a")
    assert build(plan_text(ours, BOOK)).model == dataclasses.replace(theirs.model, mem_len=7)
    assert take_from_run(from_flags({"tgt_len": "48"}), theirs, "runs/a")["tgt_len"].value == 48
    for tgt_len in ("47", "49"):
        with pytest.raises(UserError) as error:
            take_from_run(from_flags({"tgt_len": tgt_len}), theirs, "runs/a")
        assert str(error.value) == (
            "--tgt-len: comes with --init and its learned positions; "
            f"got {tgt_len}, runs/a has 48; leave it out"
        )


@pytest.mark.parametrize(("origin", "place"), [(FLAG, "--d-model"), ("c.yaml:4", "c.yaml:4: d_model")])
def test_weights_of_another_run_cannot_be_reshaped(origin: str, place: str) -> None:
    with pytest.raises(UserError) as error:
        take_from_run({"d_model": Sourced(64, origin)}, Config(), "runs/a")
    assert str(error.value) == f"{place}: comes with --init; got 64, runs/a has 160; leave it out"
