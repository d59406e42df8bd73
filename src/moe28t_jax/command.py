"""Where the `moe28t` command begins: what can be interrupted while Python still imports it."""

import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing has been done yet. An exception would come out of whatever is being imported."""
    os.write(2, b"moe28t: interrupted.\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command of this process and end with its status."""
    default = signal.getsignal(signal.SIGINT)
    # A job in the background ignores what is meant for the one before it.
    if default is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from moe28t_jax.cli import main as run

    if default is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, default)
    sys.exit(run())
