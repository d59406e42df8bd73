"""What all processes of a program do together, step by step, each learning whether every one of them succeeded."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from moe28t_jax.weights.errors import CheckpointError

PATIENCE_SECONDS = 7200
"""How long a process waits for the others in one step. A process that died is noticed by JAX much earlier."""

_ASK_SECONDS = 60
_numbers = itertools.count()
_log = logging.getLogger(__name__)


class Together:
    """One undertaking of all processes. Each makes it at the same point of its program, and takes the same steps.

    The processes tell one another through JAX's coordination service: no collective runs on the devices, so that steps
    may be taken in a thread beside the program's own, and no file is needed, which a full disk could refuse. A program
    of one process takes its steps alone.

    `otherwise` is what a failure means, the beginning of its sentence. `name` is the same in all processes, and another
    one for each undertaking.
    """

    def __init__(
        self,
        otherwise: str,
        *,
        client: Any = None,
        process: int | None = None,
        processes: int | None = None,
        name: str | None = None,
    ) -> None:
        self.process = jax.process_index() if process is None else process
        self.processes = jax.process_count() if processes is None else processes
        self.name = f"moe28t-together-{next(_numbers)}" if name is None else name
        self._otherwise = otherwise
        self._client = client
        self._step = ""
        self._count = 0
        if self.processes > 1 and client is None:
            self._client = _coordination_service()

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def is_first(self) -> bool:
        return self.process == 0

    def step(self, action: Callable[[], Any]) -> None:
        """Do one's own part; return when all have done theirs.

        Raises the own error where there is one, CheckpointError with the reason where another process failed.
        """
        if self.alone:
            action()
            return
        try:
            action()
        except Exception as error:
            failures = self._exchange(error)
            others = {process: text for process, (text, cause) in failures.items() if cause}
            # Who waited in vain for another process tells of that one.
            if others and not _is_cause(error):
                raise self._failed(others) from error
            raise
        except BaseException as error:
            # An interrupt: the others are told, not waited for.
            self._tell_interrupt(error)
            raise
        failures = self._exchange(None)
        if failures:
            causes = {process: text for process, (text, cause) in failures.items() if cause}
            raise self._failed(causes or {process: text for process, (text, _) in failures.items()})

    def _exchange(self, error: Exception | None) -> dict[int, tuple[str, bool]]:
        """The failures of all processes: sentence, and whether it is a cause rather than waiting for another one."""
        status = None if error is None else [_sentence(error), _is_cause(error)]
        before, key = self._advance()
        if not self.is_first:
            self._client.key_value_set(f"{key}/{self.process}", json.dumps(status))
            found = json.loads(self._wait(f"{key}/all", 0))
        else:
            found = {"0": status}
            with self._telling_interrupts(key):
                for process in range(1, self.processes):
                    found[str(process)] = json.loads(self._wait(f"{key}/{process}", process))
                    self._client.key_value_delete(f"{key}/{process}")
            self._client.key_value_set(f"{key}/all", json.dumps(found))
            # All have answered in this step, so all have read the outcome of the last one.
            if before:
                self._client.key_value_delete(f"{before}/all")
        return {int(process): (one[0], one[1]) for process, one in found.items() if one is not None}

    def _advance(self) -> tuple[str, str]:
        before, self._count = self._step, self._count + 1
        self._step = f"{self.name}/{self._count}"
        return before, self._step

    @contextmanager
    def _telling_interrupts(self, key: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._client.key_value_set(f"{key}/all", json.dumps({"0": [_sentence(error), True]}))
            raise

    def _tell_interrupt(self, error: BaseException) -> None:
        _, key = self._advance()
        status = [_sentence(error), True]
        if self.is_first:
            self._client.key_value_set(f"{key}/all", json.dumps({"0": status}))
        else:
            self._client.key_value_set(f"{key}/{self.process}", json.dumps(status))

    def _wait(self, key: str, process: int) -> str:
        waited = 0
        while True:
            try:
                return self._client.blocking_key_value_get(key, 1000 * _ASK_SECONDS)
            except Exception as error:
                if not _is_timeout(error):
                    raise CheckpointError(
                        f"{self._otherwise}: process {process} cannot be asked any more ({_sentence(error)})."
                    ) from error
                waited += _ASK_SECONDS
                if waited >= PATIENCE_SECONDS:
                    raise CheckpointError(
                        f"{self._otherwise}: process {process} has not answered for {waited} seconds."
                    ) from error
            _log.warning("Waiting for process %d since %d seconds.", process, waited)

    def _failed(self, failures: dict[int, str]) -> CheckpointError:
        number, text = min(failures.items())
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return CheckpointError(f"{self._otherwise}: process {number}{more} failed: {text}")


def _coordination_service() -> Any:
    # JAX has no public name for its client.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise CheckpointError(
            "Several processes can save together only after jax.distributed.initialize; call it first."
        )
    return client


def _is_timeout(error: BaseException) -> bool:
    return "DEADLINE_EXCEEDED" in str(error)


def _is_cause(error: BaseException) -> bool:
    """Whether an error is more than having waited for another process."""
    return not (isinstance(error, jax.errors.JaxRuntimeError) and _is_timeout(error))


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
