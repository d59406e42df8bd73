"""`moe28t compile`: a step compiled for a deployment that is not there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe28t_jax.cli.common import check_chunk, chunk_of, fail, json_text, keep_programs, overrides, some_path


def run_compile(options: argparse.Namespace) -> int:
    """Run `moe28t compile`; exit status 1 where the program does not fit."""
    from moe28t_jax.config import ModelConfig, slice_config
    from moe28t_jax.parallel.mesh_file import load_mesh_file
    from moe28t_jax.planning.compile.topology import prepare_environment

    chunk = chunk_of(options)
    config = slice_config(ModelConfig.preset(options.preset).override(overrides(options)), options.layers)
    mesh = load_mesh_file(options.mesh)
    check_chunk(chunk, options.context or min(mesh.context, config.max_context))
    if options.text is not None and not options.text.parent.is_dir():
        fail(
            f"--text {str(options.text)!r} is in a folder that does not exist; make {str(options.text.parent)!r}."
        )
    if options.text is not None:
        try:
            options.text.open("a").close()
        except OSError as error:
            fail(f"--text {str(options.text)!r} cannot be written ({error.strerror}); name another file.")
    # Before JAX starts, which reads them then.
    prepare_environment(mesh)
    before: set[str] = set()
    if options.save is not None:
        keep_programs(options.save)
        before = _programs(options.save)

    import jax

    from moe28t_jax.planning.compile import compile_step

    try:
        report = compile_step(
            config, mesh, options.phase, options.batch, options.context, chunk,
            explicit=not options.automatic, model=options.preset,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        reason = next(iter(str(error).strip().splitlines()), "without a reason")[:300].rstrip(".")
        fail(f"The compiler refuses {options.phase} on {mesh.name} ({reason}).")
    except RuntimeError as error:
        fail(str(error))
    if options.text is not None:
        options.text.write_text(report.text, encoding="utf-8")
    kept = [] if options.save is None else sorted(_programs(options.save) - before)
    if options.json:
        print(json_text(report.to_json() | ({"saved": kept} if options.save is not None else {})))
    else:
        from moe28t_jax.planning.compile.table import print_report

        print_report(report)
        if options.save is not None:
            print(f"Kept {', '.join(kept) or 'nothing new'} in {str(options.save)!r}.")
    return 0 if report.fits else 1


def _programs(folder: Path) -> set[str]:
    """Names of the entries of a compilation cache; beside each may be when it was last used."""
    return {entry.name for entry in folder.iterdir() if not entry.name.endswith("-atime")}


def add_compile_options(command: argparse.ArgumentParser, positive: Any) -> None:
    """The options of `moe28t compile`."""
    command.add_argument("--preset", default="moe28t", help="model to compile; default moe28t")
    command.add_argument(
        "--mesh", required=True, metavar="FILE", help="mesh file, by path or by name (such as tpu7x-4x4x2)"
    )
    command.add_argument(
        "--phase", choices=("prefill", "decode", "train"), default="decode", help="default decode"
    )
    command.add_argument(
        "--batch", type=positive, metavar="ROWS",
        help="sequences; default the mesh file's, in prefill one for each copy of the model",
    )  # fmt: skip
    command.add_argument(
        "--context",
        type=positive,
        metavar="TOKENS",
        help="tokens that a row can hold, in training those that it has; default the mesh file's",
    )
    command.add_argument(
        "--chunk",
        type=positive,
        metavar="TOKENS",
        help="new tokens per step, with --phase prefill alone; default 8192",
    )
    command.add_argument(
        "--layers", type=positive, metavar="COUNT", help="compile the first layers only, for a quick look"
    )
    command.add_argument(
        "--automatic", action="store_true",
        help="leave the division to the compiler: no kernels, no explicit exchanges (to see what those are worth)",
    )  # fmt: skip
    command.add_argument(
        "--save",
        type=some_path,
        metavar="FOLDER",
        help="keep the compiled program there, for --programs of the commands that load a model",
    )
    command.add_argument("--text", type=Path, metavar="FILE", help="write the compiled program's text")
