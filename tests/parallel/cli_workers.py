"""The `moe28t` command on a mesh."""

import contextlib
import io
import json
import sys
from typing import Any

import jax

import moe28t_jax as m
from moe28t_jax.cli import main
from moe28t_jax.evals import bits, score_texts
from moe28t_jax.parallel import make_mesh

TEXTS = [("code", "def f(x):\n    return x\n"), ("one", "a"), ("long", "ab cd " * 12)]


def score_on_mesh(folder: str) -> dict[str, Any]:
    """Bits of texts on one device and on eight, and the exchanges in the program of the eight."""
    one, many = m.load(folder, dtype="float32"), m.load(folder, mesh=make_mesh("cpu-8"), dtype="float32")
    expected = [score.bits for score in score_texts(one, TEXTS)]
    chunk, programs = bits._chunk_bits, []

    def noted(*arguments: Any) -> Any:
        programs.append(chunk.lower(*arguments).as_text())
        return chunk(*arguments)

    bits._chunk_bits = noted
    found = [score.bits for score in score_texts(many, TEXTS)]
    return {
        "expected": expected,
        "found": found,
        "exchanges": [text.count("all_to_all") for text in programs],
    }


def generate_with_empty_places(mesh: str) -> dict[str, Any]:
    """What `generate` prints on a mesh that does not divide the experts, and what one device generates."""
    one = m.load("nano", dtype="float32").generate("import", max_new_tokens=3)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(["generate", "--prompt", "import", "--max-new-tokens", "3", "--mesh", mesh])
    return {"status": status, "printed": output.getvalue(), "one": one.text}


def run_commands(commands: list[list[str]], folder: str, mesh: str) -> dict[str, Any]:
    """What this process gives for each command, [status, output, remarks], and tokens drawn without a seed."""
    found = []
    for command in commands:
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(io.StringIO()) as remarks,
        ):
            status = main(command)
        found.append([status, output.getvalue(), remarks.getvalue()])
    model = m.load(folder, mesh=make_mesh(mesh), dtype="float32")
    drawn = model.generate("hello", max_new_tokens=6, temperature=1.0).token_ids
    return {"processes": jax.process_count(), "commands": found, "drawn": drawn}


if __name__ == "__main__":
    commands, folder, mesh, report = sys.argv[1:]
    with open(report, "w", encoding="utf-8") as file:
        json.dump(run_commands(json.loads(commands), folder, mesh), file)
