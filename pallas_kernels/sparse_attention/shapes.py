"""Named problem sizes of sparse attention, shared by tests, benchmarks and compile checks."""

from typing import NamedTuple


class SparseAttentionShape(NamedTuple):
    """Sizes of one call: batch, queries, heads, latent and value channels, cached and selected keys."""

    batch: int
    queries: int
    heads: int
    width: int
    value_dim: int
    keys: int
    selected: int


SHAPES: dict[str, SparseAttentionShape] = {
    # What a test can afford.
    "tiny": SparseAttentionShape(2, 40, 4, 40, 32, 90, 16),
    # One sparse layer of the 2.8T configuration: 96 heads, latent 512 + 64, 2,048 keys selected.
    "prefill_2p8t": SparseAttentionShape(1, 8192, 96, 576, 512, 131072, 2048),
    "prefill_2p8t_heads_over_8": SparseAttentionShape(1, 8192, 12, 576, 512, 131072, 2048),
    "prefill_2p8t_heads_over_32": SparseAttentionShape(1, 8192, 3, 576, 512, 131072, 2048),
    "decode_2p8t_heads_over_2": SparseAttentionShape(64, 1, 48, 576, 512, 131072, 2048),
    "decode_2p8t_heads_over_4": SparseAttentionShape(64, 1, 24, 576, 512, 131072, 2048),
    "decode_2p8t": SparseAttentionShape(64, 1, 96, 576, 512, 131072, 2048),
    "decode_2p8t_1m": SparseAttentionShape(1, 1, 96, 576, 512, 1048576, 2048),
}
