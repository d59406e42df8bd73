"""Named problem sizes of index selection, shared by tests, benchmarks and compile checks."""

from typing import NamedTuple

QUERY_BLOCK = 128
"""Queries scored at once, over all sequences of the batch, by the portable form; fewer on a CPU."""

KEY_TILE = 4096
"""Keys scored at once by the portable form; fewer on a CPU."""


class IndexSelectShape(NamedTuple):
    """Sizes of one call: batch, queries, index heads, index channels, keys in the cache, keys selected."""

    batch: int
    queries: int
    heads: int
    channels: int
    keys: int
    top_k: int


SHAPES: dict[str, IndexSelectShape] = {
    # What a test can afford.
    "tiny": IndexSelectShape(2, 130, 8, 32, 130, 24),
    # One sparse layer of the 2.8T configuration: 32 index heads of 128 channels, 2,048 keys selected.
    "prefill_2p8t": IndexSelectShape(1, 8192, 32, 128, 131072, 2048),
    "prefill_2p8t_1m": IndexSelectShape(1, 128, 32, 128, 1048576, 2048),
    "decode_2p8t": IndexSelectShape(64, 1, 32, 128, 131072, 2048),
    "decode_2p8t_1m": IndexSelectShape(1, 1, 32, 128, 1048576, 2048),
}
