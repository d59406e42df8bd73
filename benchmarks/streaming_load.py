"""Streaming load of a synthetic MXFP4 checkpoint by several processes: bytes, memory, speed, and resuming.

Writes the checkpoint, then loads it onto a mesh of all processes (experts divided, matrices by columns), from the disk
and, a smaller one, from an S3 server in a process of its own (needs moto and s3fs). Each process reports what it read;
the share it should read is computed apart from the loader. Speed is compared with the same number of processes that
read the same files and do nothing else, with the files dropped from the page cache before each run (cold), and again
with all of them in it (cached). Then a byte of the checkpoint on disk is flipped, a shard cut short, a shard taken
away: what the loads say. One load from S3 is killed half-way and run again, and the smaller checkpoint is loaded to the
layouts of v5p and tpu7x and compared with a load that is converted afterwards. Prints one JSON object; exit status 1
where a process read more than 1% above its share, its memory passed the budget, a fault was not named or layouts
differ.

    python benchmarks/streaming_load.py --megabytes 4000 --s3-megabytes 300
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 8
# Inputs and outputs of an expert: those of the public model, and smaller ones for the smaller checkpoint.
LARGE, SMALL = (3584, 3072), (1024, 1024)


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


def work(options: argparse.Namespace) -> None:
    """One of the processes."""
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
    found = {"array_bytes": size, "peak_bytes": resident("VmHWM") - before, "cpu_seconds": used}
    print(json.dumps(report.to_json() | found))


def compare_layouts(options: argparse.Namespace) -> None:
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
        loaded, _, _ = stream_parameters(options.source, layout=layout, host_bytes=options.host_bytes)
        pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(converted), strict=True)
        result[f"{kind} {layout}"] = all(
            a.dtype == b.dtype and np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
            for a, b in pairs
        )
    print(json.dumps(result))


def read_plainly(options: argparse.Namespace) -> None:
    """Read every n-th piece of the files into one buffer, and nothing else."""
    buffer = bytearray(options.chunk)
    total = 0
    started, used = time.perf_counter(), time.process_time()
    for file in sorted(Path(options.source).glob("*.safetensors")):
        handle = os.open(file, os.O_RDONLY)
        size = os.fstat(handle).st_size
        first, last = (
            size * options.process // options.processes,
            size * (options.process + 1) // options.processes,
        )
        while first < last:
            count = os.preadv(handle, [memoryview(buffer)[: last - first]], first)
            first, total = first + count, total + count
        os.close(handle)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    print(json.dumps({"bytes": total, "seconds": seconds, "cpu_seconds": used}))


def drop_from_cache(folder: Path) -> None:
    """Write the files to the disk and forget them, so that the next read comes from there."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def spawn(
    options: argparse.Namespace, *arguments: str, environment: dict[str, str] | None = None
) -> list[Any]:
    """Run all processes; their JSON objects."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--process", str(process), "--port", str(port),
             "--processes", str(options.processes), "--host-bytes", str(options.host_bytes), *arguments],
            env=os.environ | (environment or {}), stdout=subprocess.PIPE, text=True,
        )
        for process in range(options.processes)
    ]  # fmt: skip
    results = []
    for worker in workers:
        output, _ = worker.communicate()
        if worker.returncode:
            raise RuntimeError(f"A process ended with status {worker.returncode}.")
        results.append(json.loads(output.splitlines()[-1]))
    return results


def summary(reports: list[Any], expected: int, host_bytes: int) -> dict[str, Any]:
    """What a set of loads shows."""
    read = [report["store_bytes"] + report["cache_bytes"] for report in reports]
    beyond = [report["peak_bytes"] - report["array_bytes"] for report in reports]
    seconds = max(report["seconds"] for report in reports)
    return {
        "share_bytes": expected,
        "read_bytes": read,
        "read_over_share": round(max(read) / expected, 4),
        "header_bytes": reports[0]["header_bytes"],
        "verified_bytes": [report["verified_bytes"] for report in reports],
        "array_bytes": [report["array_bytes"] for report in reports],
        "peak_bytes_beyond_arrays": beyond,
        "host_bytes": host_bytes,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(sum(report["cpu_seconds"] for report in reports), 2),
        "megabytes_per_second": round(sum(read) / seconds / 1e6),
    }


def alone(options: argparse.Namespace, *arguments: str) -> list[str]:
    """The command of one process of this file, without others."""
    return [sys.executable, __file__, "--process", "0", "--processes", "1", "--port", "0",
            "--host-bytes", str(options.host_bytes), *arguments]  # fmt: skip


def faults(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The last line of loads of the damaged, truncated and incomplete checkpoint, which is whole again afterwards."""
    from moe28t_jax.weights import describe

    shards = sorted(folder.glob("*.safetensors"))
    shard = shards[len(shards) // 2]
    name = next(info.name for info in describe(folder) if info.shard == shard.name and "_packed" in info.name)
    end = shard.stat().st_size - 1
    with shard.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        start = json.loads(file.read(header))[name]["data_offsets"][0]
        place = 8 + header + start + 1000
        file.seek(place)
        byte = file.read(1)
        file.seek(end)
        last = file.read(1)

    def write(position: int, content: bytes) -> None:
        with shard.open("r+b") as file:
            file.seek(position)
            file.write(content)

    def said() -> str:
        done = subprocess.run(alone(options, "--source", str(folder)), capture_output=True, text=True)
        return done.stderr.strip().splitlines()[-1] if done.returncode else "nothing"

    found: dict[str, str] = {}
    write(place, bytes([byte[0] ^ 16]))
    found["damaged"] = said()
    write(place, byte)
    os.truncate(shard, end)
    found["truncated"] = said()
    write(end, last)
    hidden = shard.with_suffix(".away")
    shard.rename(hidden)
    found["missing"] = said()
    hidden.rename(shard)
    named = all(shard.name in text and "CheckpointError" in text for text in found.values())
    return found | {"named": named and name in found["damaged"] and said() == "nothing"}


def from_disk(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Load from the disk, and the plain read of the same files."""
    from moe28t_jax.weights import fake_checkpoint

    started = time.perf_counter()
    fake_checkpoint(
        folder, synthetic_config(options.megabytes, options.processes, LARGE), max_shard_bytes=500_000_000
    )
    written = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    speeds: dict[str, Any] = {}
    expected = share(folder, options.processes)
    result: dict[str, Any] = {
        "checkpoint_bytes": size,
        "write_megabytes_per_second": round(size / written / 1e6),
    }
    for state in ("cold", "cached"):
        for kind in ("plain", "load"):
            if state == "cold":
                drop_from_cache(folder)
            if kind == "plain":
                reads = spawn(options, "--plain", "--source", str(folder))
                seconds = max(read["seconds"] for read in reads)
                speeds[f"plain_{state}"] = round(sum(read["bytes"] for read in reads) / seconds / 1e6)
                speeds[f"plain_{state}_cpu_seconds"] = round(sum(read["cpu_seconds"] for read in reads), 2)
            else:
                loaded = summary(spawn(options, "--source", str(folder)), expected, options.host_bytes)
                speeds[f"load_{state}"] = loaded["megabytes_per_second"]
                result[state] = loaded
        speeds[f"load_over_plain_{state}"] = round(speeds[f"load_{state}"] / speeds[f"plain_{state}"], 3)
    return result | {"megabytes_per_second": speeds, "faults": faults(options, folder)}


SERVER = """
import logging, os, sys
from pathlib import Path
os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
import boto3
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
client.create_bucket(Bucket="bucket")
for file in Path(sys.argv[1]).iterdir():
    client.upload_file(str(file), "bucket", f"model/{file.name}")
print(port, flush=True)
sys.stdin.read()
"""


def from_s3(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Load from an S3 server; kill one load half-way and run it again."""
    from moe28t_jax.weights import fake_checkpoint

    fake_checkpoint(
        folder, synthetic_config(options.s3_megabytes, options.processes, SMALL), max_shard_bytes=100_000_000
    )
    expected = share(folder, options.processes)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    source = ["--source", "s3://bucket/model", "--workers", "4"]
    result = summary(spawn(options, *source, environment=environment), expected, options.host_bytes)
    cache = folder.with_name("cache")
    command = alone(options, *source, "--cache", str(cache))
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    victim = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    while victim.poll() is None and kept(cache) < whole // 2:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    output = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout
    report = json.loads(output.splitlines()[-1])
    layouts = subprocess.run(
        alone(options, "--layouts", "--source", str(folder)), capture_output=True, text=True, check=True
    ).stdout
    server.stdin.close()
    server.wait()
    return result | {
        "equal_layouts": json.loads(layouts.splitlines()[-1]),
        "resumed": {
            name: report[name] for name in ("checkpoint_bytes", "cache_bytes", "store_bytes", "seconds")
        },
    }


def kept(cache: Path) -> int:
    """Bytes that a cache folder holds."""
    return sum(file.stat().st_blocks * 512 for file in cache.glob("*.ranges")) if cache.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=4000, help="packed size of the experts on disk; 0 for none"
    )
    parser.add_argument("--s3-megabytes", type=int, default=300, help="the same on the S3 server; 0 for none")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--host-bytes", type=int, default=128 << 20, help="budget of each process")
    parser.add_argument("--folder", type=Path, help="where to write; default a temporary folder")
    hidden = {"help": argparse.SUPPRESS}
    parser.add_argument("--process", type=int, **hidden)
    parser.add_argument("--port", type=int, **hidden)
    parser.add_argument("--source", **hidden)
    parser.add_argument("--cache", **hidden)
    parser.add_argument("--workers", type=int, **hidden)
    parser.add_argument("--plain", action="store_true", **hidden)
    parser.add_argument("--layouts", action="store_true", **hidden)
    parser.add_argument("--chunk", type=int, default=1 << 24, **hidden)
    options = parser.parse_args()
    if options.process is not None:
        (read_plainly if options.plain else compare_layouts if options.layouts else work)(options)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result: dict[str, Any] = {"processes": options.processes}
        if options.megabytes:
            result["disk"] = from_disk(options, Path(name) / "disk")
        if options.s3_megabytes:
            result["s3"] = from_s3(options, Path(name) / "s3")
    print(json.dumps(result, indent=1))
    loads = [
        result[part]["cold"] if part == "disk" else result[part] for part in ("disk", "s3") if part in result
    ]
    wrong = "disk" in result and not result["disk"]["faults"]["named"]
    wrong |= "s3" in result and not all(result["s3"]["equal_layouts"].values())
    return int(wrong or any(
        load["read_over_share"] > 1.01 or max(load["peak_bytes_beyond_arrays"]) > options.host_bytes + (64 << 20)
        for load in loads
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
