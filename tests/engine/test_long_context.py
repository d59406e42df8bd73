"""`benchmarks/long_context.py` in small: the needle, going on after a kill, memory that does not grow with context."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_context.py"
TOKENS, CHUNK = 4096, 512


@pytest.fixture(scope="module")
def long_context() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_context", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def whole(long_context: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A prompt read without a break."""
    prefill = long_context.Prefill(TOKENS, CHUNK, tmp_path_factory.mktemp("whole"))
    while prefill.done < TOKENS:
        prefill.advance()
    return prefill


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    long_context: ModuleType, whole: Any, tmp_path: Path
) -> None:
    killed = long_context.Prefill(TOKENS, CHUNK, tmp_path)
    for _ in range(3):
        killed.advance()
    # As a kill leaves it in the middle of saving the fourth chunk: rows that nothing counts, half of the small rest.
    with open(tmp_path / "rows.float32", "ab") as file:
        file.write(b"\xff" * 1000)
    (tmp_path / "state.npz.part").write_bytes(b"PK half")
    later = long_context.Prefill(TOKENS, CHUNK, tmp_path)
    assert later.done == 3 * CHUNK and len(later.records) == 3
    while later.done < TOKENS:
        later.advance()
    np.testing.assert_array_equal(later.logits_V, whole.logits_V)
    np.testing.assert_array_equal(later.sets_TN, whole.sets_TN)
    for mine, theirs in zip(jax.tree.leaves(later.cache), jax.tree.leaves(whole.cache), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # A finished run has nothing left to read, and all that is needed to look at its end.
    finished = long_context.Prefill(TOKENS, CHUNK, tmp_path)
    assert finished.done == TOKENS
    assert long_context.check_needle(finished)["needle_selected"]


def test_the_chunks_are_one_prompt(long_context: ModuleType, whole: Any) -> None:
    """In one piece: the same selection after the last token, and the same logits up to the order of sums."""
    cache = whole.steps.new_cache(1, TOKENS + long_context.ROOM)
    logits_V, sets_TN, _, _ = long_context.read_chunk(
        whole.parameters, jnp.asarray(whole.ids_T), cache, config=whole.config
    )
    np.testing.assert_array_equal(sets_TN[-1], whole.sets_TN[-1])
    np.testing.assert_allclose(logits_V, whole.logits_V, rtol=0, atol=1e-5)


def test_the_needle_is_found_only_by_who_asks(long_context: ModuleType, whole: Any, tmp_path: Path) -> None:
    found = long_context.check_needle(long_context.Prefill(TOKENS, CHUNK, whole.store.folder))
    assert found["needle_selected"] and found["change_of_the_logits_without_the_needle"] > 0
    assert len(found["decoded"]) == long_context.DECODED
    other = long_context.Prefill(TOKENS, CHUNK, tmp_path)
    other.ids_T = other.ids_T.copy()
    other.ids_T[-1] = long_context.QUESTION + 1
    while other.done < TOKENS:
        other.advance()
    with pytest.raises(AssertionError, match="did not select the needle"):
        long_context.check_needle(other)


def test_memory_of_the_program_does_not_grow_with_the_context(long_context: ModuleType) -> None:
    def temporary_bytes(tokens: int) -> int:
        config = long_context.configuration(tokens)
        memory = long_context.compile_chunk(config, 256).memory_analysis()
        state = tokens * long_context.bytes_per_token(config)
        # The cache is updated in place.
        assert memory.argument_size_in_bytes > state and memory.alias_size_in_bytes > state
        return memory.temp_size_in_bytes

    short, long = temporary_bytes(65_536), temporary_bytes(1_048_576)
    assert long <= short + 2**16


def test_a_folder_belongs_to_one_run(long_context: ModuleType, whole: Any) -> None:
    with pytest.raises(ValueError, match="holds a run with"):
        long_context.Prefill(TOKENS, 2 * CHUNK, whole.store.folder)
    with pytest.raises(ValueError, match="take a multiple of 64"):
        long_context.Prefill(TOKENS, 100, whole.store.folder)


def test_growth_of_memory_is_noticed(long_context: ModuleType) -> None:
    short = {"tokens": 1000, "peak_bytes": 10**9, "temporary_bytes": 5, "state_bytes_per_token": 224}
    good = short | {"tokens": 10**6, "peak_bytes": 10**9 + 224 * 10**6}
    assert long_context.check_memory(good, short)["peak_grew"] == 224 * 10**6
    with pytest.raises(AssertionError, match="peak memory grew"):
        long_context.check_memory(good | {"peak_bytes": 10**9 + 2 * 224 * 10**6}, short)
    with pytest.raises(AssertionError, match="temporaries of the program grew"):
        long_context.check_memory(good | {"temporary_bytes": 2**21}, short)


@pytest.mark.slow
def test_the_script_survives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tokens", "16384", "--chunk", "512", "--short", "0", "--folder"]
    environment = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    with subprocess.Popen([*command, str(killed)], env=environment, stdout=subprocess.DEVNULL) as process:
        state = killed / "state.npz"
        while process.poll() is None and not (state.exists() and np.load(state)["done"] >= 1024):
            time.sleep(0.01)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    assert np.load(state)["done"] < 16384
    results = []
    for folder in (killed, undisturbed):
        subprocess.run([*command, str(folder)], env=environment, check=True, stdout=subprocess.DEVNULL)
        results.append(json.loads((folder / "result.json").read_text()))
    for name in ("mean_place", "distinct", "needles"):
        assert results[0]["chunks"][name] == results[1]["chunks"][name]
    assert results[0]["needle"] == results[1]["needle"]
