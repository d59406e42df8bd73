"""A plan as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from moe28t_jax.planning.plan import Plan, gigabytes
from moe28t_jax.planning.roofline import BOUNDS

_BOUND_WORDS = {"hbm": "HBM bandwidth", "flop": "arithmetic", "interconnect": "interconnect"}


def print_plan(plan: Plan) -> None:
    """Verdict, memory, time, cost and the arithmetic on standard output."""
    console = Console()
    mesh = plan.mesh
    console.print(f"[bold]{plan.verdict}[/bold]", highlight=False)
    spare = f", {mesh.spare_devices} more stand by" if mesh.spare_devices else ""
    console.print(
        f"{mesh.name}: {mesh.chips} chips ({mesh.topology}), {mesh.devices} devices{spare}; {mesh.describe_axes()}; "
        f"{plan.phase}, batch {plan.batch:,}, context {plan.context:,}",
        highlight=False,
    )
    device = plan.per_device
    memory = _table("memory of a device", "bytes", "share of the limit")
    for name in ("weights", "state", "activations", "total", "limit"):
        value = getattr(device, name)
        memory.add_row(name, f"{value:,}", f"{value / device.limit:.1%}")
    console.print(memory)
    time = _table("least time of a step", "milliseconds")
    for name in BOUNDS:
        label = _BOUND_WORDS[name] + (" (the bound)" if name == plan.bound else "")
        time.add_row(label, f"{getattr(plan.step.cost, name) * 1e3:,.3f}")
    # A step whose parts follow one another and are not all bound by the same takes longer than any one resource.
    longest = getattr(plan.step.cost, plan.bound)
    parts = " (its parts, each at its bound)" if plan.step.seconds > longest * 1.0001 else ""
    time.add_row(f"step{parts}", f"{plan.step.seconds * 1e3:,.3f}")
    console.print(time)
    if plan.fits:
        console.print(f"at best {plan.tokens_per_second:,.0f} tokens/s on the whole mesh", highlight=False)
    if plan.cost_per_million_tokens is not None:
        console.print(
            f"at best {plan.cost_per_million_tokens:,.2f} {plan.prices.currency} per million tokens, at "
            f"{plan.price_per_hour:,.2f} per hour ({plan.prices.note or 'your price table'})",
            highlight=False,
        )
    for line in plan.arithmetic():
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print(
        "Times are lower bounds (full rates, perfect overlap, uniform routing, no latency); activations are an "
        f"estimate of what the compiler will need; {gigabytes(device.limit)} is what it lets a program use.",
        highlight=False,
    )


def _table(*heads: str) -> Table:
    # In a narrow terminal digits go on in the next line: a number that is cut is another one.
    return Table(*(Column(head, overflow="fold") for head in heads))
