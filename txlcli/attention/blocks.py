"""Queries in blocks, so that keys behind a block's last query are left out."""

import itertools
from typing import NamedTuple

N_QUERIES = 128
"""Queries in a block at most; among the fastest of 32 to 1,024 on a CPU, for segments of 64 to 1,024."""


class Block(NamedTuple):
    """Queries `begin` to `end`, which see the first `n_keys` keys, the last of them all."""

    begin: int
    end: int
    n_keys: int


def divide(n_queries: int, n_keys: int) -> list[Block]:
    """Cut the queries into blocks of about equal size, the last first: it alone has all keys."""
    n_blocks = max(1, -(-n_queries // N_QUERIES))
    bounds = [i * n_queries // n_blocks for i in range(n_blocks + 1)]
    n_memory = n_keys - n_queries
    return [Block(begin, end, n_memory + end) for begin, end in itertools.pairwise(bounds)][::-1]
