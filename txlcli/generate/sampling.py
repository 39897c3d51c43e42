"""From the model's log-probabilities to a token: pure functions over one vocabulary, in float64."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from txlcli import UserError
from txlcli.generate.options import SamplingOptions

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.integer]


def distribution(log_probs: Floats, recent: Ids, control_ids: Ids, options: SamplingOptions) -> Floats:
    """Return the distribution that the next token is drawn from.

    Args:
        log_probs: The model's log-probabilities, [V].
        recent: The last tokens, which the repetition penalty applies to.
        control_ids: Tokens that are never drawn.
        options: Temperature and filters.

    Returns:
        Probabilities, [V], summing to 1.
    """
    scores = log_probs.copy()
    if options.repetition_penalty != 1:
        scores = penalize(scores, recent, options.repetition_penalty)
    scores[control_ids] = -np.inf
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        raise UserError(
            "model: its prediction is not a number; the weights are damaged; try another --checkpoint"
        )
    if options.temperature == 0:
        return np.bincount([best], minlength=len(scores)).astype(np.float64)
    # The best score moves to 0 first, so that no temperature, however small, overflows.
    with np.errstate(over="ignore", under="ignore"):
        probs: Floats = np.exp((scores - scores[best]) / options.temperature)
    probs /= probs.sum()
    probs = keep_top_k(probs, options.top_k)
    probs = keep_top_p(probs, options.top_p)
    return keep_min_p(probs, options.min_p)


def penalize(log_probs: Floats, recent: Ids, penalty: float) -> Floats:
    """Make recent tokens less probable.

        s_i = log p_i - mean_j log p_j
        s_i -> s_i / penalty if s_i > 0 else s_i * penalty          for i in `recent`

    After Keskar et al. 2019, sec. 4.1, who divide raw scores; as a softmax leaves those without a zero, s is
    measured from the mean score.

    Returns:
        New scores, [V], up to a constant the logarithms of probabilities.
    """
    scores: Floats = log_probs - log_probs.mean()
    chosen = scores[recent]
    scores[recent] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    return scores


def keep_top_k(probs: Floats, k: int) -> Floats:
    """Keep the `k` most probable tokens, of equally probable ones those of lower id; 0: all. Normalized."""
    if k == 0 or k >= len(probs):
        return probs
    least = np.partition(probs, -k)[-k]
    kept = probs > least
    kept[np.flatnonzero(probs == least)[: k - np.count_nonzero(kept)]] = True
    return _only(probs, kept)


def keep_top_p(probs: Floats, p: float) -> Floats:
    """Keep the fewest most probable tokens with probability `p` together (Holtzman et al. 2020). Normalized.

    Of equally probable tokens those of lower id come first.
    """
    if p == 1:
        return probs
    # Tokens below (1 - p) / V have less than 1 - p together: none of them is kept, so they need no sorting.
    candidates = np.flatnonzero(probs >= (1 - p) / len(probs))
    candidates = candidates[np.argsort(-probs[candidates], kind="stable")]
    n_kept = int(np.searchsorted(np.cumsum(probs[candidates]), p)) + 1
    kept = np.zeros(len(probs), dtype=np.bool_)
    kept[candidates[:n_kept]] = True
    return _only(probs, kept)


def keep_min_p(probs: Floats, share: float) -> Floats:
    """Keep tokens at least `share` times as probable as the best one (Nguyen et al. 2024). Normalized."""
    return probs if share == 0 else _only(probs, probs >= share * probs.max())


def draw(probs: Floats, uniform: float) -> int:
    """Return the token whose part of [0, 1), cut up in the order of ids, holds `uniform`."""
    tokens = np.flatnonzero(probs)  # after the filters often a small part of the vocabulary
    ends = np.cumsum(probs[tokens])
    index = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
    # Rounding may lift the product to the very end.
    return int(tokens[min(index, len(tokens) - 1)])


def random_stream(seed: int, sample: int) -> np.random.Generator:
    """Return the random stream of a sample, a function of the two numbers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(sample,))))


def _only(probs: Floats, kept: npt.NDArray[np.bool_]) -> Floats:
    restricted: Floats = np.where(kept, probs, 0.0)
    restricted /= restricted.sum()
    return restricted
