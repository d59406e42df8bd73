"""torch and fla-core for `bench_delta_rule.py`: a process of its own in an environment of its own.

It runs under the interpreter of that environment, which needs torch and numpy, and fla-core 0.6.0 for its naive forms.
A line of JSON on standard input asks, a line of JSON on standard output answers; arrays go through files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import side_by_side

Inputs = dict[str, Any]


def step_inputs(batch: int, heads: int, width: int) -> Inputs:
    """One token of a layer between its projections, float32."""
    import numpy as np

    random = np.random.default_rng(1)

    def normal(*size: int) -> Any:
        return random.standard_normal(size, np.float32)

    return {
        "x": normal(batch, 3, heads, width),
        "window": normal(batch, 3, 3, heads, width),
        "taps": 0.5 * normal(4, 3, heads, width),
        "log_decay": -np.abs(normal(batch, heads, width)),
        "beta": random.uniform(0, 1, (batch, heads)).astype(np.float32),
        "gate": normal(batch, heads, width),
        "norm_weight": normal(width),
        "state": normal(batch, heads, width, width),
    }


class TorchPeer:
    """torch and fla-core, in their own interpreter: a line of JSON asks, a line of JSON answers."""

    def __init__(self, python: str, work: Path):
        self.input, self.output = work / "input.npz", work / "output.npy"
        self.process = subprocess.Popen(
            [python, __file__, str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(side_by_side.CORES)},
        )
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The process of --oracle-python ended with status {self.process.wait()}; its messages are "
                "above. Check that its environment has torch and numpy."
            )
        return json.loads(line)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer; arrays go through the files `input` and `output`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def torch_step(torch: Any, x: Inputs) -> Any:
    """`fused_step` in torch's own operations, float32; state and window are updated in place."""

    def unit(array: Any) -> Any:
        return array * torch.rsqrt((array * array).sum(-1, keepdim=True) + 1e-6)

    inputs = torch.cat([x["window"], x["x"][:, None]], dim=1)
    c = torch.nn.functional.silu((inputs * x["taps"]).sum(1))
    q, k, v = unit(c[:, 0]) * c.shape[-1] ** -0.5, unit(c[:, 1]), c[:, 2]
    x["window"].copy_(inputs[:, 1:])
    state = x["state"].mul_(torch.exp(x["log_decay"])[..., None])
    error = v - torch.einsum("bhk,bhkv->bhv", k, state)
    flat = state.view(-1, *state.shape[2:])
    update = (x["beta"][..., None] * error).view(-1, 1, v.shape[-1])
    torch.baddbmm(flat, k.view(-1, k.shape[-1], 1), update, out=flat)
    o = torch.einsum("bhk,bhkv->bhv", q, state)
    normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-5) * x["norm_weight"]
    return normed * torch.sigmoid(x["gate"])


def serve(work: Path) -> None:
    """The process of --oracle-python."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(side_by_side.CORES)
    versions: dict[str, str | None] = {"torch": torch.__version__, "fla-core": None}
    naive: Any = None
    try:
        import fla  # pyright: ignore[reportMissingImports]
        from fla.ops.kda import naive  # pyright: ignore[reportMissingImports]

        versions["fla-core"] = fla.__version__
    except ModuleNotFoundError:
        pass
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        with torch.no_grad():
            if "fla" in question:
                x = {name: torch.from_numpy(a) for name, a in np.load(work / "input.npz").items()}
                function = getattr(naive, f"naive_{question['fla']}_kda")
                start, start_busy = time.perf_counter(), time.process_time()
                o, _ = function(*(x[name] for name in ("q", "k", "v", "g", "beta")), scale=1.0)
                busy, seconds = time.process_time() - start_busy, time.perf_counter() - start
                np.save(work / "output.npy", o.numpy())
            else:
                x = {name: torch.from_numpy(a) for name, a in step_inputs(*question["step"]).items()}
                np.save(work / "output.npy", torch_step(torch, x).numpy())
                start, start_busy = time.perf_counter(), time.process_time()
                for _ in range(question["calls"]):
                    torch_step(torch, x)
                busy = (time.process_time() - start_busy) / question["calls"]
                seconds = (time.perf_counter() - start) / question["calls"]
        print(json.dumps({"seconds": seconds, "busy": busy}), flush=True)


if __name__ == "__main__":
    side_by_side.prepare_process()
    serve(Path(sys.argv[1]))
