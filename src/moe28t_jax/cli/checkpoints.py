"""`moe28t convert`, `fake-checkpoint` and `checksums`: checkpoint folders that are written."""

from __future__ import annotations

import argparse
import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe28t_jax.cli.common import fail, json_text, overrides


def _run(options: argparse.Namespace, action: Callable[[Any], None]) -> int:
    """Do what writes `options.target`, with a progress bar on a terminal, and say what came out."""
    from rich.console import Console
    from rich.progress import Progress

    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            action(progress)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"The disk is full, so {str(options.target)!r} was not written; make room and run this again, which "
                f"goes on where it can, or give it up and delete the folders '.{options.target.resolve().name}.*' "
                "beside it",
            ) from None
    # The bare word is the shipped model, wherever a checkpoint is read.
    shown = f"./{options.target}" if str(options.target) == "nano" else str(options.target)
    size = sum(file.stat().st_size for file in options.target.rglob("*") if file.is_file())
    seconds = round(time.perf_counter() - started, 2)
    if options.json:
        print(json_text({"target": shown, "bytes": size, "seconds": seconds}))
    else:
        print(f"Wrote {shown} ({size:,} bytes).")
    return 0


def _folder(text: str, what: str) -> Path:
    """A path of this machine; a sentence for an address."""
    if "://" in text:
        way = "fetch it first" if what == "SOURCE" else "write a folder and copy it there"
        fail(f"{what} {text!r} is an address, but {what} is a folder of this machine: {way}.")
    return Path(text)


def _check_free(options: argparse.Namespace) -> None:
    # An unfinished conversion leaves no target, so going on with it needs no --overwrite.
    if not options.overwrite and (options.target / "config.json").is_file():
        fail(
            f"{str(options.target)!r} holds a checkpoint already; choose another folder, or replace it with "
            "--overwrite."
        )


def _check_room(options: argparse.Namespace, config: Any) -> None:
    from moe28t_jax.config import slice_config

    sliced = slice_config(config, options.layers, options.experts)
    if options.text_only:
        sliced = sliced.override({"vision": None})
    needed, folder = sliced.parameter_count().stored_bytes, options.target.resolve().parent
    free = shutil.disk_usage(folder).free if folder.is_dir() else needed
    if free < needed:
        fail(
            f"{str(options.target)!r} would take {needed:,} bytes and the disk has {free:,}; write it elsewhere, or "
            "less of the model with --layers and --experts."
        )


def run_convert(options: argparse.Namespace) -> int:
    """Run `moe28t convert`."""
    from moe28t_jax.sources import resolve
    from moe28t_jax.weights import convert, convert_to_orbax, export_orbax, is_orbax

    _folder(options.source, "SOURCE")
    options.target = _folder(options.target, "TARGET")
    source = resolve(options.source).path
    assert source is not None
    if options.target.resolve() != source.resolve():
        _check_free(options)
    if is_orbax(source):
        if options.to == "orbax":
            fail(f"{str(source)!r} is an Orbax checkpoint already; to move it, copy the folder.")
        _no_dtype(options)
        return _run(options, lambda progress: export_orbax(source, options.target, options.to, progress))
    if options.to == "orbax":
        return _run(
            options,
            lambda progress: convert_to_orbax(source, options.target, options.dtype, progress=progress),
        )
    _no_dtype(options)
    return _run(options, lambda progress: convert(source, options.target, to=options.to, progress=progress))


def _no_dtype(options: argparse.Namespace) -> None:
    if options.dtype is not None:
        fail(
            "--dtype goes with --to orbax; in the public layout every tensor has its own type (from Orbax: the "
            "declared one, bfloat16 for most)."
        )


def add_convert_options(command: argparse.ArgumentParser) -> None:
    """The options of `moe28t convert`."""
    command.add_argument(
        "source",
        help="checkpoint folder or file, Orbax folder, or nano (the shipped model; ./nano is a folder)",
    )
    command.add_argument("target", help="folder to write")
    command.add_argument(
        "--to", choices=("mxfp4", "bfloat16", "orbax"), default="mxfp4",
        help="the public layout with experts as MXFP4 (default) or bfloat16, or Orbax with weights as they are",
    )  # fmt: skip
    command.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint that is in the target folder"
    )
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="of the weights in Orbax that are not packed; default what holds those of the source exactly",
    )  # fmt: skip


def run_fake_checkpoint(options: argparse.Namespace) -> int:
    """Run `moe28t fake-checkpoint`."""
    from moe28t_jax.config import ModelConfig
    from moe28t_jax.weights import fake_checkpoint

    options.target = _folder(options.target, "--out")
    config = ModelConfig.preset(options.preset).override(overrides(options))
    if not 0 < options.shard_gigabytes < 1e9:
        fail(f"--shard-gigabytes is {options.shard_gigabytes}; it must be more than 0 and finite.")
    _check_free(options)
    _check_room(options, config)

    def action(progress: Any) -> None:
        fake_checkpoint(
            options.target, config, options.layers, options.experts, options.seed, not options.text_only,
            round(options.shard_gigabytes * 1e9), progress,
        )  # fmt: skip

    return _run(options, action)


def add_fake_checkpoint_options(command: argparse.ArgumentParser, positive: Any) -> None:
    """The options of `moe28t fake-checkpoint`."""
    command.add_argument("--preset", required=True, help="model to imitate, such as moe28t")
    command.add_argument("--out", dest="target", required=True, metavar="DIR", help="folder to write")
    command.add_argument("--layers", type=positive, metavar="N", help="only the first so many; default all")
    command.add_argument("--experts", type=positive, metavar="E", help="only so many per layer; default all")
    command.add_argument("--seed", type=int, default=0, help="of the drawn weights; default 0")
    command.add_argument("--text-only", action="store_true", help="leave out the image tower")
    command.add_argument(
        "--shard-gigabytes", type=float, default=5.0, metavar="GB", help="largest shard; default 5"
    )
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")


def run_checksums(options: argparse.Namespace) -> int:
    """Run `moe28t checksums`."""
    from rich.console import Console
    from rich.progress import Progress

    from moe28t_jax.weights import write_checksums

    options.folder = _folder(options.folder, "FOLDER")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        count = write_checksums(options.folder, progress)
    if options.json:
        print(json_text({"folder": str(options.folder), "tensors": count}))
    else:
        print(f"Wrote the checksums of {count} tensors; loads compare with them.")
    return 0
