import pytest
import torch

from tests import reference
from tests.tolerance import assert_same
from txlcli.positions import (
    AbsoluteSinusoids,
    LearnedDistances,
    LearnedPositions,
    farthest_first,
    relative_sinusoids,
    sinusoids,
)


@pytest.mark.parametrize("d_model", [2, 8, 50])
def test_sinusoids_are_the_formula(d_model):
    distances = torch.tensor([0, 1, 7, 4095])
    expected = torch.stack([reference.sinusoid(int(d), d_model) for d in distances])
    assert_same(sinusoids(distances, d_model, dtype=torch.float64), expected)


def test_rows_run_from_the_farthest_distance_to_zero():
    rows = relative_sinusoids(5, 8, dtype=torch.float64)
    assert torch.equal(rows, sinusoids(torch.tensor([4, 3, 2, 1, 0]), 8, dtype=torch.float64))


def test_clamped_distances_share_one_encoding():
    rows = relative_sinusoids(6, 8, clamp_len=2, dtype=torch.float64)
    assert torch.equal(rows, sinusoids(torch.tensor([2, 2, 2, 2, 1, 0]), 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_still_tells_far_distances_apart(dtype):
    rows = sinusoids(torch.tensor([3000, 3001]), 16, dtype=dtype)
    assert rows.dtype == torch.float32
    assert not torch.equal(rows[0], rows[1])


def test_learned_distances_are_clipped_at_the_largest():
    rows = LearnedDistances(2, 3, 4, has_values=True)
    torch.nn.init.normal_(rows.keys)
    torch.nn.init.normal_(rows.values)
    bias = rows(farthest_first(7))
    expected = [4, 4, 4, 3, 2, 1, 0]
    assert torch.equal(bias.r, rows.keys[:, expected])
    assert torch.equal(bias.values, rows.values[:, expected])
    assert bias.u is None
    assert bias.w is None
    assert LearnedDistances(2, 3, 4, has_values=False)(farthest_first(2)).values is None


def test_absolute_sinusoids_restart_or_run_on():
    start = torch.tensor([0, 300])
    restarting = AbsoluteSinusoids(8, runs_on=False)(start, 2, 3, torch.float64)
    assert torch.equal(restarting, sinusoids(torch.tensor([[2, 3, 4]]), 8, dtype=torch.float64))
    running = AbsoluteSinusoids(8, runs_on=True)(start, 2, 3, torch.float64)
    positions = torch.tensor([[2, 3, 4], [302, 303, 304]])
    assert torch.equal(running, sinusoids(positions, 8, dtype=torch.float64))
    assert start.tolist() == [0, 300]


def test_learned_positions_are_the_rows_of_a_segment():
    table = LearnedPositions(5, 4)
    torch.nn.init.normal_(table.weight)
    out = table(torch.tensor([0, 700]), 1, 3, torch.float32)
    assert torch.equal(out, table.weight[None, 1:4])


def test_far_positions_keep_their_precision():
    # A text of 10^9 tokens: the fastest wave still turns by exactly one radian a token.
    far, next_one = sinusoids(torch.tensor([10**9, 10**9 + 1]), 2, dtype=torch.float64)
    turned = torch.atan2(next_one[0], next_one[1]) - torch.atan2(far[0], far[1])
    # Positions times frequency carry float64's error of 10^9 radians, 1e-7, in sine and cosine.
    assert abs((turned.item() + torch.pi) % (2 * torch.pi) - torch.pi - 1) < 1e-6
