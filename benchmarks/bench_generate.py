"""Prefill and decode speed on CPU, side by side with the kimi_linear model of `transformers`.

A random 114M kimi_linear checkpoint (float32 arithmetic, 2 cores) is written in the public layout and loaded by
both. Each round measures ours, theirs, in turn, so that a drift of the machine's load meets both; the best
round of each counts. Both read the same prompt and the same tokens after it, and their logits are compared.
Decode is also set against the memory bound: the bytes of weights that one token must read, over the read
bandwidth measured in the same rounds.

The peer lives in an environment of its own (`benchmarks/requirements-oracle.txt`) and runs in a process of its
own:

    python benchmarks/bench_generate.py --oracle-python /path/to/oracle/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORES = 2
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "model_max_length": 8192,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 384,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_attn_config": {
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
    },
}


class Ours:
    """This project: the compiled steps of the engine."""

    def __init__(self, folder: Path, prompt, tokens):
        import jax
        import jax.numpy as jnp

        from moe28t_jax.config import ModelConfig
        from moe28t_jax.engine import Steps
        from moe28t_jax.weights import load_parameters

        parameters, config = load_parameters(folder, ModelConfig.from_hf(folder), jnp.float32)
        self.steps, self.prompt, self.tokens = Steps(parameters, config), prompt, tokens
        self.key, self.active = jax.random.key(0), jnp.ones((1,), bool)
        self.inputs = [jnp.asarray([token], jnp.int32) for token in tokens]

    def round(self) -> tuple[float, list[float], list]:
        """Seconds of the prefill, seconds of every decode step, and the logits after each of them."""
        import numpy as np

        length = len(self.prompt)
        cache = self.steps.new_cache(1, length + len(self.tokens))
        start = time.perf_counter()
        logits_BV, cache = self.steps.prefill(
            np.asarray([self.prompt], np.int32), np.asarray([length], np.int32), cache
        )
        logits = [np.asarray(logits_BV)[0]]
        prefill, decode = time.perf_counter() - start, []
        for token_B in self.inputs:
            start = time.perf_counter()
            _, logits_BV, cache = self.steps.decode(token_B, self.active, cache, self.key, 0.0, 1.0)
            logits.append(np.asarray(logits_BV)[0])
            decode.append(time.perf_counter() - start)
        return prefill, decode, logits


def serve_peer(folder: Path, prompt: list[int], tokens: list[int]) -> None:
    """The peer's process: one round per line of standard input, answered with one line of JSON."""
    # With flash-linear-attention installed, its Triton kernel is called, which does not run on a CPU.
    for name in ("fla", "causal_conv1d"):
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(CORES)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        with torch.no_grad():
            start = time.perf_counter()
            result = model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            logits = [result.logits[0, -1].numpy()]
            prefill, decode = time.perf_counter() - start, []
            for token in tokens:
                start = time.perf_counter()
                result = model(
                    input_ids=torch.tensor([[token]]), past_key_values=result.past_key_values, use_cache=True
                )
                logits.append(result.logits[0, -1].numpy())
                decode.append(time.perf_counter() - start)
        np.save(line.strip(), np.stack(logits))
        print(json.dumps({"prefill": prefill, "decode": decode}), flush=True)


class Peer:
    """The other implementation, in its own interpreter."""

    def __init__(self, python: str, folder: Path, prompt: list[int], tokens: list[int]):
        work = folder.parent
        (work / "ids.json").write_text(json.dumps({"prompt": prompt, "tokens": tokens}))
        self.output = work / "peer_logits.npy"
        environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            [python, __file__, "--peer-folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.versions = self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The peer's process ended with status {self.process.wait()}; its messages are above. Check that "
                "its environment has the packages of benchmarks/requirements-oracle.txt."
            )
        return json.loads(line)

    def round(self) -> tuple[float, list[float], list]:
        """As `Ours.round`."""
        import numpy as np

        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.output}\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["prefill"], answer["decode"], list(np.load(self.output))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def read_bandwidth() -> float:
    """Bytes per second that all cores read together, far beyond the caches; the best of several passes."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((8192, 8192), jnp.float32)
    vector = jnp.ones((1, 8192), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(vector, matrix).block_until_ready()
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        product(vector, matrix).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best


def measure(arguments: argparse.Namespace, work: Path) -> dict:
    """Write the checkpoint, run the rounds, and return all figures."""
    import jax
    import numpy as np

    from moe28t_jax.config import ModelConfig
    from moe28t_jax.model.parameters import initialize
    from moe28t_jax.weights import save_parameters

    config = ModelConfig.from_hf(CONFIG)
    folder = work / "checkpoint"
    save_parameters(folder, initialize(config, jax.random.key(0)), config)
    random = np.random.default_rng(0)
    prompt = random.integers(3, config.vocab_size, arguments.context).tolist()
    tokens = random.integers(3, config.vocab_size, arguments.steps).tolist()

    sides: dict[str, Ours | Peer] = {"ours": Ours(folder, prompt, tokens)}
    versions = {"jax": jax.__version__}
    if arguments.oracle_python is not None:
        peer = Peer(arguments.oracle_python, folder, prompt, tokens)
        sides["peer"] = peer
        versions |= peer.versions
    for side in sides.values():  # compilation, allocation
        side.round()
    prefill: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    bandwidth, logits, load = [], {}, []
    for _ in range(arguments.rounds):
        bandwidth.append(read_bandwidth())
        load.append(os.getloadavg()[0])
        for name, side in sides.items():
            seconds, steps, logits[name] = side.round()
            prefill[name].append(seconds)
            decode[name] += steps
    if arguments.oracle_python is not None:
        peer.close()

    count = config.parameter_count()
    weight_bytes = 4 * count.active
    bound = max(bandwidth) / weight_bytes
    result: dict = {
        "parameters": count.total,
        "context": arguments.context,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "cores": CORES,
        "load_average": [round(value, 1) for value in load],
        "versions": versions,
        "weight_bytes_per_token": weight_bytes,
        "read_bytes_per_second": round(max(bandwidth)),
        "bound_decode_tokens_per_second": round(bound, 1),
    }
    for name in sides:
        steps = sorted(decode[name])
        result[name] = {
            "prefill_tokens_per_second": round(arguments.context / min(prefill[name]), 1),
            "decode_tokens_per_second": round(1 / steps[len(steps) // 2], 1),
            "best_decode_tokens_per_second": round(1 / steps[0], 1),
            "share_of_bound": round(1 / steps[0] / bound, 3),
        }
    if "peer" in sides:
        result["max_logit_difference"] = float(
            max(np.max(np.abs(a - b)) for a, b in zip(logits["ours"], logits["peer"], strict=True))
        )
        result["max_logit"] = float(max(np.max(np.abs(a)) for a in logits["peer"]))
        for phase in ("prefill", "decode", "best_decode"):
            key = f"{phase}_tokens_per_second"
            result[f"{phase}_ratio"] = round(result["ours"][key] / result["peer"][key], 2)
    return result


def show(result: dict) -> None:
    """Print the figures as a table."""
    print(
        f"kimi_linear, {result['parameters']:,} parameters, float32, {result['cores']} cores, context "
        f"{result['context']}, {result['steps']} decode steps, {result['rounds']} rounds, load average "
        f"{result['load_average']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    )
    rows = [("tokens/s", "prefill", "decode (median)", "decode (best)", "best / bound")]
    for name in ("ours", "peer"):
        if name in result:
            rows.append((name, *(f"{value:g}" for value in result[name].values())))
    if "peer" in result:
        ratios = (result["prefill_ratio"], result["decode_ratio"], result["best_decode_ratio"])
        rows.append(("ours / peer", *(f"{ratio:g}" for ratio in ratios), ""))
    for row in rows:
        print("".join(cell.ljust(18) if i == 0 else cell.rjust(18) for i, cell in enumerate(row)))
    print(
        f"A token reads {result['weight_bytes_per_token'] / 1e6:.0f} MB of weights; at the measured "
        f"{result['read_bytes_per_second'] / 1e9:.1f} GB/s the bound is "
        f"{result['bound_decode_tokens_per_second']:g} tokens/s."
    )
    if "peer" in result:
        print(
            f"Largest difference of logits, prefill and all decode steps: {result['max_logit_difference']:.2e} "
            f"(largest logit {result['max_logit']:.2f})."
        )
    else:
        print("The peer was skipped: --oracle-python was not given.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--oracle-python", help="interpreter of the environment with torch and transformers")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded after it")
    parser.add_argument("--rounds", type=int, default=3, help="rounds measured after one that warms up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peer-folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.context < 1 or arguments.steps < 1 or arguments.rounds < 1:
        parser.error("--context, --steps and --rounds must each be at least 1.")
    if arguments.context + arguments.steps > CONFIG["model_max_length"]:
        parser.error(
            f"--context plus --steps is {arguments.context + arguments.steps}; the configuration allows "
            f"{CONFIG['model_max_length']} tokens."
        )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:CORES]))  # inherited by the peer
    if arguments.peer_folder is not None:
        ids = json.loads((arguments.peer_folder.parent / "ids.json").read_text())
        serve_peer(arguments.peer_folder, ids["prompt"], ids["tokens"])
        return
    with tempfile.TemporaryDirectory() as name:
        result = measure(arguments, Path(name))
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
