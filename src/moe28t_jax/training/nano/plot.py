"""Plot a training log: `python -m moe28t_jax.training.nano.plot training_log.jsonl picture.png`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path


def plot_log(log: Path, picture: Path) -> None:
    """Loss in bits per token (training and held out), the indexers' loss, and the router's worst overload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "entropy" in line]
    heldout = [line for line in lines if "heldout" in line]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7, 7), sharex=True, layout="constrained")
    x = [line["step"] for line in steps]
    top.plot(x, [line["entropy"] / math.log(2) for line in steps], label="training", linewidth=1)
    bits = [line["heldout"] / math.log(2) for line in heldout]
    top.plot([line["step"] for line in heldout], bits, "o-", label="held out")
    top.set_ylabel("bits per token")
    top.legend()
    middle.plot(x, [line["indexer"] for line in steps], linewidth=1)
    middle.set_ylabel("indexer KL (nats)")
    bottom.plot(x, [line["violation"] for line in steps], linewidth=1)
    bottom.set_ylabel("highest load / mean - 1")
    bottom.set_xlabel("step")
    lengths = [line["length"] for line in steps]
    for before, here, step in zip(lengths, lengths[1:], x[1:], strict=False):
        if before != here:
            for axis in (top, middle, bottom):
                axis.axvline(step, color="gray", linestyle=":")
            top.annotate(f"{before} -> {here} tokens", (step, top.get_ylim()[1] * 0.95), fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    plot_log(arguments.log, arguments.picture)


if __name__ == "__main__":
    main()
