"""What a model asks of its attention."""

from typing import NamedTuple

import torch


class Demands(NamedTuple):
    """What a model on a machine asks of its attention.

    Attributes:
        device: Where it computes.
        d_head: Width of a head (E).
        has_values: Distances add rows to the values (Shaw et al. 2018).
        dropout: Probability of dropping an attention weight.
    """

    device: torch.device = torch.device("cpu")
    d_head: int = 64
    has_values: bool = False
    dropout: float = 0.0
