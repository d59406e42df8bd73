"""One process of streaming_load.py: loads, reads plainly or compares layouts, and prints one JSON object.

It imports what it needs, says `ready`, and begins when a line arrives on its standard input: so that starting Python is
not measured, and all processes begin together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LAYERS = 8


def synthetic_config(megabytes: int, processes: int, expert: tuple[int, int]) -> Any:
    """A configuration whose packed experts take about that many MB over seven layers."""
    from moe28t_jax.config import ModelConfig

    hidden, middle = expert
    expert_bytes = 3 * hidden * middle * 17 // 32
    experts = max(1, round(megabytes * 1e6 / expert_bytes / (LAYERS - 1) / processes)) * processes
    return ModelConfig.from_hf(
        {
            "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 4096,
            "hidden_size": hidden, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8,
            "intermediate_size": 2048, "hidden_act": "silu", "q_lora_rank": None, "kv_lora_rank": 64,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_nope": True,
            "num_experts": experts, "num_experts_per_token": 4, "num_shared_experts": 0,
            "moe_intermediate_size": middle, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8],
                "kda_layers": [1, 2, 3, 5, 6, 7],
            },
        }
    ).override({"expert_quantization": "mxfp4"})  # fmt: skip


def divided(parameter: Any, processes: int) -> int | None:
    """The axis of a parameter that the processes share, or None."""
    if parameter.quantizable:
        return 0
    if parameter.transform == "transpose" and parameter.shape[-1] % processes == 0:
        return len(parameter.shape) - 1
    return 0 if parameter.name == "embedding" else None


def share(folder: Path, processes: int) -> int:
    """Bytes of the tensors of which a process needs a part, or the whole."""
    from moe28t_jax.config import declare
    from moe28t_jax.weights import Checkpoint
    from moe28t_jax.weights.matching import match

    checkpoint = Checkpoint(folder)
    found = match(checkpoint, checkpoint.config())
    total = 0
    for declared in declare(found.config):
        stored = found.stored(True)[declared.layer, declared.parameter.name]
        size = sum(checkpoint.entry(name).nbytes for name in stored.tensors())
        total += size if divided(declared.parameter, processes) is None else size // processes
    return total


def resident(field: str) -> int:
    """One of VmRSS and VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")


def wait_for_the_others() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Load the part of one process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{options.port}", options.processes, options.process)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from moe28t_jax.weights import stream_parameters

    mesh = jax.make_mesh((options.processes,), ("all",), axis_types=(AxisType.Auto,))

    def rule(parameter: Any, layers: tuple[int, ...] | None) -> NamedSharding:
        spec: list[str | None] = [None] * len(parameter.shape)
        axis = divided(parameter, options.processes)
        if axis is not None:
            spec[axis] = "all"
        if layers is not None and len(layers) > 1:
            spec.insert(0, None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    jax.block_until_ready(jax.numpy.zeros(1))
    wait_for_the_others()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    used = time.process_time()
    parameters, _, report = stream_parameters(
        options.source,
        sharding=rule,
        cache=options.cache,
        host_bytes=options.host_bytes,
        workers=options.workers,
    )
    used = time.process_time() - used
    size = sum(shard.data.nbytes for leaf in jax.tree.leaves(parameters) for shard in leaf.addressable_shards)
    return report.to_json() | {
        "array_bytes": size,
        "peak_bytes": resident("VmHWM") - before,
        "cpu_seconds": used,
    }


def compare_layouts(options: argparse.Namespace) -> dict[str, bool]:
    """Whether loading to a chip's layout gives the bits of loading and then converting."""
    import jax
    import numpy as np

    from moe28t_jax.parallel.formats import expert_layout
    from moe28t_jax.weights import load_parameters, stream_parameters
    from pallas_kernels.mxfp4_matmul import MXFP4Tensor

    plain, _ = load_parameters(options.source, stacked=True)
    result = {}
    for kind in ("v5p", "tpu7x"):
        layout = expert_layout(kind)
        converted = jax.tree.map(
            lambda leaf, layout=layout: leaf.to_layout(layout) if isinstance(leaf, MXFP4Tensor) else leaf,
            plain, is_leaf=lambda leaf: isinstance(leaf, MXFP4Tensor),
        )  # fmt: skip
        for fill in ("host", "device"):
            loaded, _, _ = stream_parameters(
                options.source, layout=layout, host_bytes=options.host_bytes, fill=fill
            )
            pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(converted), strict=True)
            result[f"{kind} {layout}, filled on the {fill}"] = all(
                a.dtype == b.dtype
                and np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
                for a, b in pairs
            )
    return result


def read_plainly(options: argparse.Namespace) -> dict[str, Any]:
    """Read a part of every file, and nothing else: into one buffer, or with `keep` into memory that stays."""
    parts = []
    for file in sorted(Path(options.source).glob("*.safetensors")):
        size = file.stat().st_size
        first, last = (size * place // options.processes for place in (options.process, options.process + 1))
        parts.append((os.open(file, os.O_RDONLY), first, last))
    total = sum(last - first for _, first, last in parts)
    # NumPy asks for huge pages, as for a load's arrays.
    import numpy as np

    wait_for_the_others()
    started, used = time.perf_counter(), time.process_time()
    buffer = memoryview(np.empty(total if options.keep else options.chunk, np.uint8))
    place = 0
    for handle, position, last in parts:
        while position < last:
            start = place if options.keep else 0
            count = os.preadv(handle, [buffer[start : start + min(options.chunk, last - position)]], position)
            position, place = position + count, place + count
    seconds, used = time.perf_counter() - started, time.process_time() - used
    return {"bytes": total, "seconds": seconds, "cpu_seconds": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("load", "plain", "layouts"))
    parser.add_argument("source")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host-bytes", type=int, default=128 << 20)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache")
    parser.add_argument("--chunk", type=int, default=1 << 24)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    result = {"load": load, "plain": read_plainly, "layouts": compare_layouts}[options.action](options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
