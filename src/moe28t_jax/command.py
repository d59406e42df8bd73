"""Where the `moe28t` command begins: what can be interrupted while Python still imports it."""

import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing has been done yet. An exception would come out of whatever is being imported."""
    os.write(2, b"moe28t: interrupted.\n")
    os._exit(128 + number)


_ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
"""Files in /dev where there is a TPU or a GPU."""


def _skip_devices_that_are_not_there() -> None:
    """Tell JAX to use the CPU where Linux knows no accelerator: the TPU library, which is installed for its compiler,
    would look for one for seconds and complain on standard error."""
    if sys.platform == "linux" and "JAX_PLATFORMS" not in os.environ and os.path.isdir("/dev"):
        from glob import glob

        if not any(glob(f"/dev/{name}") for name in _ACCELERATORS):
            os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    """Run the command of this process and end with its status."""
    _skip_devices_that_are_not_there()
    default = signal.getsignal(signal.SIGINT)
    # A job in the background ignores what is meant for the one before it.
    if default is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from moe28t_jax.cli import main as run

    if default is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, default)
    sys.exit(run())
