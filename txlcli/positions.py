"""What distance looks like: the sinusoids of the relative encoding.

    R_p = [sin(p w_0), ..., sin(p w_{D/2-1}), cos(p w_0), ..., cos(p w_{D/2-1})],   w_t = 10000^(-2t/D)

(Vaswani et al. 2017, sec. 3.5, over d_model and with all sines first, as in the Transformer-XL authors'
code; Dai et al. 2019, sec. 3.3, feed it the distance p = i - j between a query and a key.)

Distances are listed farthest first, S-1, ..., 1, 0, because that is the order of the keys that the last
query sees.
"""

import torch
from jaxtyping import Float, Real
from torch import Tensor


def sinusoids(
    distances: Real[Tensor, " R"], d_model: int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "R D"]:
    """Return one sinusoid vector per distance.

    Computed in float64 and rounded once: half precision cannot even represent every distance above 256
        (bfloat16), so `dtype` is raised to float32 where it is narrower.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device=distances.device) / d_model
    angles = distances.double()[:, None] * 10000.0**-exponents  # [R, D/2]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.promote_types(dtype, torch.float32))


def relative_sinusoids(
    n_distances: int,
    d_model: int,
    *,
    clamp_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Float[Tensor, "R D"]:
    """Return the sinusoids of distances `n_distances` - 1 down to 0.

    Distances above `clamp_len` share the encoding of `clamp_len` (the authors' `clamp_len`; None: none do).
    """
    distances = torch.arange(n_distances - 1, -1, -1, dtype=torch.float64, device=device)
    if clamp_len is not None:
        distances = distances.clamp(max=clamp_len)
    return sinusoids(distances, d_model, dtype=dtype)
