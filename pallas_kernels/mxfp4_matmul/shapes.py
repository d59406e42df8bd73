"""Named problem sizes of the grouped expert matmul, shared by tests, benchmarks and compile checks."""

from typing import NamedTuple


class GroupedMatmulShape(NamedTuple):
    """Sizes of one call: rows (token and expert pairs), experts held, inputs, outputs."""

    rows: int
    experts: int
    inputs: int
    outputs: int


SHAPES: dict[str, GroupedMatmulShape] = {
    # What a test can afford.
    "tiny": GroupedMatmulShape(37, 5, 64, 48),
    # The size at which public CPU implementations were compared.
    "cpu_comparison": GroupedMatmulShape(2048, 16, 512, 1024),
    # The 48B configuration, 8 of 256 experts per token: one decode step of 8 rows, and 512 tokens of prefill.
    "decode_48b_up": GroupedMatmulShape(64, 256, 2304, 1024),
    "prefill_48b_up": GroupedMatmulShape(4096, 256, 2304, 1024),
    "prefill_48b_down": GroupedMatmulShape(4096, 256, 1024, 2304),
    # The 2.8T configuration, 16 of 896 experts per token, with its experts over 64 devices: 14 experts each.
    "decode_2p8t_up_experts_over_64": GroupedMatmulShape(64, 14, 3584, 3072),
    "decode_2p8t_down_experts_over_64": GroupedMatmulShape(64, 14, 3072, 3584),
    # What 64 rows send there at most, and over 128 devices, for which a decode step is compiled.
    "decode_bound_2p8t_up_experts_over_64": GroupedMatmulShape(896, 14, 3584, 3072),
    "decode_bound_2p8t_up_experts_over_128": GroupedMatmulShape(448, 7, 3584, 3072),
    "prefill_2p8t_up_experts_over_64": GroupedMatmulShape(8192, 14, 3584, 3072),
    "prefill_2p8t_down_experts_over_64": GroupedMatmulShape(8192, 14, 3072, 3584),
    # One token, and a batch of 256, with the experts over 16 devices: 56 each. The rows are an upper bound.
    "decode_one_token_2p8t_up_experts_over_16": GroupedMatmulShape(16, 56, 3584, 3072),
    "decode_2p8t_up_experts_over_16": GroupedMatmulShape(256, 56, 3584, 3072),
    "decode_2p8t_down_experts_over_16": GroupedMatmulShape(256, 56, 3072, 3584),
    # The same over 32 and over 128 devices: 28 and 7 experts each.
    "decode_2p8t_up_experts_over_32": GroupedMatmulShape(256, 28, 3584, 3072),
    "prefill_2p8t_up_experts_over_32": GroupedMatmulShape(8192, 28, 3584, 3072),
    "decode_2p8t_down_experts_over_128": GroupedMatmulShape(256, 7, 3072, 3584),
    "prefill_2p8t_down_experts_over_128": GroupedMatmulShape(8192, 7, 3072, 3584),
    # 8192 tokens of prefill send each of 16 devices 8192 rows on average.
    "prefill_2p8t_up_experts_over_16": GroupedMatmulShape(8192, 56, 3584, 3072),
    "prefill_2p8t_down_experts_over_16": GroupedMatmulShape(8192, 56, 3072, 3584),
}
