"""What is due at an evaluation: scores of held-out text, and a little text from the model as it is now."""

import math
from collections.abc import Callable, Generator, Iterator

import numpy as np

from txlcli import UserError
from txlcli.device import Precision
from txlcli.evaluate import Score, evaluate
from txlcli.generate import GeneratedText, Prompt, SamplingOptions, generate
from txlcli.model import TransformerXL
from txlcli.run import append_metrics
from txlcli.tokenizer import Tokenizer
from txlcli.train.events import Evaluated, Event, Progress, Sampled
from txlcli.train.machine import scoring_precision
from txlcli.train.session import Session

SAMPLE_TOKENS = 60


def evaluate_if_due(session: Session, should_stop: Callable[[], bool]) -> Generator[Event, None, bool]:
    """Make the evaluations that are due after this step; return whether one was made that is the best so far.

    Periodic evaluations score the same first tokens, so they choose the best step; at the last step a second
    one scores all held-out text where that is cheap against the run.
    """
    counters, train = session.state.counters, session.config.train
    if session.valid is None or not session.is_due(train.eval_every):
        return False
    n_valid = session.valid.n_tokens
    n_slice = min(train.eval_tokens or n_valid, n_valid)
    is_best = False
    if counters.evaluated_step < counters.step:
        score = yield from _score(session, n_slice, should_stop)
        if score is None:
            return False
        counters.evaluated_step = counters.step
        counters.is_scored_whole = n_slice == n_valid
        is_best = score.nll < (math.inf if counters.best_nll is None else counters.best_nll)
        if is_best:
            counters.best_step, counters.best_nll, counters.n_since_best = counters.step, score.nll, 0
            session.best_score = score
        else:
            counters.n_since_best += 1
        yield from _tell_score(session, score, is_best=is_best)
        yield from _sample(session)
    if session.is_last_score_missing():
        score = yield from _score(session, n_valid, should_stop)
        if score is not None:
            counters.is_scored_whole = True
            yield from _tell_score(session, score, is_best=False)
    return is_best


def _score(
    session: Session, n_tokens: int, should_stop: Callable[[], bool]
) -> Generator[Event, None, Score | None]:
    """Score the first held-out tokens with the lengths of training; None: it was cut short."""
    state = session.state
    assert session.valid is not None
    scoring = evaluate(
        state.model,
        session.valid,
        session.counts,
        n_tokens=n_tokens,
        precision=scoring_precision(state.device, state.precision),
        place=str(session.valid.path),
    )
    for event in scoring:
        if isinstance(event, Score):
            return event
        yield Progress("evaluating", event.done, event.total, "tokens")
        if should_stop():
            scoring.close()  # type: ignore[attr-defined]
            return None
    raise AssertionError("an evaluation ends with its score")


def _tell_score(session: Session, score: Score, *, is_best: bool) -> Iterator[Event]:
    assert session.valid is not None
    step, mem_len = session.state.counters.step, session.config.model.mem_len
    session.last_score = score
    append_metrics(
        session.run,
        {
            "event": "eval",
            "step": step,
            "mem_len": mem_len,
            "nll": score.nll,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "tokens": score.tokens,
        },
    )
    is_whole = score.tokens == session.valid.n_tokens - 1
    yield Evaluated(step, score, mem_len, is_best, is_whole)


def _sample(session: Session) -> Iterator[Event]:
    state = session.state
    text = sample_text(
        state.model,
        session.tokenizer,
        session.info.start_id,
        seed=session.config.optim.seed,
        precision=scoring_precision(state.device, state.precision),
    )
    if text:
        yield Sampled(state.counters.step, text)


def sample_text(
    model: TransformerXL, tokenizer: Tokenizer, start_id: int, *, seed: int, precision: Precision
) -> str:
    """Draw some text from an empty prompt; no random state but the sample's own is touched.

    The model is left in training mode. One whose numbers are no longer numbers has no text to give.
    """
    prompt = Prompt("", np.array([start_id], dtype=np.int32))
    options = SamplingOptions(max_tokens=SAMPLE_TOKENS, seed=seed)
    model.eval()
    try:
        for event in generate(model, tokenizer, prompt, options, precision=precision):
            if isinstance(event, GeneratedText):
                return event.text
    except UserError:
        pass  # the loop itself says what went wrong
    finally:
        model.train()
    return ""
