"""Named problem sizes of the gated delta rule, shared by tests, benchmarks and compile checks."""

from typing import NamedTuple

CHUNK_SIZE = 64
"""Tokens per chunk of the chunked form, and the grid of the boundary states."""


class DeltaRuleShape(NamedTuple):
    """Sizes of one call: batch, tokens, heads, key channels, value channels."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int


SHAPES: dict[str, DeltaRuleShape] = {
    # What a test can afford.
    "tiny": DeltaRuleShape(2, 130, 2, 32, 32),
    # The size at which public CPU implementations were compared.
    "cpu_comparison": DeltaRuleShape(1, 2048, 4, 128, 128),
    # One layer of the 48B configuration (32 heads) and of the 2.8T configuration (96 heads).
    "prefill_48b": DeltaRuleShape(1, 4096, 32, 128, 128),
    "prefill_2p8t": DeltaRuleShape(1, 8192, 96, 128, 128),
    # The 2.8T layer with its heads sharded over 8, 16 and 32 devices; a whole context on one device.
    "prefill_2p8t_heads_over_8": DeltaRuleShape(1, 8192, 12, 128, 128),
    "prefill_128k_heads_over_16": DeltaRuleShape(1, 131072, 6, 128, 128),
    "prefill_1m_heads_over_32": DeltaRuleShape(1, 1048576, 3, 128, 128),
    # A training batch of packed documents, and a ragged batch of short prompts.
    "train_heads_over_4": DeltaRuleShape(4, 4096, 24, 128, 128),
    "prompts_heads_over_8": DeltaRuleShape(16, 1000, 12, 128, 128),
    # One token of a batch of 1 to 256 rows, all heads or those of one device.
    "decode_2p8t": DeltaRuleShape(64, 1, 96, 128, 128),
    "decode_one": DeltaRuleShape(1, 1, 96, 128, 128),
    "decode_8_heads_over_8": DeltaRuleShape(8, 1, 12, 128, 128),
    "decode_64_heads_over_16": DeltaRuleShape(64, 1, 6, 128, 128),
    "decode_256_heads_over_32": DeltaRuleShape(256, 1, 3, 128, 128),
}
