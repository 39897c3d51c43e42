"""The attention operation: from a segment to its memory and itself, with content and position scores.

Shapes, here and everywhere else in the package (B, H, S, E follow PyTorch's scaled_dot_product_attention):

    B streams    T queries (the segment)   M memory     S keys = M + T   R distances
    H heads      D d_model                 E d_head     F d_inner        V vocabulary   N layers

`eager` is the formula and the specification. `skew` is the form for CPUs, `fused` the form for CUDA with its
`kernels`, `sdpa` the one in between; `choice` picks one for a model and a machine, and says why. `projection`
makes queries, keys and values for training.
"""

from txlcli.attention.choice import (
    BACKENDS,
    Backend,
    BackendChoice,
    cannot_run,
    choose_backend,
    fall_back,
)
from txlcli.attention.demands import Demands
from txlcli.attention.eager import RelativeBias, align, hidden_keys, relative_attention, unalign
from txlcli.attention.projection import project

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendChoice",
    "Demands",
    "RelativeBias",
    "align",
    "cannot_run",
    "choose_backend",
    "fall_back",
    "hidden_keys",
    "project",
    "relative_attention",
    "unalign",
]
