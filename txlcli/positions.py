"""How positions enter: four schemes, each by what it adds to the input and what it gives to attention.

    scheme      added to the input       given to attention (see `RelativeBias`)
    relative    -                        keys W_r R_d of distances d, and two query biases (Dai et al. 2019)
    shaw        -                        learned rows of distances, for keys and values (Shaw et al. 2018)
    sinusoid    R_p of the position p    - (Vaswani et al. 2017)
    learned     row p of a table         - (Vaswani et al. 2017, table 3, row E)

with the sinusoids

    R_p = [sin(p w_0), ..., sin(p w_{D/2-1}), cos(p w_0), ..., cos(p w_{D/2-1})],   w_t = 10000^(-2t/D)

(Vaswani et al. 2017, sec. 3.5, over d_model and with all sines first, as in the Transformer-XL authors'
code; Dai et al. 2019, sec. 3.3, feed it the distance p = i - j between a query and a key.)

Distances are listed farthest first, R-1, ..., 1, 0, because that is the order of the keys that the last
query sees. Absolute positions count from 0 at the start of each segment; those of `sinusoid` may instead run
on from the start of the text. Where they restart, rows of memory carry the positions of their own segments,
so that two keys of one position are told apart by content alone.
"""

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor, nn

from txlcli.attention import RelativeBias


def sinusoids(
    positions: Real[Tensor, "*shape"], d_model: int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*shape D"]:
    """Return one sinusoid vector per position or distance.

    Computed in float64 and rounded once: half precision cannot even represent every distance above 256
    (bfloat16), so `dtype` is raised to float32 where it is narrower.
    """
    device = positions.device
    if device.type == "mps":  # Metal has no float64
        positions = positions.cpu()
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device) / d_model
    angles = positions.double()[..., None] * 10000.0**-exponents  # [..., D/2]
    encoded = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return encoded.to(torch.promote_types(dtype, torch.float32)).to(device)


def farthest_first(
    n_distances: int, *, at_most: int | None = None, device: torch.device | None = None
) -> Int[Tensor, " R"]:
    """Return the distances `n_distances` - 1 down to 0, those above `at_most` as `at_most`."""
    distances = torch.arange(n_distances - 1, -1, -1, device=device)
    return distances if at_most is None else distances.clamp(max=at_most)


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
    distances = farthest_first(n_distances, at_most=clamp_len, device=device)
    return sinusoids(distances, d_model, dtype=dtype)


class SinusoidKeys(nn.Module):
    """Keys of distances out of their sinusoids, r_d = W_r R_d (Dai et al. 2019, sec. 3.3); per layer."""

    def __init__(self, d_model: int, n_head: int, d_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.weight = nn.Parameter(torch.empty(n_head * d_head, d_model))

    def forward(self, encoded: Float[Tensor, "R D"]) -> RelativeBias:
        """Project the sinusoids of distances."""
        rows = nn.functional.linear(encoded, self.weight)  # [R, H E]
        return RelativeBias(rows.reshape(len(rows), self.n_head, -1).transpose(0, 1))


class LearnedDistances(nn.Module):
    """Rows a^K_d and a^V_d, learned for each head and each distance up to k (Shaw et al. 2018); per layer.

        score[i, j] = q_i . (k_j + a^K_min(i-j, k)) / sqrt(E)        eq. 4
        out[i] = sum_j p_ij (v_j + a^V_min(i-j, k))                  eq. 3

    A causal model has distances of one sign only, so there are k + 1 rows.
    """

    def __init__(self, n_head: int, d_head: int, largest: int, *, has_values: bool) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(n_head, largest + 1, d_head))
        self.values = nn.Parameter(torch.empty(n_head, largest + 1, d_head)) if has_values else None

    def forward(self, distances: Int[Tensor, " R"]) -> RelativeBias:
        """Look up the rows of distances; those beyond the largest share its row."""
        rows = distances.clamp(max=self.keys.shape[1] - 1)
        values = None if self.values is None else self.values[:, rows]
        return RelativeBias(self.keys[:, rows], values=values)


class AbsoluteSinusoids(nn.Module):
    """Sinusoids of positions, which start anew in each segment or run on through the text."""

    def __init__(self, d_model: int, *, runs_on: bool) -> None:
        super().__init__()
        self.d_model, self.runs_on = d_model, runs_on

    def forward(
        self, start: Int[Tensor, " B"], offset: int, n_tokens: int, dtype: torch.dtype
    ) -> Float[Tensor, "#B T D"]:
        """Return what is added to the embeddings of `n_tokens` tokens.

        Args:
            start: Position in the text of each stream's segment.
            offset: Where in the segment the tokens begin.
            n_tokens: Their number.
            dtype: Type of the embeddings.
        """
        positions = torch.arange(offset, offset + n_tokens, device=start.device)[None]
        if self.runs_on:
            positions = positions + start[:, None]
        return sinusoids(positions, self.d_model, dtype=dtype)


class LearnedPositions(nn.Module):
    """A learned row for each position of a segment."""

    def __init__(self, n_rows: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_rows, d_model))

    def forward(
        self, start: Int[Tensor, " B"], offset: int, n_tokens: int, dtype: torch.dtype
    ) -> Float[Tensor, "#B T D"]:
        """Return what is added to the embeddings, as `AbsoluteSinusoids` does, always starting anew."""
        assert offset + n_tokens <= len(self.weight), "refused before"
        return self.weight[None, offset : offset + n_tokens].to(dtype)
