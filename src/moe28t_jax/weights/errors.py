"""The one error of this room."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is: one sentence that names the file, the tensor and the way
    out."""


def and_more(names: Sequence[str]) -> str:
    """The first name, and how many others share its fate."""
    rest = len(names) - 1
    return repr(names[0]) + (f" (and {rest} more)" if rest else "")
