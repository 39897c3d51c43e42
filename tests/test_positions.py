import pytest
import torch

from tests import reference
from tests.tolerance import assert_same
from txlcli.positions import relative_sinusoids, sinusoids


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
