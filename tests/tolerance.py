"""The two comparisons that the numerical tests use, and no other."""

import torch
from torch import Tensor


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Two algebraically equal routes in float64 agree to 1e-10, relative to the largest value."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float64
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= 1e-10 * scale, f"differ by {difference:.3e}, scale {scale:.3e}"


def assert_as_accurate(fast: Tensor, plain: Tensor, exact: Tensor, factor: float = 2) -> None:
    """`fast` is at most `factor` times as far from the truth as `plain`, give or take one last place."""
    assert exact.dtype == torch.float64
    assert fast.shape == plain.shape == exact.shape
    error, allowed = (fast.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    one_place = torch.finfo(plain.dtype).eps * exact.abs().max()
    assert error <= factor * allowed + one_place, f"error {error:.3e}, plain {allowed:.3e}"
