"""What is read out of compiled programs, on texts whose numbers are counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe28t_jax.planning.compile import Assumptions, Collective, Weight, analyze, movements, parse, traffic
from moe28t_jax.planning.compile.traffic import by_operation

KIB = 1024


def program(entry: str, computations: str = "", partitions: int = 8) -> str:
    header = f"HloModule jit_f, is_scheduled=true, num_partitions={partitions}"
    return f"{header}\n\n{computations}\nENTRY %main {{\n{entry}\n}}\n"


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def test_instructions_and_shapes() -> None:
    module = parse(
        program(
            "  %p = (f32[2,3]{1,0:T(8,128)}, /*index=1*/u8[4]{0:T(128)S(1)}) parameter(0), "
            "metadata={op_name=\"x[\\'y\\']\"}\n"
            "  %e = u8[4]{0:T(128)S(1)} get-tuple-element(%p), index=1\n"
            '  ROOT %c = f4e2m1fn[7]{0} custom-call(%e), custom_call_target="a) \\"b(", backend_config={"x":"(("}'
        )
    )
    pair, element, call = module.main
    assert [str(shape) for shape in pair.shapes] == ["f32[2,3]", "u8[4]"] and pair.is_tuple
    assert pair.op_name == "x['y']" and pair.bytes == 28 and pair.memory_bytes == 24
    assert element.number == 1 and element.operands == ("p",)
    assert call.opcode == "custom-call" and call.operands == ("e",) and call.is_root
    # Seven codes of half a byte.
    assert call.bytes == 4 and module.partitions == 8


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_f {\n}")


def test_elementwise_bytes() -> None:
    moved = traffic(
        parse(
            program(
                "  %x = f32[256]{0} parameter(0)\n"
                "  %near = f32[256]{0:T(256)S(1)} negate(%x)\n"
                "  ROOT %y = f32[256]{0} multiply(%x, %near)"
            )
        )
    )
    # x is read twice and y written; what lies in the scratchpad costs nothing.
    assert moved.memory_bytes == 3 * KIB
    assert [share.bytes for share in moved.largest(9)] == [2 * KIB, KIB]


LOOP = """
%body (carry: (s32[], f32[256])) -> (s32[], f32[256]) {
  %carry = (s32[], f32[256]{0}) parameter(0)
  %i = s32[]{:T(128)S(2)} get-tuple-element(%carry), index=0
  %x = f32[256]{0} get-tuple-element(%carry), index=1
  %one = s32[]{:T(128)S(2)} constant(1)
  %next = s32[]{:T(128)S(2)} add(%i, %one)
  %summed = f32[256]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %done = (s32[], f32[256]{0}) tuple(%next, %summed)
}
%condition (state: (s32[], f32[256])) -> pred[] {
  %state = (s32[], f32[256]{0}) parameter(0)
  %count = s32[]{:T(128)S(2)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)S(2)} constant(5)
  ROOT %again = pred[]{:T(128)S(2)} compare(%count, %limit), direction=LT
}
"""


def loop_entry(attributes: str = "") -> str:
    return (
        "  %zero = s32[] constant(0)\n  %x = f32[256]{0} parameter(0)\n"
        "  %start = (s32[], f32[256]{0}) tuple(%zero, %x)\n"
        f"  ROOT %loop = (s32[], f32[256]{{0}}) while(%start), condition=%condition, body=%body{attributes}"
    )


def test_loops_count_as_often_as_they_run() -> None:
    moved = traffic(parse(program(loop_entry(), ADD + LOOP)))
    # A ring of four sends 2 x 3/4 of the 1 KiB, five times.
    assert moved.collectives == {"all-reduce": Collective(1, 5, 5 * 1536)}
    assert moved.memory_bytes == 5 * 2 * KIB and moved.unknown_loops == []


def test_the_compilers_own_trip_count_comes_first() -> None:
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    assert traffic(parse(program(loop_entry(known), ADD + LOOP))).collectives["all-reduce"].executed == 7


def test_a_loop_whose_end_is_computed_is_named() -> None:
    unknown = LOOP.replace(
        "%limit = s32[]{:T(128)S(2)} constant(5)", "%limit = s32[]{:T(128)S(2)} negate(%count)"
    )
    moved = traffic(parse(program(loop_entry(), ADD + unknown)))
    assert moved.unknown_loops == ["loop"] and moved.collectives["all-reduce"].executed == 1


COLLECTIVES = [
    ("f32[1024]{0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", "all-gather", 3 * KIB),
    ("f32[64]{0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", "reduce-scatter", 768),
    ("f32[256]{0} all-to-all(%x), replica_groups=[1,8]<=[8], dimensions={0}", "all-to-all", 896),
    ("f32[256]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", KIB),
    ("f32[256]{0} ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1}}", "ragged-all-to-all", 512),
    ("f32[64]{0} ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1}}", "ragged-all-to-all", 128),
    ("((f32[256]{0}, f32[256]{0}), f32[256]{0}, u32[]{:S(2)}) ragged-all-to-all-start(%x, %x, %n, %n, %n, %n), "
     "replica_groups={{0,1}}", "ragged-all-to-all", 512),
    ("f32[2048]{0} all-gather(%x), replica_groups=mesh['a'=2,'b'=8,'c'=4] {'b'}", "all-gather", 7 * KIB),
    ("f32[256]{0} all-to-all(%x), replica_groups=mesh['a'=2,'b'=2] {'a','b':(1)2}", "all-to-all", 768),
    ("(f32[256]{0}, f32[1024]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]", "all-gather", 3 * KIB),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "sent"), COLLECTIVES)
def test_bytes_that_a_device_sends(line: str, kind: str, sent: int) -> None:
    entry = f"  %x = f32[256]{{0}} parameter(0)\n  %n = s32[8]{{0}} parameter(1)\n  ROOT %y = {line}"
    moved = traffic(parse(program(entry, ADD)))
    assert moved.collectives == {kind: Collective(1, 1, sent)}
    assert moved.all_to_all_bytes == (sent if "all-to-all" in kind else 0)


def test_experts_that_may_be_repeated_are_counted_apart() -> None:
    entry = (
        "  %x = u8[256]{0} parameter(0)\n  %n = s32[8]{0} parameter(1)\n"
        "  ROOT %y = u8[128]{0} ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1}}, "
        'metadata={op_name="jit(f)/experts/fetch_experts/ragged_all_to_all"}'
    )
    moved = traffic(parse(program(entry)))
    assert moved.repeated_expert_bytes == 64 and moved.all_to_all_bytes == 0 and moved.memory_bytes == 0
    assert moved.collectives["ragged-all-to-all"].executed == 1


@pytest.mark.parametrize(("scope", "sent"), [("moe_dispatch", 256), ("moe_combine", 512)])
def test_room_for_tokens_that_there_are_not_is_not_sent(scope: str, sent: int) -> None:
    """Two devices with room for a token each, of which one exists. On the way out the copies are what is sent, on the
    way back what is received."""
    entry = (
        "  %x = f32[256]{0} parameter(0)\n  %y = f32[512]{0} parameter(1)\n  %n = s32[8]{0} parameter(2)\n"
        "  ROOT %z = f32[512]{0} ragged-all-to-all(%x, %y, %n, %n, %n, %n), replica_groups={{0,1}}, "
        f'metadata={{op_name="jit(f)/experts/{scope}/ragged_all_to_all"}}'
    )
    assert traffic(parse(program(entry)), Assumptions(copies_share=0.5)).all_to_all_bytes == sent
    assert traffic(parse(program(entry))).all_to_all_bytes == 512


@pytest.mark.parametrize("scope", ["moe_dispatch", "moe_combine"])
def test_so_many_copies_are_sent_as_are_assumed(scope: str) -> None:
    entry = (
        "  %x = f32[8,2,16]{2,1,0} parameter(0)\n  %y = f32[64,2,16]{2,1,0} parameter(1)\n"
        "  %n = s32[8]{0} parameter(2)\n"
        "  ROOT %z = f32[64,2,16]{2,1,0} ragged-all-to-all(%x, %y, %n, %n, %n, %n), replica_groups={{0,1}}, "
        f'metadata={{op_name="jit(f)/experts/{scope}/ragged_all_to_all"}}'
    )
    # Rows of 128 bytes, of which 2.5 are read, sent, and written where they go.
    moved = traffic(parse(program(entry)), Assumptions(copies=2.5))
    assert moved.all_to_all_bytes == 320 and moved.memory_bytes == 640
    # There is room for eight.
    assert traffic(parse(program(entry)), Assumptions(copies=99.0)).all_to_all_bytes == 1024


def test_experts_without_tokens_are_not_read() -> None:
    def moved(name: str, share: float) -> int:
        entry = (
            "  %rows = bf16[8,64]{1,0} parameter(0)\n  %codes = u8[3,7,32,16]{3,2,1,0} parameter(1)\n"
            "  %scales = u8[3,7,2,16]{3,2,1,0} parameter(2)\n"
            '  ROOT %y = bf16[8,16]{1,0} custom-call(%rows, %codes, %scales), custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="jit(f)/{name}/pallas_call"}}, '
            'backend_config={"cost_estimate":{"bytes_accessed":"5000"}}'
        )
        return traffic(parse(program(entry)), Assumptions(experts_share=share)).memory_bytes

    # Seven experts of one layer are 7 x (32 + 2) x 16 bytes.
    assert moved("mxfp4_grouped_glu", 0.25) == 5000 - 3 * 7 * 34 * 16 // 4
    assert moved("mxfp4_grouped_glu", 1.0) == moved("another_kernel", 0.25) == 5000


def gpu_call(target: str, name: str, result: str, *operands: str) -> int:
    lines = [f"  %x{number} = {shape} parameter({number})" for number, shape in enumerate(operands)]
    names = ", ".join(f"%x{number}" for number in range(len(operands)))
    lines.append(
        f'  ROOT %y = {result} custom-call({names}), custom_call_target="{target}", '
        f'metadata={{op_name="jit(f)/{name}/mpmd_map"}}'
    )
    return traffic(parse(program("\n".join(lines))), Assumptions(experts_share=0.5)).memory_bytes


def test_kernels_of_gpus_carry_no_estimate() -> None:
    # The second result is a workspace.
    product = "(f32[4,8]{1,0}, s8[4096]{0})"
    assert (
        gpu_call("__cublas$lt$matmul", "dot_general", product, "bf16[4,16]{1,0}", "bf16[16,8]{1,0}")
        == 128 + 384
    )
    # Rows, half of five experts of one of three layers, and the result.
    experts = ("u8[3,5,8,16]{3,2,1,0}", "u8[3,5,8,1]{3,2,1,0}")
    grouped = gpu_call("mosaic_gpu_v2", "mxfp4_grouped_matmul", "bf16[4,8]{1,0}", "bf16[4,32]{1,0}", *experts)
    assert grouped == 256 + 5 * 8 * 17 // 2 + 64
    # Twelve rows of 64 bytes of a cache of a hundred, beside queries, their numbers and the result.
    attention = ("bf16[6,32]{1,0}", "bf16[100,32]{1,0}", "s32[3,4]{1,0}")
    fetched = gpu_call("mosaic_gpu_v2", "sparse_attention_tensor", "bf16[6,16]{1,0}", *attention)
    assert fetched == 384 + 12 * 64 + 48 + 192
    # No more than there is.
    few = gpu_call(
        "mosaic_gpu_v2",
        "sparse_attention_rows",
        "bf16[6,16]{1,0}",
        *attention[:1],
        "bf16[5,32]{1,0}",
        attention[2],
    )
    assert few == 384 + 5 * 64 + 48 + 192
    # Of another kernel all operands and results.
    other = gpu_call("mosaic_gpu_v2", "index_scores", "f32[4]{0}", "bf16[4,8]{1,0}")
    assert other == gpu_call("another", "index_scores", "f32[4]{0}", "bf16[4,8]{1,0}") == 64 + 16


def test_experts_that_may_be_repeated_are_typically_not() -> None:
    branches = """
%without (x: u8[256]) -> u8[256] {
  ROOT %x = u8[256]{0} parameter(0)
}
%with (x: u8[256]) -> u8[256] {
  %x = u8[256]{0} parameter(0)
  %n = s32[8]{0} constant({...})
  %a = u8[256]{0} ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1}}, \
metadata={op_name="jit(f)/experts/moe_repeated_experts/cond/branch_1_fun/broadcast_in_dim"}
  ROOT %b = u8[256]{0} negate(%a)
}
"""

    def moved(scope: str) -> Any:
        entry = (
            "  %x = u8[256]{0} parameter(0)\n  %which = s32[] parameter(1)\n"
            "  ROOT %y = u8[256]{0} conditional(%which, %x, %x), branch_computations={%without, %with}, "
            f'metadata={{op_name="jit(f)/experts/{scope}/cond"}}'
        )
        return traffic(parse(program(entry, branches)))

    typical, other = moved("moe_repeated_experts"), moved("another")
    assert typical.memory_bytes == 0 and not typical.collectives
    assert other.memory_bytes == 768 and other.collectives["ragged-all-to-all"].executed == 1
    # What may be sent is told all the same, whatever the compiler calls it.
    assert typical.repeated_expert_bytes == 128 and other.all_to_all_bytes == 128


def test_candidates_of_index_selection_are_no_experts() -> None:
    entry = (
        "  %x = f32[256]{0} parameter(0)\n"
        "  ROOT %y = f32[256]{0} all-to-all(%x), replica_groups=[1,8]<=[8], dimensions={0}, "
        'metadata={op_name="jit(f)/jit(select)/index_select_tpu/merge_shards/all_to_all"}'
    )
    moved = traffic(parse(program(entry)))
    assert moved.selection_bytes == 896 and moved.all_to_all_bytes == 0
    assert moved.collectives["all-to-all"].bytes == 896


FUSED = """
%pick (stack: f32[8,256], i: s32[]) -> f32[256] {
  %stack = f32[8,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,256]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,256}
  %row = f32[256]{0} bitcast(%slice)
  ROOT %negative = f32[256]{0} negate(%row)
}
%store (stack: f32[8,256], row: f32[1,256], i: s32[]) -> f32[8,256] {
  %stack = f32[8,256]{1,0} parameter(0)
  %row = f32[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %stored = f32[8,256]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
}
"""


def test_slices_and_updates_in_place_count_what_they_touch() -> None:
    entry = (
        "  %stack = f32[8,256]{1,0} parameter(0)\n  %i = s32[]{:S(2)} parameter(1)\n"
        "  %row = f32[256]{0} fusion(%stack, %i), kind=kLoop, calls=%pick\n"
        "  %flat = f32[1,256]{1,0} bitcast(%row)\n"
        "  ROOT %new = f32[8,256]{1,0} fusion(%stack, %flat, %i), kind=kLoop, calls=%store"
    )
    shares = {share.name: share.bytes for share in traffic(parse(program(entry, FUSED))).shares}
    assert shares == {"row": 2 * KIB, "new": 2 * KIB}


BITCAST = "ROOT %row = f32[256]{0} bitcast(%slice)"


def test_a_fusion_that_is_begun_and_awaited_counts_as_one() -> None:
    entry = (
        "  %stack = f32[8,256]{1,0} parameter(0)\n  %i = s32[]{:S(2)} parameter(1)\n"
        "  %begun = ((f32[8,256]{1,0}, s32[]), f32[256]{0}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%pick\n"
        "  ROOT %row = f32[256]{0} fusion-done(%begun)"
    )
    moved = FUSED.replace(
        "%row = f32[256]{0} bitcast(%slice)\n  ROOT %negative = f32[256]{0} negate(%row)", BITCAST
    )
    module = parse(program(entry, moved))
    assert moved != FUSED
    assert {share.name: share.bytes for share in traffic(module).shares} == {"begun": 2 * KIB}
    [copied] = movements(module, {0: Weight("stack")}, 1)
    assert (copied.kind, copied.bytes, copied.instruction) == ("copy", KIB, "begun")


TURNED = FUSED.replace("dynamic-slice(%stack,", "dynamic-slice(%turned,").replace(
    "  %i = s32[] parameter(1)\n  %zero",
    "  %turned = f32[8,256]{1,0:T(8,128)} fusion(%stack), kind=kLoop, calls=%turn\n  %i = s32[] parameter(1)\n  %zero",
    1,
)
TURN = """
%turn (x: f32[8,256]) -> f32[8,256] {
  %x = f32[8,256]{1,0} parameter(0)
  ROOT %y = f32[8,256]{1,0:T(8,128)} copy(%x)
}
"""


def test_a_slice_of_an_array_in_another_form_counts_what_it_touches() -> None:
    entry = (
        "  %stack = f32[8,256]{1,0} parameter(0)\n  %i = s32[]{:S(2)} parameter(1)\n"
        "  ROOT %row = f32[256]{0} fusion(%stack, %i), kind=kLoop, calls=%pick"
    )
    assert "%turned," in TURNED
    assert traffic(parse(program(entry, TURN + TURNED))).memory_bytes == 2 * KIB


def test_a_kernel_counts_its_own_estimate() -> None:
    entry = (
        "  %stack = f32[8,256]{1,0} parameter(0)\n"
        '  ROOT %y = f32[256]{0} custom-call(%stack), custom_call_target="tpu_custom_call", backend_config='
        '{"custom_call_config":{"cost_estimate":{"flops":"10","transcendentals":"0","bytes_accessed":"2048"}}}, '
        'metadata={op_name="jit(f)/moe_experts/pallas_call"}'
    )
    moved = traffic(parse(program(entry)))
    assert moved.memory_bytes == 2 * KIB and by_operation(moved.shares) == {"pallas_call": 2 * KIB}


BRANCHES = """
%cheap (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  ROOT %y = f32[256]{0} negate(%x)
}
%dear (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %y = f32[256]{0} negate(%x)
  ROOT %z = f32[256]{0} negate(%y)
}
"""


@pytest.mark.parametrize(
    "form", ["branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"]
)
def test_of_a_conditional_the_dearest_branch_counts(form: str) -> None:
    entry = (
        "  %which = pred[]{:S(2)} parameter(0)\n  %x = f32[256]{0} parameter(1)\n"
        f"  ROOT %y = f32[256]{{0}} conditional(%which, %x, %x), {form}"
    )
    assert traffic(parse(program(entry, BRANCHES))).memory_bytes == 4 * KIB


OFFLOADED = """
%elsewhere (stack: f32[8,256]) -> f32[8,256] {
  %stack = f32[8,256]{1,0} parameter(0)
  ROOT %turned = f32[8,256]{0,1} copy(%stack)
}, execution_thread="sparsecore"
"""
OFFLOADED_ENTRY = (
    '  %w = f32[8,256]{1,0} parameter(0), metadata={op_name="leaves[0]"}\n'
    '  %start = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%elsewhere\n'
    "  %update = ((f32[8,256]{1,0}), f32[8,256]{0,1}) call-update(%start, %w)\n"
    "  ROOT %done = f32[8,256]{0,1} call-done(%update)"
)


def test_what_another_core_does_counts() -> None:
    text = program(OFFLOADED_ENTRY, OFFLOADED)
    assert traffic(parse(text)).memory_bytes == 16 * KIB
    [found] = movements(parse(text), {0: Weight("w")}, 0)
    assert (found.kind, found.bytes, found.instruction, found.in_loop) == ("copy", 8 * KIB, "turned", False)


def weight_loop(operation: str, computations: str = "") -> str:
    """Three layers, each `operation` on the weights %w, which the loop carries along."""
    state = "(s32[], f32[256]{0}, f32[3,4,256]{2,1,0}, u8[3,4,256]{2,1,0})"
    return program(
        "  %zero = s32[] constant(0)\n  %x = f32[256]{0} parameter(0)\n"
        '  %dense = f32[3,4,256]{2,1,0} parameter(1), metadata={op_name="leaves[0]"}\n'
        '  %codes = u8[3,4,256]{2,1,0} parameter(2), metadata={op_name="leaves[1]"}\n'
        f"  %start = {state} tuple(%zero, %x, %dense, %codes)\n"
        f"  ROOT %loop = {state} while(%start), condition=%condition, body=%body",
        f"""{computations}
%body (carry: {state}) -> {state} {{
  %carry = {state} parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[256]{{0}} get-tuple-element(%carry), index=1
  %w = f32[3,4,256]{{2,1,0}} get-tuple-element(%carry), index=2
  %packed = u8[3,4,256]{{2,1,0}} get-tuple-element(%carry), index=3
  %zero = s32[] constant(0)
  %y = {operation}
  ROOT %done = {state} tuple(%i, %x, %w, %packed)
}}
%condition (state: {state}) -> pred[] {{
  %state = {state} parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(3)
  ROOT %again = pred[] compare(%count, %limit), direction=LT
}}
""",
    )


WEIGHTS = {
    "leaves[0]": Weight("mlp.up"),
    "leaves[1]": Weight("mlp.experts.up.packed", expert=True, packed=True),
}
UNPACK = """
%unpack (codes: u8[3,4,256], i: s32[]) -> bf16[8,256] {
  %codes = u8[3,4,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = u8[1,4,256]{2,1,0} dynamic-slice(%codes, %i, %zero, %zero), dynamic_slice_sizes={1,4,256}
  %numbers = u8[4,256]{1,0} bitcast(%one)
  %low = u8[4,256]{1,0} and(%numbers, %numbers)
  %both = u8[8,256]{1,0} concatenate(%low, %numbers), dimensions={0}
  ROOT %floats = bf16[8,256]{1,0} convert(%both)
}
"""
HARMLESS = [
    "f32[4,256]{1,0:T(8,128)S(1)} copy(%w)",
    "f32[3,4,256]{2,1,0} bitcast(%w)",
    'f32[256]{0} custom-call(%x, %w, %packed), custom_call_target="tpu_custom_call"',
    "f32[256]{0} copy(%x)",
]
SLICE = "f32[1,4,256]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,4,256}"


@pytest.mark.parametrize("operation", HARMLESS)
def test_reading_a_weight_is_no_movement(operation: str) -> None:
    found = analyze(weight_loop(operation), WEIGHTS, minimum_bytes=0)
    assert not found.weight_copies_in_loop and not found.weight_copies
    assert not found.expert_gathers and not found.unpacked_experts


@pytest.mark.parametrize(
    ("operation", "moved"),
    [
        (SLICE, 3 * 4 * KIB),
        ("f32[3,4,256]{1,2,0} copy(%w)", 3 * 12 * KIB),
        ("f32[3,256,4]{2,1,0} transpose(%w), dimensions={0,2,1}", 3 * 12 * KIB),
        ("(f32[3,4,256]{2,1,0}, f32[3,4,256]{2,1,0}, u32[]{:S(2)}) copy-start(%w)", 3 * 12 * KIB),
        ("bf16[3,4,256]{2,1,0} convert(%w)", 3 * 6 * KIB),
    ],
)
def test_a_weight_copied_in_the_layer_loop(operation: str, moved: int) -> None:
    found = analyze(weight_loop(operation), WEIGHTS, minimum_bytes=0)
    [copy] = found.weight_copies_in_loop
    assert copy.weight.name == "mlp.up" and copy.bytes == moved and copy.times == 3
    assert found.weight_copies == ()


def test_experts_gathered_and_unpacked() -> None:
    gather = "u8[3,32,256]{2,1,0} all-gather(%packed), replica_groups=[1,8]<=[8], dimensions={1}"
    [found] = analyze(weight_loop(gather), WEIGHTS, minimum_bytes=0).expert_gathers
    assert found.bytes == 3 * 24 * KIB and found.in_loop
    dense = "f32[3,32,256]{2,1,0} all-gather(%w), replica_groups=[1,8]<=[8], dimensions={1}"
    assert analyze(weight_loop(dense), WEIGHTS, minimum_bytes=0).expert_gathers == ()
    unpack = "bf16[8,256]{1,0} fusion(%packed, %i), kind=kLoop, calls=%unpack"
    result = analyze(weight_loop(unpack, UNPACK), WEIGHTS, minimum_bytes=0)
    [found] = result.unpacked_experts
    assert found.bytes == 3 * 4 * KIB and found.weight.name == "mlp.experts.up.packed"
    # The same numbers in the scratchpad are what a kernel makes of them too.
    near = unpack.replace("{1,0}", "{1,0:T(8,128)S(1)}", 1)
    assert analyze(weight_loop(near, UNPACK), WEIGHTS, minimum_bytes=0).unpacked_experts == ()


def test_small_movements_do_not_count() -> None:
    assert analyze(weight_loop(SLICE), WEIGHTS).weight_copies_in_loop == ()


def test_a_program_of_this_computers_compiler() -> None:
    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    like = jax.ShapeDtypeStruct
    compiled = jax.jit(layers).lower(like((8, 256), jnp.float32), like((5, 256, 256), jnp.float32)).compile()
    found = analyze(compiled.as_text() or "", {"weights": Weight("w")}, minimum_bytes=0)
    assert found.unknown_loops == () and found.collectives == {}
    # Five matrices of 256 KiB are read, and where the compiler slices them first they are written and read again.
    assert 5 * 256 * KIB <= found.memory_bytes <= 4 * 5 * 256 * KIB
