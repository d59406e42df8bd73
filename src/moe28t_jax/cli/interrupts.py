"""Ctrl-C: what it does before a command runs, and that it is not lost while one does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_SECONDS = 0.05


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Interrupts raise KeyboardInterrupt where the program can end. In another place than the main thread, none can."""
    here = threading.current_thread() is threading.main_thread()
    # A job in the background ignores what is meant for the one before it.
    if not here or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    inner = frame
    while inner is not None:
        # What is raised inside of a callback of the garbage collector is printed and forgotten; JAX has a long one.
        if inner.f_code.co_name == "_xla_gc_callback":
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()
            return
        inner = inner.f_back
    raise KeyboardInterrupt
