"""Streaming onto meshes: several processes, an S3 server, kills, and memory."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.config import ModelConfig, declare
from moe28t_jax.weights import Checkpoint, fake_checkpoint, load_parameters
from moe28t_jax.weights.matching import match

HERE = Path(__file__).parent
# XLA's own tests of speed do not matter here; a process on its own has no more than it is given.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "JAX_PLATFORMS": "cpu",
}


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint whose experts and matrices eight devices can divide."""
    folder = tmp_path_factory.mktemp("fake") / "checkpoint"
    config = ModelConfig.from_hf(HERE.parent / "golden" / "data" / "k31_tiny_mxfp4")
    fake_checkpoint(folder, config, max_shard_bytes=300_000)
    return folder


@pytest.fixture(scope="module")
def s3(synthetic: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that reads s3://bucket/model, a copy of the synthetic checkpoint."""
    server = subprocess.Popen(
        [sys.executable, str(HERE / "s3_server.py"), str(synthetic)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    port = server.stdout.readline().strip()
    assert port, "the S3 server did not start"
    yield ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shares(folder: Path, processes: int) -> tuple[int, int]:
    """Bytes that each process of sharded_worker.py must read, and those of them that it uses.

    The mesh has four devices on its tensor axis, of which a process holds two neighbours: half of every dense matrix.
    """
    checkpoint = Checkpoint(folder)
    found = match(checkpoint, checkpoint.config())
    read = used = 0
    for declared in declare(found.config):
        parameter = declared.parameter
        stored = found.stored(True)[declared.layer, parameter.name]
        size = sum(checkpoint.entry(name).nbytes for name in stored.tensors())
        if parameter.quantizable:
            read, used = read + size // processes, used + size // processes
        elif parameter.name.endswith(("o_proj", "down_proj")):
            read, used = read + size, used + size // 2
        elif parameter.name == "embedding" or (
            parameter.transform == "transpose" and parameter.shape[-1] % 4 == 0
        ):
            read, used = read + size // 2, used + size // 2
        else:
            read, used = read + size, used + size
    return read, used


def run_workers(
    processes: int, folder: Path, cache: Path, fills: str, sources: list[str], environment: dict[str, str]
) -> list[Any]:
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharded_worker.py"), str(process), str(processes), str(port), str(folder),
             str(cache), fills, *sources],
            env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(processes)
    ]  # fmt: skip
    reports = []
    for worker in workers:
        output, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors[-4000:]
        reports.append([json.loads(line) for line in output.splitlines() if line.startswith("{")])
    return reports


@pytest.mark.parametrize(
    ("processes", "fills"), [(2, "host"), pytest.param(4, "host,device", marks=pytest.mark.slow)]
)
def test_processes_read_their_shares(
    synthetic: Path, s3: dict[str, str], tmp_path: Path, processes: int, fills: str
) -> None:
    """Processes of two devices, from the disk and from the S3 server: every shard equal, every byte counted."""
    read, used = shares(synthetic, processes)
    total = Checkpoint(synthetic).nbytes
    assert used < read < (0.8 if processes == 2 else 0.6) * total
    sources = [str(synthetic), "s3://bucket/model"]
    for process, reports in enumerate(run_workers(processes, synthetic, tmp_path, fills, sources, s3)):
        assert [report["fill"] for report in reports] == fills.split(",") * 2
        for report in reports:
            assert (report["process"], report["devices"]) == (process, 2 * processes)
            assert (report["data_bytes"], report["needed_bytes"]) == (read, used)
            assert report["checkpoint_bytes"] == total and report["checked"] > 100
            assert report["store_bytes"] + report["cache_bytes"] == read + report["header_bytes"]
            assert 0 < report["verified_bytes"] < read
        if processes == 4:
            # The second load from S3 finds everything in the cache of the first.
            assert [report["store_bytes"] > 0 for report in reports] == [True, True, True, False]


KILLED = """
import os, signal, sys
from moe28t_jax.weights.store import RemoteStore, Retry
from moe28t_jax.weights import stream_parameters
class Killed(RemoteStore):
    def _read_into(self, file, start, target):
        if self.traffic.requests == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._read_into(file, start, target)
_, _, report = stream_parameters(
    Killed("s3://bucket/model"), cache=sys.argv[1], workers=1, host_bytes=4 << 16, stacked=True
)
print(report.store_bytes, report.cache_bytes, report.data_bytes + report.header_bytes)
"""


def test_a_killed_load_from_s3_goes_on(s3: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run([*command, "28"], env=os.environ | s3, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    again = subprocess.run([*command, "-1"], env=os.environ | s3, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    store, cache, both = (int(word) for word in again.stdout.split())
    assert store + cache == both
    assert 0.1 * both < cache < 0.9 * both


CHANGED = """
import boto3
from moe28t_jax.weights import CheckpointError
from moe28t_jax.weights.store import RemoteStore
from moe28t_jax.weights.stream_source import StreamedCheckpoint
checkpoint = StreamedCheckpoint(RemoteStore("s3://bucket/model"))
shard = checkpoint.shard_of(next(iter(checkpoint)))
checkpoint.check_unchanged(shard)
other = boto3.client("s3")
content = other.get_object(Bucket="bucket", Key=f"model/{shard}")["Body"].read()
other.put_object(Bucket="bucket", Key=f"model/{shard}", Body=content[::-1])
try:
    checkpoint.check_unchanged(shard)
except CheckpointError as error:
    print(error)
other.put_object(Bucket="bucket", Key=f"model/{shard}", Body=content)
"""


def test_an_object_overwritten_by_one_of_equal_size_is_seen(s3: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], env=os.environ | s3, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "was changed while it was read" in done.stdout


MEMORY = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from moe28t_jax.weights import stream_parameters
def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
small, large, fill, budget = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
# The small one brings the libraries, the programs and the threads into memory.
jax.block_until_ready(jax.tree.leaves(stream_parameters(small, fill=fill, host_bytes=budget)[0]))
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
parameters, _, report = stream_parameters(large, fill=fill, host_bytes=budget)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
print(json.dumps([size, resident("VmHWM") - before, report.staging_bytes]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("fill", ["host", "device"])
def test_memory_beside_the_arrays_is_bounded(synthetic: Path, tmp_path: Path, fill: str) -> None:
    """A checkpoint of some 100 MB, through 8 MB: the peak is the arrays, the budget, and a few MB of tables."""
    config = ModelConfig.from_hf(HERE.parent / "golden" / "data" / "k31_tiny_mxfp4")
    config = config.override({"moe.num_experts": 64, "moe.intermediate_size": 512, "moe.latent_size": 256})
    fake_checkpoint(tmp_path / "large", config)
    fake_checkpoint(
        tmp_path / "small", config, experts=config.moe.num_experts_per_token if config.moe else None
    )
    budget = 8 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"), fill, str(budget)],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    size, peak, staging = json.loads(done.stdout)
    tensors = len(Checkpoint(tmp_path / "large"))
    assert size > 60e6 and staging <= budget
    # 1.2 KB of a tensor that is needed, as the objects are counted; the rest is what allocations leave between them.
    assert peak < size + budget + 2000 * tensors + 8e6, (peak - size, tensors)


def test_the_arrays_are_those_of_a_load(synthetic: Path) -> None:
    """What the workers compare with is complete."""
    parameters, config = load_parameters(synthetic, stacked=True)
    assert parameters.has_vision == (config.vision is not None)
    assert config.moe is not None and config.moe.num_experts % 8 == 0
