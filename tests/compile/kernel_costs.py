"""What a traced program multiplies and moves, counted in its Pallas kernels instead of estimated by them.

Operations are those of matrix products. Bytes are those of copies that a kernel starts itself and of the blocks that
its grid fetches and writes: a block is fetched again when an index of the grid that its place depends on has changed.
A loop whose trips are data counts as often as told, of two branches the more costly one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Costs(NamedTuple):
    """Operations of matrix products, and bytes between HBM and vector memory."""

    operations: float = 0
    bytes: float = 0

    def plus(self, other: "Costs") -> "Costs":
        return Costs(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, count: float) -> "Costs":
        return Costs(self.operations * count, self.bytes * count)


def count_kernels(function: Callable[..., Any], *arguments: Any, trips: int) -> dict[str, Costs]:
    """Costs by kernel name; `trips` of every loop that ends by data."""
    found: dict[str, Costs] = {}
    _visit(jax.make_jaxpr(function)(*arguments).jaxpr, 1, trips, found)
    return found


def _visit(jaxpr: Any, count: int, trips: int, found: dict[str, Costs]) -> None:
    """Kernels anywhere in a program, `count` times each."""
    for equation in jaxpr.eqns:
        parameters = equation.params
        if equation.primitive.name == "pallas_call":
            name = parameters["name"]
            found[name] = found.get(name, Costs()).plus(_kernel(parameters, trips).times(count))
            continue
        repeated = parameters["length"] if equation.primitive.name == "scan" else 1
        for value in parameters.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _visit(inner, count * repeated, trips, found)


def _kernel(parameters: Any, trips: int) -> Costs:
    mapping = parameters["grid_mapping"]
    grid = tuple(int(size) for size in mapping.grid)
    fetched = 0
    for block in mapping.block_mappings:
        if str(block.transformed_block_aval).startswith("Ref<any>"):
            continue
        depends = _dependencies(block.index_map_jaxpr.jaxpr, len(grid))
        times = math.prod(grid[: 1 + max(depends, default=-1)])
        size = math.prod(part.block_size for part in block.block_shape)
        fetched += times * size * block.array_aval.dtype.itemsize
    return _body(parameters["jaxpr"], trips).times(math.prod(grid)).plus(Costs(0, fetched))


def _dependencies(jaxpr: Any, axes: int) -> set[int]:
    """Axes of the grid that the place of a block depends on."""
    depends: dict[Any, set[int]] = {variable: {axis} for axis, variable in enumerate(jaxpr.invars[:axes])}
    for equation in jaxpr.eqns:
        variables = (variable for variable in equation.invars if not hasattr(variable, "val"))
        union = set[int]().union(*(depends.get(variable, set()) for variable in variables))
        depends |= dict.fromkeys(equation.outvars, union)
    return set[int]().union(*(depends.get(v, set()) for v in jaxpr.outvars if not hasattr(v, "val")))


def _body(jaxpr: Any, trips: int) -> Costs:
    total = Costs()
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (left, _), _ = parameters["dimension_numbers"]
            contracted = math.prod(equation.invars[0].aval.shape[axis] for axis in left)
            total = total.plus(Costs(2 * contracted * math.prod(equation.outvars[0].aval.shape), 0))
        elif name == "dma_start":
            source = parameters["tree"].unflatten([variable.aval for variable in equation.invars])[0]
            total = total.plus(Costs(0, math.prod(source.shape) * source.dtype.itemsize))
        elif name == "cond":
            branches = [_body(branch.jaxpr, trips) for branch in parameters["branches"]]
            most = Costs(max(b.operations for b in branches), max(b.bytes for b in branches))
            total = total.plus(most)
        elif name == "while":
            total = total.plus(_body(parameters["body_jaxpr"].jaxpr, trips).times(trips))
        elif name == "scan":
            total = total.plus(_body(parameters["jaxpr"].jaxpr, trips).times(parameters["length"]))
        elif "jaxpr" in parameters:
            inner = parameters["jaxpr"]
            total = total.plus(_body(getattr(inner, "jaxpr", inner), trips))
    return total
