"""Running a function on several virtual devices: in a process of its own, which sees them from its start."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# These programs run once, on a few numbers: most of their time is the compiler's.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

_WORKER = """
import importlib.util, json, pickle, sys, warnings
from jaxtyping import install_import_hook
path, name, arguments, result = sys.argv[1:]
with install_import_hook(["moe28t_jax", "pallas_kernels"], "beartype.beartype"):
    spec = importlib.util.spec_from_file_location("worker", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker"] = module
    spec.loader.exec_module(module)
    warnings.simplefilter("error")
    value = getattr(module, name)(**json.loads(arguments))
with open(result, "wb") as file:
    pickle.dump(value, file)
"""


def _run_on_devices(count: int, function_path: str, folder: Path, /, **arguments: Any) -> Any:
    path, _, name = function_path.partition(":")
    flags = [os.environ.get("XLA_FLAGS", ""), QUICK, f"--xla_force_host_platform_device_count={count}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags).strip(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), str(HERE)]),
    }
    result = folder / "result.pickle"
    process = subprocess.run(
        [sys.executable, "-c", _WORKER, str(HERE / path), name, json.dumps(arguments), str(result)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        pytest.fail(
            f"{function_path} on {count} devices:\n{process.stdout[-4000:]}\n{process.stderr[-8000:]}"
        )
    with result.open("rb") as file:
        return pickle.load(file)


@pytest.fixture
def run_on_devices(tmp_path: Path) -> Callable[..., Any]:
    """`run_on_devices(count, "file.py:function", **arguments)`: the function's result, computed where `count` virtual
    CPU devices are. The file lies in this folder, arguments are JSON, the result is anything that can be pickled."""
    return lambda count, function_path, **arguments: _run_on_devices(
        count, function_path, tmp_path, **arguments
    )


@pytest.fixture(scope="module")
def run_on_devices_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`run_on_devices` for a fixture of a module: equal calls share one process and one result."""
    found: dict[str, Any] = {}

    def call(count: int, function_path: str, **arguments: Any) -> Any:
        key = json.dumps([count, function_path, arguments], sort_keys=True)
        if key not in found:
            folder = tmp_path_factory.mktemp("devices")
            found[key] = _run_on_devices(count, function_path, folder, **arguments)
        return found[key]

    return call
