"""A compile report as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moe28t_jax.planning.compile.report import CompileReport
from moe28t_jax.planning.compile.weights import Movement


def print_report(report: CompileReport) -> None:
    """What the program needs, what it moves, and what it does to weights, on standard output."""
    console = Console()
    console.print(f"[bold]{verdict(report)}[/bold]", highlight=False)
    if report.analysis is None:
        console.print(report.refusal, highlight=False)
        return
    found = report.analysis
    memory = Table("memory of a device", "bytes", "share of the limit")
    for name, value in (
        *sorted(report.held_bytes.items()),
        ("arguments", report.argument_bytes),
        ("peak", report.peak_bytes),
        ("limit", report.limit_bytes),
    ):
        memory.add_row(name, f"{value:,}", f"{value / report.limit_bytes:.1%}")
    console.print(memory)
    moved = Table("moved per step and device", "bytes", "times the minimum")
    for name, value, least in (
        ("main memory", found.memory_bytes, report.minimum_memory_bytes),
        ("all-to-all", found.all_to_all_bytes, report.minimum_all_to_all_bytes),
    ):
        moved.add_row(name, f"{value:,}", f"{value / least:.2f}" if least else "")
    console.print(moved)
    collectives = Table("collective", "in the program", "per step", "bytes sent")
    for kind, count in sorted(found.collectives.items()):
        collectives.add_row(kind, f"{count.count:,}", f"{count.executed:,}", f"{count.bytes:,}")
    console.print(collectives)
    for title, movements in (
        ("weights copied inside a loop", found.weight_copies_in_loop),
        ("weights copied outside of loops", found.weight_copies),
        ("experts gathered", found.expert_gathers),
        ("experts unpacked in memory", found.unpacked_experts),
    ):
        console.print(f"{title}: {_summary(movements)}", highlight=False)
    largest = Table("largest movers of main memory", "bytes", "times", "shape", "where")
    for share in found.largest[:8]:
        where = "/".join(share.op_name.split("/")[-3:])
        largest.add_row(
            f"{share.opcode} {share.name}", f"{share.bytes:,}", str(share.times), share.shape, where
        )
    console.print(largest)


def verdict(report: CompileReport) -> str:
    """One sentence: what was compiled, in which time, and whether it fits."""
    tokens = f", {min(report.chunk, report.context):,} tokens each" if report.phase == "prefill" else ""
    where = (
        f"{report.model} ({report.layers} layers), {report.phase}, {report.batch:,} rows of {report.context:,} "
        f"tokens{tokens}, on {report.mesh.name}"
    )
    room = (report.limit_bytes - report.peak_bytes) / 1e9
    if report.fits:
        return f"{where}: compiled in {report.compile_seconds:.0f} s; {room:.1f} GB of a device stay free."
    return f"{where}: does not fit, a device lacks {-room:.1f} GB."


def _summary(movements: Sequence[Movement]) -> str:
    if not movements:
        return "none"
    names = ", ".join(dict.fromkeys(movement.weight.name for movement in movements[:3]))
    more = ", ..." if len(movements) > 3 else ""
    return f"{len(movements)} ({sum(movement.bytes for movement in movements):,} bytes: {names}{more})"
