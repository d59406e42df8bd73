"""How processes find one another, and what they say when one of them is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe28t_jax.parallel import make_mesh, startup
from moe28t_jax.parallel.agreement import seed_of_first_device, text_of_first_process
from moe28t_jax.parallel.launch import PORT, Launch, detect_launch, first_host, set_tpu_options
from moe28t_jax.parallel.startup import initialize_distributed

ROOT = Path(__file__).resolve().parents[2]

LAUNCHES = [
    ({}, Launch()),
    ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "a"}, Launch()),
    (
        {"MOE28T_PROCESSES": "4", "MOE28T_PROCESS": "2", "MOE28T_COORDINATOR": "10.0.0.1:99"},
        Launch("moe28t", "10.0.0.1:99", 4, 2),
    ),
    (
        {"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "3",
         "LOCAL_WORLD_SIZE": "4"},
        Launch("torchrun", "node0:29501", 8, 3, 3),
    ),
    (
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        Launch("torchrun", f"node0:{PORT + 1}", 2, 1),
    ),
    (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        Launch("mpi", f"127.0.0.1:{PORT}", 2, 1, 1),
    ),
    (
        {"PMI_SIZE": "4", "PMI_RANK": "2", "MASTER_ADDR": "head", "MASTER_PORT": "7"},
        Launch("mpi", "head:7", 4, 2),
    ),
    (
        {"SLURM_STEP_NODELIST": "gpu[007-009,12],x", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
         "SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1025"},
        Launch("slurm", f"gpu007:{PORT + 2}", 4, 3),
    ),
    (
        {"SLURM_STEP_NODELIST": "one,two", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "4",
         "PMI_SIZE": "4", "PMI_RANK": "1"},
        Launch("slurm", f"one:{PORT}", 4, 1),
    ),
    (
        {"SLURM_STEP_NODELIST": "one,two", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2",
         "PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "one"},
        Launch("mpi", f"one:{PORT}", 8, 5, 1),
    ),
    (
        {"SLURM_STEP_NODELIST": "one,two", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1024"},
        Launch("slurm", f"one:{PORT}", 4, 3, 1),
    ),
    (
        # srun --gpus-per-task=1: the task sees one GPU, which is number 0 to it.
        {"SLURM_STEP_NODELIST": "one", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "1",
         "SLURM_LOCALID": "3", "SLURM_JOB_ID": "1024", "CUDA_VISIBLE_DEVICES": "3"},
        Launch("slurm", f"one:{PORT}", 4, 3),
    ),
    (
        {"SLURM_STEP_NODELIST": "one", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "1",
         "SLURM_LOCALID": "3", "SLURM_JOB_ID": "1024", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        Launch("slurm", f"one:{PORT}", 4, 3, 3),
    ),
    (
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "CUDA_VISIBLE_DEVICES": "GPU-5a3f"},
        Launch("torchrun", f"a:{PORT + 1}", 2, 1),
    ),
    (
        # Set for the whole job: one GPU for two processes.
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "CUDA_VISIBLE_DEVICES": "0"},
        Launch("torchrun", f"a:{PORT + 1}", 2, 1, 1),
    ),
    (
        {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"},
        Launch("tpu", f"t0:{PORT}", 4, 2),
    ),
    (
        {"TPU_WORKER_HOSTNAMES": "u0,u1", "TPU_WORKER_ID": "1", "MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2",
         "MEGASCALE_COORDINATOR_ADDRESS": "t0:8080"},
        Launch("tpu", f"t0:{PORT}", 6, 5),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "launch"), LAUNCHES)
def test_launchers(environment: dict[str, str], launch: Launch) -> None:
    assert detect_launch(environment) == launch


REFUSED = [
    ({"MOE28T_PROCESSES": "2"}, "MOE28T_PROCESS, the number of this one"),
    ({"MOE28T_PROCESSES": "2", "MOE28T_PROCESS": "1"}, "set MOE28T_COORDINATOR to host:port"),
    ({"MOE28T_PROCESSES": "2", "MOE28T_PROCESS": "2", "MOE28T_COORDINATOR": "a:1"}, "process 2 of 2"),
    ({"MOE28T_PROCESSES": "2", "MOE28T_PROCESS": "1", "MOE28T_COORDINATOR": "a:65535"}, "port 1 to 65534"),
    ({"MOE28T_PROCESSES": "2", "MOE28T_PROCESS": "1", "MOE28T_COORDINATOR": "a:0"}, "port 1 to 65534"),
    ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "a"}, "WORLD_SIZE is 'two'"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "set MOE28T_COORDINATOR"),
]


@pytest.mark.parametrize(("environment", "words"), REFUSED)
def test_variables_that_do_not_fit(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        detect_launch(environment)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_timeout_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_running", None)
    environment = {
        "MOE28T_PROCESSES": "2", "MOE28T_PROCESS": "1", "MOE28T_COORDINATOR": "a:1", "MOE28T_TIMEOUT": text,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"MOE28T_TIMEOUT is '{text}'; it is a number of seconds"):
        initialize_distributed(environment=environment)


def test_node_lists() -> None:
    assert [first_host(x) for x in ("a", "a,b", "n[1-3]", "n[01,7-9],m", "r1n[05-06]x", "rack[1-2]node[3-4]")] == [
        "a", "a", "n1", "n01", "r1n05x", "rack1node3",
    ]  # fmt: skip


def test_options_of_a_tpus_compiler() -> None:
    option = "--xla_tpu_impure_use_large_2nd_minor_layout_for_x16"
    environment = {"TPU_ACCELERATOR_TYPE": "tpu7x-128", "LIBTPU_INIT_ARGS": "--a=1"}
    for _ in range(2):
        set_tpu_options(environment)
        assert environment["LIBTPU_INIT_ARGS"] == f"--a=1 {option}=false"
    chosen = {"LIBTPU_INIT_ARGS": f"{option}=true"}
    set_tpu_options(chosen, "tpu7x")
    assert chosen == {"LIBTPU_INIT_ARGS": f"{option}=true"}
    other: dict[str, str] = {}
    set_tpu_options(other, "v5p")
    assert other == {}


def test_a_process_alone_connects_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_running", None)
    assert initialize_distributed(environment={}) == Launch()


def test_a_process_alone_agrees_with_itself() -> None:
    assert seed_of_first_device(5, None) == seed_of_first_device(5, make_mesh({})) == 5
    for text in ("", "na\u00efve \U0001f642\n", "\udcff"):
        assert text_of_first_process(lambda text=text: text) == text


def free_port() -> int:
    """A port whose successor is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("", 0))
            try:
                two.bind(("", one.getsockname()[1] + 1))
            except OSError:
                continue
            return one.getsockname()[1]


WATCH = """
import sys, time
from moe28t_jax.parallel.watch import HostError, Watch
process, processes, port, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
try:
    watch = Watch(("127.0.0.1", port), processes, process, timeout)
except HostError as error:
    print(error)
    sys.exit(3)
print("together", flush=True)
what = sys.stdin.readline().strip()
if what == "raise":
    raise KeyError("lost")
"""

COLLECTIVE = """
import sys
import jax
from moe28t_jax.parallel.startup import initialize_distributed
launch = initialize_distributed()
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
count = len(jax.devices())
mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
x = jax.make_array_from_callback((count, 64), NamedSharding(mesh, P("x")),
    lambda i: np.random.default_rng(i[0].start).standard_normal((1, 64)).astype(np.float32))
f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jnp.cos(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
def agreed():
    from moe28t_jax.parallel.agreement import seed_of_first_device, text_of_first_process
    text = text_of_first_process(lambda: f"na\u00efve of {jax.process_index()}")
    return seed_of_first_device(7 + jax.process_index(), mesh), text.encode().hex()
shared = agreed() if sys.argv[1:] == [] else ()
found = np.asarray(f(x).addressable_shards[0].data).tobytes().hex()
print("RESULT", jax.process_count(), count, found, *shared, flush=True)
while sys.argv[1:] == ["on"]:
    jax.block_until_ready(f(x))
"""


@contextmanager
def started(
    script: str, processes: int, arguments: list[list[str]], environment: list[dict[str, str]] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    common = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments[number]],
            env=common | (environment[number] if environment else {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(processes)
    ]  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


@contextmanager
def watched(processes: int, timeout: float = 20.0) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have met."""
    port = free_port()
    arguments = [[str(number), str(processes), str(port), str(timeout)] for number in range(processes)]
    with started(WATCH, processes, arguments) as running:
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == "together\n"
        yield running


def ended(process: subprocess.Popen[str]) -> str:
    """What a process that ends by itself says on standard error; its standard input stays open."""
    process.wait(timeout=60)
    assert process.stderr is not None
    return process.stderr.read()


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_process_ends_the_others(killed: int) -> None:
    with watched(3) as running:
        running[killed].send_signal(signal.SIGKILL)
        for number, process in enumerate(running):
            if number != killed:
                error = ended(process)
                assert process.returncode == 1
                name = f"Process {killed} ({socket.gethostname()})"
                assert error == f"{name} is gone: it was killed or its host failed; this process ends too.\n"


def test_a_silent_process_ends_the_others() -> None:
    with watched(3, timeout=5.0) as running:
        running[1].send_signal(signal.SIGSTOP)
        for process in (running[0], running[2]):
            error = ended(process)
            assert process.returncode == 1
            assert "Process 1 (" in error and "no sign of life for 5 s" in error


def test_an_error_of_one_process_is_told_to_the_others() -> None:
    with watched(3) as running:
        _, error = running[1].communicate("raise\n", timeout=60)
        assert running[1].returncode == 1 and "KeyError: 'lost'" in error
        for process in (running[0], running[2]):
            error = ended(process)
            assert process.returncode == 1
            assert "ended with an error: KeyError: 'lost'. This process ends too." in error


def test_processes_that_are_done_leave_the_others_alone() -> None:
    with watched(3, timeout=4.0) as running:
        _, error = running[0].communicate("\n", timeout=60)
        assert (running[0].returncode, error) == (0, "")
        # Longer than the watch waits for a sign of life.
        time.sleep(4.5)
        for process in running[1:]:
            assert process.poll() is None
            _, error = process.communicate("\n", timeout=60)
            assert (process.returncode, error) == (0, "")


def test_strangers_are_sent_away() -> None:
    port = free_port()
    arguments = [[str(number), "2", str(port), "20"] for number in range(2)]
    with started(WATCH, 1, arguments) as (first,):
        deep = b"[" * 200_000 + b"\n"
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"5\n", b'{"process": 1}\n', b"\xff\n", deep):
            stranger = None
            while stranger is None:
                try:
                    stranger = socket.create_connection(("127.0.0.1", port), 20)
                except ConnectionRefusedError:
                    time.sleep(0.05)
            with stranger:
                stranger.sendall(greeting)
                # Sent away, where a process would be kept waiting.
                assert stranger.recv(1) == b""
        with started(WATCH, 1, arguments[1:]) as (second,):
            for process in (first, second):
                assert process.stdout is not None and process.stdout.readline() == "together\n"


@pytest.mark.parametrize("number", [2, -1])
def test_a_number_that_no_process_has_is_refused(number: int) -> None:
    port = free_port()
    with started(WATCH, 2, [["0", "2", str(port), "20"], [str(number), "2", str(port), "20"]]) as (
        first,
        other,
    ):
        output, _ = first.communicate(timeout=60)
        assert first.returncode == 3 and f"says that it is number {number} of 2" in output
        output, _ = other.communicate(timeout=60)
        assert other.returncode == 3 and "different numbers" in output


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_the_first_process_is_reached_by_either_address() -> None:
    port = free_port()
    over_ipv6 = WATCH.replace('"127.0.0.1"', '"::1"')
    with (
        started(WATCH, 1, [["0", "3", str(port), "20"]]) as (first,),
        started(WATCH, 1, [["1", "3", str(port), "20"]]) as (second,),
        started(over_ipv6, 1, [["2", "3", str(port), "20"]]) as (third,),
    ):
        for process in (first, second, third):
            assert process.stdout is not None and process.stdout.readline() == "together\n"


def test_a_process_that_does_not_come_is_named() -> None:
    port = free_port()
    arguments = [[str(number), "3", str(port), "3"] for number in (0, 1)]
    with started(WATCH, 2, arguments) as (first, second):
        output, _ = first.communicate(timeout=60)
        assert first.returncode == 3
        assert "Process 2 of 3 did not come within 3 s; here are 0 (" in output
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 3 and "gave up" in output
    with started(WATCH, 1, [["1", "2", str(port), "1"]]) as (alone,):
        output, _ = alone.communicate(timeout=60)
        assert alone.returncode == 3 and f"cannot reach process 0 at 127.0.0.1:{port} within 1 s" in output


def result(process: subprocess.Popen[str]) -> list[str]:
    """What `COLLECTIVE` found: processes, devices, bytes. Gloo writes lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("RESULT"):
            return line.split()[1:]
    return []


def launched(processes: int, launcher: str) -> list[dict[str, str]]:
    port = free_port()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    common = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "MOE28T_TIMEOUT": "60"}
    if launcher == "torchrun":
        return [
            common
            | {
                "WORLD_SIZE": str(processes),
                "RANK": str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port - 1),
            }
            for number in range(processes)
        ]
    return [
        common
        | {
            "MOE28T_PROCESSES": str(processes), "MOE28T_PROCESS": str(number),
            "MOE28T_COORDINATOR": f"127.0.0.1:{port}",
        }
        for number in range(processes)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "launcher"), [(2, "torchrun"), pytest.param(4, "moe28t", marks=pytest.mark.slow)]
)
def test_results_are_the_same_on_every_host(processes: int, launcher: str) -> None:
    with started(COLLECTIVE, processes, [[]] * processes, launched(processes, launcher)) as running:
        words = [result(process) for process in running]
        errors = [ended(process) for process in running]
        assert [process.returncode for process in running] == [0] * processes, errors
    assert all(line[:2] == [str(processes)] * 2 for line in words)
    assert len({line[2] for line in words}) == 1 and len(words[0][2]) == 2 * 4 * 64
    # Drawn and read by the first one.
    assert all(line[3:] == ["7", "na\u00efve of 0".encode().hex()] for line in words)


@pytest.mark.parametrize(
    ("processes", "killed"),
    [(2, 1), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_host_that_dies_inside_a_collective(processes: int, killed: int) -> None:
    with started(COLLECTIVE, processes, [["on"]] * processes, launched(processes, "moe28t")) as running:
        for process in running:
            assert result(process)[:1] == [str(processes)]
        running[killed].send_signal(signal.SIGKILL)
        for number, process in enumerate(running):
            if number != killed:
                error = ended(process)
                assert process.returncode != 0
                assert f"Process {killed} (" in error and "is gone" in error, error


INTERRUPTED = (
    COLLECTIVE.partition("def agreed")[0]
    + """
import moe28t_jax.cli.generate as command
from moe28t_jax.cli import main
class Model:
    tokenizer = object()
    def stream(self, prompt, **options):
        print("RESULT", flush=True)
        while True:
            jax.block_until_ready(f(x))
command.load_model = lambda *_, **__: Model()
sys.exit(main(["generate", "--prompt", "x", "--no-echo"]))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_of_one_process_ends_all(interrupted: int) -> None:
    # Longer than the test waits: none of them ends because it waited long enough for another.
    environment = [values | {"MOE28T_TIMEOUT": "600"} for values in launched(2, "moe28t")]
    with started(INTERRUPTED, 2, [[]] * 2, environment) as running:
        for process in running:
            result(process)
        running[interrupted].send_signal(signal.SIGINT)
        assert "moe28t generate: interrupted." in ended(running[interrupted])
        assert running[interrupted].returncode == 130
        error = ended(running[1 - interrupted])
        assert running[1 - interrupted].returncode == 1
        assert f"Process {interrupted} (" in error and "ended with an error: It was interrupted." in error


UNEXPECTED = (
    COLLECTIVE.partition("def agreed")[0]
    + """
print("RESULT", flush=True)
if jax.process_index() == int(sys.argv[1]):
    raise ZeroDivisionError("nobody expected this")
while True:
    jax.block_until_ready(f(x))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_process_ends_all(failing: int) -> None:
    # Longer than the test waits, as above.
    environment = [values | {"MOE28T_TIMEOUT": "600"} for values in launched(2, "moe28t")]
    with started(UNEXPECTED, 2, [[str(failing)]] * 2, environment) as running:
        for process in running:
            result(process)
        error = ended(running[failing])
        assert "Traceback" in error and "nobody expected this" in error
        assert running[failing].returncode == 1
        error = ended(running[1 - failing])
        assert running[1 - failing].returncode == 1
        assert f"Process {failing} (" in error and "ZeroDivisionError: nobody expected this" in error


LEAVING = (
    COLLECTIVE.partition("def agreed")[0]
    + """
import time
print("RESULT", flush=True)
if jax.process_index() == 1:
    sys.exit(1)
if sys.argv[1] == "slowly":
    time.sleep(3)
    sys.exit(0)
while True:
    jax.block_until_ready(f(x))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["never", "slowly"])
def test_a_process_that_leaves_the_others_waits_and_says_so(manner: str) -> None:
    environment = [values | {"MOE28T_TIMEOUT": "10"} for values in launched(2, "moe28t")]
    with started(LEAVING, 2, [[manner]] * 2, environment) as running:
        for process in running:
            result(process)
        errors = [ended(process) for process in running]
        if manner == "slowly":
            assert [process.returncode for process in running] == [0, 1] and errors == ["", ""], errors
        else:
            assert [process.returncode for process in running] == [1, 1], errors
            assert "it ended, and process 0 (" in errors[1] and "MOE28T_TIMEOUT" in errors[1]
            assert "Process 1 (" in errors[0] and "did not within 10 s" in errors[0]
