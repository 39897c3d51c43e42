"""The tests' own check of shapes: that `conftest.py` has put it around the tensor functions."""

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float
from torch import Tensor

from txlcli.attention.eager import align
from txlcli.positions import sinusoids


@jaxtyping.jaxtyped(typechecker=beartype)
def _outer(x: Float[Tensor, "B T"], y: Float[Tensor, "B D"]) -> Float[Tensor, "B T D"]:
    """Return the outer products, or, of equal tensors, the first one doubled: a result of another shape."""
    return x[:, :, None] * y[:, None, :] if x is not y else x + y


def test_parameters_agree_in_the_sizes_of_their_axes():
    assert _outer(torch.ones(2, 3), torch.ones(2, 4)).shape == (2, 3, 4)
    with pytest.raises(BeartypeCallHintParamViolation, match="size of dimension B is 5"):
        _outer(torch.ones(2, 3), y=torch.ones(5, 4))
    with pytest.raises(BeartypeCallHintParamViolation, match="dtype int64"):
        _outer(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4))


def test_the_result_has_the_sizes_of_the_parameters():
    x = torch.ones(2, 3)
    with pytest.raises(BeartypeCallHintReturnViolation, match="2 dimensions, not the 3"):
        _outer(x, x)


def test_the_result_is_checked_also_of_parameters_that_have_passed():
    x = torch.ones(4, 5)
    assert _outer(x, torch.ones(4, 5)).shape == (4, 5, 5)
    with pytest.raises(BeartypeCallHintReturnViolation, match="2 dimensions, not the 3"):
        _outer(x, x)
    assert _outer(x, torch.ones(4, 5)).shape == (4, 5, 5)
    with pytest.raises(BeartypeCallHintParamViolation, match="size of dimension B is 5"):
        _outer(x, torch.ones(5, 5))


def test_each_call_has_sizes_of_its_own():
    assert _outer(torch.ones(2, 3), torch.ones(2, 4)).shape == (2, 3, 4)
    assert _outer(torch.ones(1, 2), torch.ones(1, 5)).shape == (1, 2, 5)


def test_functions_of_the_package_are_checked():
    with pytest.raises(BeartypeCallHintParamViolation):
        sinusoids(torch.ones(2, 3, dtype=torch.bool), 4)
    with pytest.raises(BeartypeCallHintParamViolation):
        align(torch.ones(2, 3), 1)
