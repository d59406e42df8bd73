"""`moe28t plan` and `moe28t licence`: what is decided before anything is rented or loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe28t_jax.cli.common import check_chunk, chunk_of, fail, json_text, overrides

CHIPS_BATCH, CHIPS_CONTEXT = 8, 131_072
"""What `--chips` plans for when nothing else is said; a mesh file brings its own."""


def run_plan(options: argparse.Namespace) -> int:
    """Run `moe28t plan`."""
    from moe28t_jax.config import ModelConfig
    from moe28t_jax.planning import load_prices

    config = ModelConfig.preset(options.preset).override(overrides(options))
    if options.plot is not None:
        from moe28t_jax.planning.plot import check_plot, plot_plan

        check_plot(options.plot)
    plan = _plan(options, config, load_prices(options.prices))
    if options.plot is not None:
        plot_plan(plan, options.plot)
    if options.json:
        print(json_text(plan.to_json() | ({"plot": str(options.plot)} if options.plot is not None else {})))
        return 0
    from moe28t_jax.planning.report import print_plan

    print_plan(plan)
    if options.plot is not None:
        print(f"Wrote {options.plot}.")
    return 0


def _plan(options: argparse.Namespace, config: Any, prices: Any) -> Any:
    from moe28t_jax.parallel.mesh_file import load_mesh_file
    from moe28t_jax.planning import make_plan, search
    from moe28t_jax.planning.plan import CHUNK

    chunk = chunk_of(options)
    common = {
        "phase": options.phase, "chunk": chunk or CHUNK, "model": options.preset, "prices": prices,
    }  # fmt: skip
    if options.mesh is not None:
        mesh = load_mesh_file(options.mesh)
        context = options.context or min(mesh.context, config.max_context)
        check_chunk(chunk, context)
        return make_plan(config, mesh, batch=options.batch, context=context, **common)
    kind, separator, text = options.chips.partition(":")
    if not separator or not text.isdecimal() or int(text) < 1:
        fail(f"--chips {options.chips!r} is not KIND:COUNT, for example --chips h200:16.")
    context = options.context or min(CHIPS_CONTEXT, config.max_context)
    check_chunk(chunk, context)
    return search(
        config, kind, int(text), batch=options.batch or CHIPS_BATCH, context=context, **common,
    )  # fmt: skip


def run_licence(options: argparse.Namespace) -> int:
    """Run `moe28t licence`; exit status 1 where the weights may not be loaded for this use."""
    from moe28t_jax.planning import UsageProfile, accept, check_licence

    if options.internal and options.maas:
        fail(
            "--internal says that nothing reaches third parties, and --maas that they get access to the model; leave "
            "out the one that is not so."
        )
    path, texts = options.path, None
    if "://" in path:
        from moe28t_jax.sources import resolve

        texts = resolve(path).licence_texts()
    elif path == "nano":
        from moe28t_jax.config import shipped_folder

        path = shipped_folder("nano")
    if options.accept is not None:
        accept(path, options.accept, texts)
    profile = UsageProfile(
        internal=options.internal, official=options.official, commercial=not options.non_commercial,
        model_as_a_service=options.maas, revenue_12_months=options.revenue,
        monthly_revenue=options.monthly_revenue, monthly_active_users=options.monthly_users,
    )  # fmt: skip
    result = check_licence(path, profile, texts)
    if options.json:
        print(json_text(result.to_json()))
    else:
        words = {
            "ok": "allowed", "attribution": "allowed, with attribution",
            "agreement": "an agreement with the licensor is needed first", "unknown": "unknown licence",
        }  # fmt: skip
        word = (
            words[result.status]
            if not result.accepted
            else f"{words[result.status]}; you accepted it by its hash"
        )
        print(f"{result.path}: {result.name or 'no known licence'}: {word}")
        for reason in () if result.accepted and result.name is None else result.reasons:
            print(f"  {reason}")
        print(f"  sha256 of the normalised text: {result.sha256}{' (accepted)' if result.accepted else ''}")
        if not result.allowed:
            print(f"  To go on nevertheless: moe28t licence {options.path!r} --accept {result.sha256}")
    return 0 if result.allowed else 1


def add_plan_options(command: argparse.ArgumentParser, positive: Any) -> None:
    """The options of `moe28t plan`."""
    command.add_argument("--preset", default="moe28t", help="model to plan for; default moe28t")
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", metavar="FILE", help="mesh file, by path or by name (such as tpu7x-4x4x2)")
    where.add_argument(
        "--chips", metavar="KIND:COUNT", help="search the best mesh of so many chips (such as h200:16)"
    )
    command.add_argument(
        "--batch",
        type=positive,
        metavar="ROWS",
        help="sequences; default the mesh file's, in prefill one for each copy of the model; with --chips "
        f"{CHIPS_BATCH}",
    )
    command.add_argument(
        "--context", type=positive, metavar="TOKENS",
        help=f"tokens of each; default the mesh file's, else {CHIPS_CONTEXT:,}",
    )  # fmt: skip
    command.add_argument(
        "--phase", choices=("prefill", "decode", "train"), default="decode", help="default decode"
    )
    command.add_argument(
        "--chunk",
        type=positive,
        metavar="TOKENS",
        help="new tokens per step, with --phase prefill alone; default 8192",
    )
    command.add_argument(
        "--prices", type=Path, metavar="FILE", help="price table (TOML) in place of the built-in one"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw memory, step time and cost against the batch"
    )


def _number(text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' if kind is int else ''}number") from None


def _amount(text: str) -> float:
    value = _number(text, float)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not an amount from 0 on")
    return value


def _count(text: str) -> int:
    value = _number(text, int)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def add_licence_options(command: argparse.ArgumentParser) -> None:
    """The options of `moe28t licence`."""
    command.add_argument("path", help="checkpoint folder or address, a licence file, or nano")
    command.add_argument(
        "--accept", metavar="SHA256", help="remember that you accept the text with this hash"
    )
    command.add_argument("--internal", action="store_true", help="nothing of it reaches third parties")
    command.add_argument(
        "--official", action="store_true", help="used through the licensor's products or certified partners"
    )
    command.add_argument("--non-commercial", action="store_true", help="no commercial purpose")
    command.add_argument(
        "--maas", action="store_true", help="third parties get model access (Model as a Service)"
    )
    command.add_argument(
        "--revenue",
        type=_amount,
        default=0.0,
        metavar="USD",
        help="of you and affiliates in any 12 months; default 0",
    )
    command.add_argument(
        "--monthly-revenue",
        type=_amount,
        default=0.0,
        metavar="USD",
        help="of the product that uses it; default 0",
    )
    command.add_argument(
        "--monthly-users",
        type=_count,
        default=0,
        metavar="COUNT",
        help="of the product that uses it; default 0",
    )
