"""A plan as a picture: memory, step time and cost against the batch."""

from __future__ import annotations

from pathlib import Path

from moe28t_jax.planning.plan import Plan, make_plan


def batches(plan: Plan) -> list[int]:
    """Powers of two up to four times the plan's batch, and the batch itself."""
    powers = [1 << exponent for exponent in range((4 * plan.batch).bit_length())]
    return sorted({*(power for power in powers if power <= 4 * plan.batch), plan.batch})


PICTURES = (".pdf", ".png", ".svg")


def check_plot(path: str | Path) -> None:
    """Raise ValueError for a path to which no picture can be written."""
    path = Path(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"The plot {str(path)!r} ends in none of {', '.join(PICTURES)}; name such a file.")
    if not path.parent.is_dir():
        raise ValueError(
            f"The plot {str(path)!r} is in a folder that does not exist; make {str(path.parent)!r} first."
        )


def plot_plan(plan: Plan, path: str | Path) -> None:
    """Draw three panels over the batch on the plan's mesh: bytes of a device against its limit, least time of a step,
    cost of a million tokens where the price is known. Raises ValueError where matplotlib is not installed, or for a
    path that is no picture's."""
    check_plot(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter, NullLocator
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib; install it: `make dev` in a copy of the repository, or the extra `notebook`."
        ) from None
    plans = [
        make_plan(
            plan.config, plan.mesh, plan.phase, batch, plan.context, plan.chunk, plan.model, plan.prices
        )
        for batch in batches(plan)
    ]
    x = [each.batch for each in plans]
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time, cost = figure.subplots(1, 3)
    floor = [0.0] * len(plans)
    for name in ("weights", "state", "activations"):
        top = [low + getattr(each.per_device, name) / 1e9 for low, each in zip(floor, plans, strict=True)]
        memory.fill_between(x, floor, top, label=name, alpha=0.7)
        floor = top
    memory.axhline(plan.per_device.limit / 1e9, color="black", linestyle="--", label="limit")
    memory.set(title="memory of a device", xlabel="batch (sequences)", ylabel="GB", xscale="log")
    memory.legend()
    # Below the others, which it often equals.
    time.plot(x, [each.step.seconds * 1e3 for each in plans], color="0.8", linewidth=6, label="step")
    for name in ("hbm", "flop", "interconnect"):
        time.plot(x, [getattr(each.step.cost, name) * 1e3 for each in plans], label=name, linestyle="--")
    time.set(
        title=f"least time of a {plan.phase} step", xlabel="batch (sequences)", ylabel="milliseconds",
        xscale="log", yscale="log",
    )  # fmt: skip
    time.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
    priced = [(each.batch, each.cost_per_million_tokens) for each in plans if each.cost_per_million_tokens]
    if priced:
        cost.plot([batch for batch, _ in priced], [value for _, value in priced], marker="o")
        cost.set(xscale="log", yscale="log")
    cost.set(
        title="cost while it fits",
        xlabel="batch (sequences)",
        ylabel=f"{plan.prices.currency} per million tokens",
    )
    # Plain numbers in place of powers of ten.
    for panel in (memory, time, cost):
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
        panel.set_xticks(x, minor=False)
        panel.xaxis.set_minor_locator(NullLocator())
    for axis in (time.yaxis, cost.yaxis):
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    figure.suptitle(
        f"{plan.model} on {plan.mesh.name} ({plan.mesh.describe_axes()}), context {plan.context:,}"
    )
    figure.savefig(path, dpi=120)
