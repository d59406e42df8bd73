"""Ctrl-C at any time: one sentence, and never forgotten."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moe28t_jax.cli.interrupts import heard


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """A job in the background, as tests may be, inherits that interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


WHILE_IMPORTING = """
import importlib.abc, os, signal, sys
from moe28t_jax import command

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "moe28t_jax.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Slow())
command.main()
"""


def test_while_python_imports() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_IMPORTING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "moe28t: interrupted.\n")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # Python runs a handler between two of its instructions.
    time.sleep(0.001)


def test_inside_of_a_callback_that_forgets_exceptions() -> None:
    """As `gc` calls them; the name is that of JAX's."""
    came_through = []

    def _xla_gc_callback() -> None:
        interrupt()
        came_through.append(True)

    with pytest.raises(KeyboardInterrupt), heard():
        _xla_gc_callback()
        time.sleep(10)
    assert came_through == [True]


def test_a_job_in_the_background_goes_on() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with heard():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_elsewhere_and_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), heard():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before
