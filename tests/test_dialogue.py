"""A text that user and model write in turn: what the model sees of it."""

import numpy as np
import pytest
import torch

from tests.test_generate import LETTERS, SCHEMES, START, evaluated, letters, make_model, results
from tests.tolerance import assert_same
from txlcli.generate import Dialogue, GeneratedText, Piece, SamplingOptions, encode_prompt


def begin(model, **options):
    return Dialogue(model, LETTERS, SamplingOptions(**{"max_tokens": 5, "seed": 3, **options}))


def add(dialogue, text):
    """Add a text, and return the answer as a whole."""
    start = START if dialogue.n_answers == 0 else None
    *pieces, result = dialogue.answer(encode_prompt(LETTERS, text, start))
    assert isinstance(result, GeneratedText)
    assert "".join(piece.text for piece in pieces) == result.text
    return result


def ids_of(text):
    return LETTERS.encode(text.encode()).tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tgt_len", "mem_len"), [(4, 6), (3, 3), (1, 5), (4, 0), (5, 1000)])
def test_each_answer_sees_all_of_the_text_and_reads_nothing_twice(scheme, tgt_len, mem_len, monkeypatch):
    model = make_model(**SCHEMES[scheme], tgt_len=4 if scheme == "learned" else tgt_len)
    if scheme == "learned":
        tgt_len = 4
    dialogue = begin(model, tgt_len=tgt_len, mem_len=mem_len, temperature=2)
    n_read, extend = 0, model.extend

    def count(tokens, cache):
        nonlocal n_read
        n_read += tokens.shape[1]
        return extend(tokens, cache)

    monkeypatch.setattr(model, "extend", count)
    ids, nats, places = [], [], []
    for text in ("abc", "", letters(9), "h", letters(2)):
        result = add(dialogue, text)
        ids += [*ids_of(text), *result.ids]
        places += range(len(ids) - len(result.ids), len(ids))
        nats += [-value for value in result.logprobs]
    assert n_read == len(ids) - 1
    monkeypatch.undo()
    expected = evaluated(model, ids, model.lengths._replace(tgt_len=tgt_len, mem_len=mem_len))
    assert_same(torch.tensor(nats, dtype=torch.float64), expected[places])


def test_a_first_answer_is_what_generation_gives_and_a_dialogue_repeats():
    model = make_model()
    dialogue, again = begin(model), begin(model)
    first = add(dialogue, "abc")
    (generated,) = results(model, "abc", max_tokens=5, seed=3)
    assert (first.text, first.ids) == (generated.text, generated.ids)
    float64 = torch.float64
    assert_same(torch.tensor(first.logprobs, dtype=float64), torch.tensor(generated.logprobs, dtype=float64))
    assert add(again, "abc").ids == first.ids
    second = add(dialogue, "de")
    assert (first.sample, second.sample) == (0, 1)
    assert add(again, "de").ids == second.ids
    assert add(begin(model), "").ids == results(model, "", max_tokens=5, seed=3)[0].ids


def test_an_answer_that_is_left_stays_as_far_as_it_was_drawn():
    model = make_model()
    dialogue = begin(model, max_tokens=9)
    events = dialogue.answer(encode_prompt(LETTERS, "abc", START))
    drawn = [next(events) for _ in range(4)]
    events.close()
    assert all(isinstance(piece, Piece) for piece in drawn)
    text = "abc" + "".join(piece.text for piece in drawn)
    result = add(dialogue, "de")
    ids = [*ids_of(text + "de"), *result.ids]
    log_probs = -torch.tensor(result.logprobs, dtype=torch.float64)
    assert_same(log_probs, evaluated(model, ids, model.lengths)[-9:])


def test_stop_texts_stay_in_memory_and_the_penalty_looks_back_at_all():
    model = make_model()
    stopped = begin(model, stop=("a", "b", "c", "d"), max_tokens=50)
    first = add(stopped, "abc")
    assert first.stop in "abcd"
    result = add(stopped, "h")
    ids = [*ids_of("abc" + first.text + first.stop + "h"), *result.ids]
    log_probs = -torch.tensor(result.logprobs, dtype=torch.float64)
    assert_same(log_probs, evaluated(model, ids, model.lengths)[-len(result.ids) :])

    penalized = begin(model, repetition_penalty=1e9, temperature=0, max_tokens=1, mem_len=6)
    drawn = [add(penalized, text).ids[0] for text in ("ab", "", "", "", "")]
    assert len({*ids_of("ab"), *drawn[:4]}) == 6  # none of the last six tokens comes again
    assert np.isin(drawn[4], [*ids_of("a"), *drawn[:4]], invert=True)
