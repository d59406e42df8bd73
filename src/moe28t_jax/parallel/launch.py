"""How a program of several processes was started, read from the environment. Needs no JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

PORT = 8476
"""Where the first process listens unless the launcher says otherwise; the watch takes the port after it."""


@dataclass(frozen=True)
class Launch:
    """launcher: `alone`, `moe28t` (its own variables), `torchrun`, `mpi`, `slurm` or `tpu`. coordinator: `host:port` of
    the first process. process: number of this one of `processes`. local_process: its number on this host, where the
    launcher started several on one and each sees all GPUs (it then takes the one of its number); otherwise None.
    """

    launcher: str = "alone"
    coordinator: str = ""
    processes: int = 1
    process: int = 0
    local_process: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes what all have in common."""
        return self.process == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


# The compiler for TPU7x would multiply bfloat16 matrices out of tiles of 16 rows, while the arguments of a program come
# in tiles of 8: it would copy every stack of dense weights before the loop over layers, at each step.
_TPU_OPTIONS = {"tpu7x": "--xla_tpu_impure_use_large_2nd_minor_layout_for_x16=false"}


def set_tpu_options(environment: MutableMapping[str, str], kind: str = "") -> None:
    """Add what programs for this kind of TPU (by default the one that the environment names) need to the options that
    its compiler reads when JAX starts; those that are set already stay."""
    kind = kind or environment.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    option = _TPU_OPTIONS.get(kind)
    present = environment.get("LIBTPU_INIT_ARGS", "")
    if option is not None and option.partition("=")[0] not in present:
        environment["LIBTPU_INIT_ARGS"] = f"{present} {option}".strip()


def detect_launch(environment: Mapping[str, str]) -> Launch:
    """Understand the variables of the launchers, in this order: one's own (`MOE28T_COORDINATOR`, `MOE28T_PROCESSES`,
    `MOE28T_PROCESS`), torchrun, Open MPI, Slurm steps, launchers with PMI (MPICH, Intel MPI), TPU pods.

    `MOE28T_COORDINATOR` (`host:port`) also replaces the coordinator of any other launcher. One process is `alone`,
    whatever started it. A process that sees one GPU alone (`CUDA_VISIBLE_DEVICES`, as `srun --gpus-per-task=1` sets it)
    takes that one, whatever its number on the host.

    Raises ValueError for numbers that do not fit together, and where a launcher does not tell the first host.
    """
    for detect in (_own, _torchrun, _open_mpi, _slurm, _pmi, _tpu):
        launch = detect(environment)
        if launch is not None:
            return _with_own_device(_checked(launch), environment) if launch.processes > 1 else Launch()
    return Launch()


def _with_own_device(launch: Launch, environment: Mapping[str, str]) -> Launch:
    """Without a local number where the launcher has left this process one GPU to see: among the visible ones, which are
    counted from 0, it has none of that number.

    Slurm sets what a task sees. Elsewhere a number that is not the process's own was set for all of them, which cannot
    share one GPU: they keep their numbers, and the devices that are missing are named at the start.
    """
    visible = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if len(visible) != 1:
        return launch
    for_all = (
        launch.launcher != "slurm" and visible[0].isdecimal() and int(visible[0]) != launch.local_process
    )
    return launch if for_all else replace(launch, local_process=None)


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.process < launch.processes:
        raise ValueError(
            f"{launch.launcher} says that this is process {launch.process} of {launch.processes}; processes are "
            f"counted from 0 to {launch.processes - 1}."
        )
    port = re.fullmatch(r".+:(\d{1,5})", launch.coordinator)
    # The port after it is used too.
    if port is None or not 1 <= int(port[1]) <= 65_534:
        raise ValueError(
            f"The coordinator of the {launch.processes} processes is {launch.coordinator!r} ({launch.launcher}); set "
            f"MOE28T_COORDINATOR to host:port of the first process, port 1 to 65534, for example 10.0.0.1:{PORT}."
        )
    return launch


def _own(environment: Mapping[str, str]) -> Launch | None:
    count = _number(environment, "MOE28T_PROCESSES")
    if count is None:
        return None
    process = _number(environment, "MOE28T_PROCESS")
    if process is None:
        raise ValueError(
            f"MOE28T_PROCESSES is {count} but MOE28T_PROCESS, the number of this one, is not set; set it."
        )
    return Launch(
        "moe28t",
        environment.get("MOE28T_COORDINATOR", ""),
        count,
        process,
        _number(environment, "MOE28T_LOCAL_PROCESS"),
    )


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    count, process = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    if count is None or process is None or "MASTER_ADDR" not in environment:
        return None
    # The launcher itself may listen on its port.
    port = (_number(environment, "MASTER_PORT") or PORT) + 1
    local = (
        _number(environment, "LOCAL_RANK") if (_number(environment, "LOCAL_WORLD_SIZE") or 1) > 1 else None
    )
    return Launch(
        "torchrun", _coordinator(environment, environment["MASTER_ADDR"], port), count, process, local
    )


def _open_mpi(environment: Mapping[str, str]) -> Launch | None:
    return _mpi(
        environment,
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    )


def _pmi(environment: Mapping[str, str]) -> Launch | None:
    return _mpi(environment, "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")


def _mpi(
    environment: Mapping[str, str], size: str, rank: str, local_size: str, local_rank: str
) -> Launch | None:
    count, process = _number(environment, size), _number(environment, rank)
    if count is None or process is None:
        return None
    together = _number(environment, local_size) or 1
    local = _number(environment, local_rank) if together > 1 else None
    host = environment.get("MASTER_ADDR", "")
    if not host and together == count:
        host = "127.0.0.1"
    port = _number(environment, "MASTER_PORT") or PORT
    return Launch("mpi", _coordinator(environment, host, port), count, process, local)


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    nodes = environment.get("SLURM_STEP_NODELIST")
    count = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS")
    process = _number(environment, "SLURM_PROCID")
    if nodes is None or count is None or process is None:
        return None
    if _number(environment, "PMI_SIZE") not in (None, count):
        return None  # another launcher started these, and Slurm only the launcher
    hosts = _number(environment, "SLURM_STEP_NUM_NODES") or 1
    local = _number(environment, "SLURM_LOCALID") if count > hosts else None
    # Two jobs that share a host must not meet.
    port = PORT + 2 * ((_number(environment, "SLURM_JOB_ID") or 0) % 1024)
    return Launch("slurm", _coordinator(environment, first_host(nodes), port), count, process, local)


def _tpu(environment: Mapping[str, str]) -> Launch | None:
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    process = _number(environment, "TPU_WORKER_ID")
    if len(hosts) < 2 or process is None:
        return None
    slices = _number(environment, "MEGASCALE_NUM_SLICES") or 1
    if slices == 1:
        return Launch("tpu", _coordinator(environment, hosts[0], PORT), len(hosts), process)
    # Every slice counts its hosts from 0; the coordinator of the slices is a host of the first one.
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
    process += len(hosts) * (_number(environment, "MEGASCALE_SLICE_ID") or 0)
    return Launch("tpu", _coordinator(environment, first, PORT), len(hosts) * slices, process)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `node[007-9,12],other` gives `node007`, `r[1-2]n[3-4]` gives `r1n3`."""
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _coordinator(environment: Mapping[str, str], host: str, port: int) -> str:
    return environment.get("MOE28T_COORDINATOR") or (f"{host}:{port}" if host else "")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name} is {text!r} in the environment; a launcher sets it to a number.")
    return int(text)
