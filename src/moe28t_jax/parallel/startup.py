"""Start-up of a program of several processes: one command, the same on every host."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from collections.abc import Mapping

from moe28t_jax.parallel.launch import Launch, detect_launch, set_tpu_options
from moe28t_jax.parallel.watch import HostError, Watch

TIMEOUT = 120.0
"""Seconds to wait for all processes in the beginning, and for a sign of life of each afterwards."""

LONGEST = 86_400
"""Seconds: a day."""

_running: tuple[Launch, Watch | None] | None = None


def initialize_distributed(
    timeout: float | None = None, environment: Mapping[str, str] | None = None
) -> Launch:
    """Connect this process with the others of the program; call it before anything computes.

    Who the others are is read from the variables of the launcher (`launch.detect_launch`); a process that was started
    alone returns at once. Afterwards `jax.devices()` are those of all processes. On a CPU collectives go through gloo.

    timeout: seconds, by default `MOE28T_TIMEOUT` of the environment or 120. If a process does not come within it, or
    dies or falls silent for so long later, every other one ends with one sentence that names it: at start-up by
    HostError, later, when the main thread may be inside a collective, by ending the process with status 1.

    A second call returns what the first one found.
    """
    global _running
    if _running is not None:
        return _running[0]
    environment = os.environ if environment is None else environment
    set_tpu_options(os.environ)
    launch = detect_launch(environment)
    if launch.processes == 1:
        _running = launch, None
        return launch
    if timeout is None:
        timeout = _timeout(environment)
    host, port = launch.address
    watch = Watch((host, port + 1), launch.processes, launch.process, timeout)

    import jax

    if (jax.config.jax_platforms or "").split(",")[0] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            local_device_ids=launch.local_process,
            # The launcher is known; nothing else is asked.
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(timeout)),
            # The watch tells first, in words; JAX ends the process without.
            heartbeat_timeout_seconds=max(10, round(3 * timeout)),
            shutdown_timeout_seconds=max(1, round(timeout)),
        )
    except Exception as error:
        watch.fail("it could not start JAX's coordination service.")
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HostError(
            f"Process {launch.process} of {launch.processes} ({launch.launcher}) could not connect to the coordinator "
            f"{launch.coordinator} ({reason}); let that port through, or set MOE28T_COORDINATOR to another."
        ) from error
    # Registered later than the watch's own leave, so that it runs before it: all wait for one another here.
    atexit.register(_leave, watch)
    _running = launch, watch
    return launch


def _leave(watch: Watch) -> None:
    """The end of this process: with the others, unless an error ends it; they have been told, and do not come."""
    import jax

    late = "" if watch.failed else watch.leave()
    if late:
        print(f"This process waited for the others: {late}", file=sys.stderr)
    if watch.failed:
        _flush()
        os._exit(1)
    jax.distributed.shutdown()


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()


def _timeout(environment: Mapping[str, str]) -> float:
    text = environment.get("MOE28T_TIMEOUT", "") or str(TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"MOE28T_TIMEOUT is {text!r}; it is a number of seconds from 1 to {LONGEST}.")
    return seconds


def fail_together(sentence: str, status: int) -> int:
    """Where this process is one of several: tell the others that it ends because of an error, so that none waits for it
    in a collective, and end it with the status at once; an ordinary end would wait for them. Otherwise returns the
    status."""
    if _running is not None and _running[1] is not None:
        _running[1].fail(sentence)
        _flush()
        os._exit(status)
    return status
