"""Gated delta rule with per-channel decay (Kimi Delta Attention): prefill, backward, one-token decode."""

from pallas_kernels.delta_rule.api import delta_rule, fused_step, segment_map, step
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE, SHAPES, DeltaRuleShape

__all__ = ["CHUNK_SIZE", "SHAPES", "DeltaRuleShape", "delta_rule", "fused_step", "segment_map", "step"]
