"""Host memory and speed of loading an MXFP4 checkpoint.

Draws a synthetic checkpoint (small hidden size, many experts) into a temporary folder, loads it in a fresh
process and prints one JSON object: packed bytes, the peak of resident memory above the process before
loading, the part of it beyond the packed bytes, seconds, MB/s. The files were just written, so they are
read from the page cache.

    python benchmarks/load_memory.py --megabytes 2000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN = 512
NUM_LAYERS = 8


def synthetic_config(megabytes: int):
    """A configuration whose packed experts take about that many MB over seven layers."""
    from moe28t_jax.config import ModelConfig

    expert_bytes = 3 * HIDDEN * HIDDEN * 17 // 32
    experts = max(8, round(megabytes * 1e6 / expert_bytes / (NUM_LAYERS - 1)))
    return ModelConfig.from_hf(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": 256,
            "hidden_size": HIDDEN,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": HIDDEN,
            "hidden_act": "silu",
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "mla_use_nope": True,
            "num_experts": experts,
            "num_experts_per_token": 4,
            "num_shared_experts": 0,
            "moe_intermediate_size": HIDDEN,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [4, 8],
                "kda_layers": [1, 2, 3, 5, 6, 7],
            },
        }
    ).override({"expert_quantization": "mxfp4"})


def write_checkpoint(folder: Path, megabytes: int) -> int:
    """Write one shard per layer; returns the bytes of all packed experts."""
    import numpy as np

    from moe28t_jax.config import declare
    from moe28t_jax.weights.matching import stored_names
    from moe28t_jax.weights.safetensors import SafetensorsWriter
    from moe28t_jax.weights.save import write_config, write_index

    config = synthetic_config(megabytes)
    random = np.random.default_rng(0)
    shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    packed_bytes = 0
    for declared in declare(config, vision=False):
        parameter = declared.parameter
        shard = shards.setdefault(f"model-{declared.layer}.safetensors", {})
        shape = parameter.stored_shapes[0]
        for names in stored_names(declared):
            if parameter.quantizable:
                size_out, size_in = shape
                shard[f"{names[0]}_packed"] = ("U8", (size_out, size_in // 2))
                shard[f"{names[0]}_scale"] = ("U8", (size_out, size_in // 32))
                packed_bytes += size_out * size_in * 17 // 32
            else:
                shard[names[0]] = ("F32" if parameter.dtype == "float32" else "BF16", shape)
    for shard, tensors in shards.items():
        with SafetensorsWriter(folder / shard, tensors) as writer:
            for name, entry in writer.entries.items():
                if name.endswith("_packed"):
                    data = np.frombuffer(random.bytes(entry.nbytes), np.uint8)
                elif name.endswith("_scale"):
                    data = random.integers(110, 126, entry.nbytes, np.uint8)
                else:
                    data = np.zeros(entry.nbytes, np.uint8)
                writer.write(name, data)
    write_index(folder, {name: shard for shard, tensors in shards.items() for name in tensors}, packed_bytes)
    write_config(folder, config.to_hf())
    return packed_bytes


def resident(field: str) -> int:
    """One of VmRSS and VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")


def measure(folder: Path, stacked: bool) -> dict[str, float]:
    """Load in this process and report its memory."""
    import jax
    import jax.numpy as jnp

    from moe28t_jax.weights import load_parameters

    jax.block_until_ready(jnp.zeros(1))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    parameters, _ = load_parameters(folder, stacked=stacked)
    jax.block_until_ready(jax.tree.leaves(parameters))
    return {"seconds": time.perf_counter() - start, "peak_bytes": resident("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=2000, help="packed size of the experts")
    parser.add_argument("--stacked", action="store_true", help="load repeating layers into stacks")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        print(json.dumps(measure(arguments.folder, arguments.stacked)))
        return
    with tempfile.TemporaryDirectory() as name:
        packed_bytes = write_checkpoint(Path(name), arguments.megabytes)
        command = [sys.executable, __file__, "--folder", name, *(["--stacked"] if arguments.stacked else [])]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(output.splitlines()[-1])
    print(
        json.dumps(
            {
                "packed_bytes": packed_bytes,
                "peak_bytes_above_baseline": result["peak_bytes"],
                "peak_bytes_above_packed": result["peak_bytes"] - packed_bytes,
                "seconds": round(result["seconds"], 2),
                "megabytes_per_second": round(packed_bytes / result["seconds"] / 1e6),
            }
        )
    )


if __name__ == "__main__":
    main()
