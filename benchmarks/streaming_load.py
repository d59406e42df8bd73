"""Streaming load of a synthetic MXFP4 checkpoint by several processes: bytes, memory, speed, and resuming.

Writes the checkpoint, then loads it onto a mesh of all processes (experts divided, matrices by columns), from the disk
and, a smaller one, from an S3 server in a process of its own (needs moto and s3fs). Each process reports what it read;
the share it should read is computed apart from the loader.

Speed is compared with the same number of processes that read the same files and do nothing else: into one buffer each,
used again and again (`plain`), and into memory that stays, as a load's arrays do (`kept`). When all processes are ready
to begin, as much memory as the arrays take is used and freed, and the files are dropped from the page cache (cold) or
are all in it (cached). `--repeat` runs take turns, and the median counts.

Then a load through a cache folder, by all processes, is killed half-way and run again; a byte of the checkpoint on disk
is flipped, a shard cut short, a shard taken away: what the loads say. The smaller checkpoint is loaded to the layouts
of v5p and tpu7x and compared with a load that is converted afterwards. Prints one JSON object; exit status 1 where a
process read more than 1% above its share, its memory passed the budget, a fault was not named or layouts differ.

    python benchmarks/streaming_load.py --megabytes 4000 --s3-megabytes 300
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from streaming_worker import share, synthetic_config

WORKER = str(Path(__file__).with_name("streaming_worker.py"))
# Inputs and outputs of an expert: those of the public model, and smaller ones for the smaller checkpoint.
LARGE, SMALL = (3584, 3072), (1024, 1024)


class Processes:
    """All processes of one run, ready to begin."""

    def __init__(self, options: argparse.Namespace, *arguments: str, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.workers = [
            subprocess.Popen(
                [sys.executable, WORKER, *arguments, "--process", str(process), "--port", str(port),
                 "--processes", str(options.processes), "--host-bytes", str(options.host_bytes)],
                env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for process in range(options.processes)
        ]  # fmt: skip
        for worker in self.workers:
            assert worker.stdout is not None
            while (line := worker.stdout.readline()) != "ready\n":
                if not line:
                    raise RuntimeError("A process ended before it was ready.")

    def begin(self) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()

    def results(self) -> list[Any]:
        """Their JSON objects."""
        found = []
        for worker in self.workers:
            assert worker.stdout is not None
            output = worker.stdout.read()
            if worker.wait():
                raise RuntimeError(f"A process ended with status {worker.returncode}.")
            found.append(json.loads(output.splitlines()[-1]))
        return found

    def kill(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)
        for worker in self.workers:
            worker.wait()


def run(
    options: argparse.Namespace,
    *arguments: str,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> list[Any]:
    """What all processes report; `prepare` is called when they are ready."""
    processes = Processes(options, *arguments, environment=environment or {})
    prepare()
    processes.begin()
    return processes.results()


def alone(options: argparse.Namespace, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One process without others."""
    command = [sys.executable, WORKER, *arguments, "--host-bytes", str(options.host_bytes)]
    return subprocess.run(command, input="\n", capture_output=True, text=True)


def touch_memory(size: int) -> None:
    """Use that much memory and give it back. A virtual machine may lend free memory to its host, and get it again page
    by page: that would be measured in a load, whose arrays need new memory, and not in a read into one buffer."""
    np.empty(size, np.uint8).fill(1)


def drop_from_cache(folder: Path) -> None:
    """Forget the files, which are on the disk already, so that the next read comes from there."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def write_to_disk(folder: Path) -> None:
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


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


def speeds(options: argparse.Namespace, folder: Path, expected: int) -> dict[str, Any]:
    """Loads and plain reads of the files, cold and cached, in turns."""
    result: dict[str, Any] = {}
    loads: dict[str, list[dict[str, Any]]] = {"cold": [], "cached": []}
    rates: dict[str, list[float]] = {}
    for state, kind in [
        (state, kind) for state in loads for kind in ("plain", "kept", "load")
    ] * options.repeat:

        def prepare(state: str = state) -> None:
            touch_memory(expected * options.processes)
            if state == "cold":
                drop_from_cache(folder)

        if kind == "load":
            found = summary(run(options, "load", str(folder), prepare=prepare), expected, options.host_bytes)
            loads[state].append(found)
            rate = found["megabytes_per_second"]
        else:
            keep = ["--keep"] if kind == "kept" else []
            reads = run(options, "plain", str(folder), *keep, prepare=prepare)
            rate = sum(read["bytes"] for read in reads) / max(read["seconds"] for read in reads) / 1e6
        rates.setdefault(f"{kind}_{state}", []).append(round(rate))
    for state, found in loads.items():
        # The one that held most, and the median speed.
        result[state] = max(found, key=lambda one: max(one["peak_bytes_beyond_arrays"]))
        load = statistics.median(rates[f"load_{state}"])
        result[state]["load_over_plain"] = round(load / statistics.median(rates[f"plain_{state}"]), 3)
        result[state]["load_over_kept"] = round(load / statistics.median(rates[f"kept_{state}"]), 3)
    return result | {"megabytes_per_second": rates}


def kept_bytes(cache: Path) -> int:
    """Bytes that a cache folder holds."""
    return sum(file.stat().st_blocks * 512 for file in cache.glob("*.ranges")) if cache.exists() else 0


def interrupted(
    options: argparse.Namespace, expected: int, cache: Path, *arguments: str, environment: dict[str, str]
) -> dict[str, Any]:
    """Kill all processes of a load when half of their shares is in the cache folder; what a second load reads."""
    arguments = (*arguments, "--cache", str(cache))
    victims = Processes(options, *arguments, environment=environment)
    victims.begin()
    while victims.workers[0].poll() is None and kept_bytes(cache) < expected * options.processes // 2:
        time.sleep(0.02)
    victims.kill()
    reports = run(options, *arguments, environment=environment)
    counted = ("cache_bytes", "store_bytes", "data_bytes", "header_bytes")
    return {name: [report[name] for report in reports] for name in counted}


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
        done = alone(options, "load", str(folder))
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
    from moe28t_jax.weights import fake_checkpoint

    config = synthetic_config(options.megabytes, options.processes, LARGE)
    fake_checkpoint(folder, config, max_shard_bytes=500_000_000)
    write_to_disk(folder)
    expected = share(folder, options.processes)
    result = {
        "checkpoint_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        **speeds(options, folder, expected),
        "faults": faults(options, folder),
    }
    cache = folder.with_name("kept")
    return result | {
        "resumed": interrupted(options, expected, cache, "load", str(folder), environment={}),
    }


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
    from moe28t_jax.weights import fake_checkpoint

    config = synthetic_config(options.s3_megabytes, options.processes, SMALL)
    fake_checkpoint(folder, config, max_shard_bytes=100_000_000)
    expected = share(folder, options.processes)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    load = ["load", "s3://bucket/model", "--workers", "4"]
    result = summary(run(options, *load, environment=environment), expected, options.host_bytes)
    cache = folder.with_name("cache")
    resumed = interrupted(options, expected, cache, *load, environment=environment)
    server.stdin.close()
    server.wait()
    layouts = alone(options, "layouts", str(folder))
    if layouts.returncode:
        raise RuntimeError(layouts.stderr)
    return result | {"resumed": resumed, "equal_layouts": json.loads(layouts.stdout.splitlines()[-1])}


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
    parser.add_argument("--repeat", type=int, default=1, help="how often each speed is measured")
    parser.add_argument("--folder", type=Path, help="where to write; default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result: dict[str, Any] = {"processes": options.processes}
        if options.megabytes:
            result["disk"] = from_disk(options, Path(name) / "disk")
        if options.s3_megabytes:
            result["s3"] = from_s3(options, Path(name) / "s3")
    print(json.dumps(result, indent=1))
    parts = [result[part] for part in ("disk", "s3") if part in result]
    loads = [load for part in parts for load in (part, part.get("cold"), part.get("cached")) if load]
    wrong = "disk" in result and not result["disk"]["faults"]["named"]
    wrong |= "s3" in result and not all(result["s3"]["equal_layouts"].values())
    wrong |= any(
        load["read_over_share"] > 1.01
        or max(load["peak_bytes_beyond_arrays"]) > options.host_bytes + (64 << 20)
        for load in loads
        if "share_bytes" in load
    )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
