"""The rule by which every operation chooses among its implementations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
"""Every name that an operation may use for an implementation."""

# Part of the key of JAX's caches, so that what was traced under another preference is never used again.
_preferred = jax.make_user_context(())


@contextmanager
def prefer(*implementations: str) -> Iterator[None]:
    """While it lasts, operations that may choose try these implementations first, in this order.

    For kernels that are no default because they have not run on their device, and for programs that are compiled
    ahead of time for a device that is not there: `with prefer("tpu"): jax.jit(f).lower(...)`. An implementation
    that refuses a case is passed over as always, and one asked for by name is still called alone. The preference
    holds where a function is traced; preferences do not add up: the innermost counts, and `prefer()` is none.

    Raises:
      ValueError: for a name that no operation uses.
    """
    unknown = [name for name in implementations if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(
            f"There is no implementation {unknown[0]!r} to prefer; the names are {', '.join(IMPLEMENTATIONS)}."
        )
    with _preferred(implementations):
        yield


def dispatch(
    op_name: str,
    implementations: Mapping[str, Callable[..., Any]],
    default: Sequence[str],
    implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call one implementation of an operation and return its result.

    With `implementation=None` those that `prefer` names and then those in `default` are tried in order; an
    implementation refuses a case it does not support by raising NotImplementedError, and the next one is tried.
    An implementation asked for by name is called alone, so its NotImplementedError reaches the caller: there is
    never a silent substitute.

    Args:
      op_name: the operation's public name, used in error messages.
      implementations: all implementations by name.
      default: names tried, in this order, when none is asked for. An implementation that has never run on its
        device is left out here and stays available by name.
      implementation: a name in `implementations`, or None.
      *args: passed to the implementation, NumPy arrays as JAX arrays.
      **kwargs: passed to the implementation.

    Raises:
      ValueError: if `implementation` is not a known name.
      NotImplementedError: if the implementation asked for, or every default one, refuses the case.
    """
    args = tuple(jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args)
    if implementation is not None:
        if implementation not in implementations:
            names = ", ".join(repr(name) for name in sorted(implementations))
            raise ValueError(
                f"{op_name} has no implementation {implementation!r}; "
                f"pass one of {names}, or None to let it choose."
            )
        return implementations[implementation](*args, **kwargs)
    refusals: list[str] = []
    preferred = [name for name in _preferred.value if name in implementations]
    for name in dict.fromkeys((*preferred, *default)):
        try:
            return implementations[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{name!r}: {refusal}")
    reasons = "; ".join(refusals) if refusals else "none is enabled by default"
    raise NotImplementedError(
        f"{op_name} has no default implementation for these arguments ({reasons}); "
        f"pass other arguments, or ask for an implementation by name: "
        f"{', '.join(repr(name) for name in sorted(implementations))}."
    )
