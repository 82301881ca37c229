"""The indexer's kernels as compilers see them; none of it needs a GPU."""

import importlib
import re
from typing import Any

import pytest

from tests.unit.kernel_support import first_form

SCORES = {"HEADS": 32, "DIM": 64, "POOLS": 64, "GROUP": 16}
FP8 = {"queries": "*fp8e4nv", "keys": "tensordesc<fp8e4nv[64,64]>"}
LAUNCHES = {
    "triton_topk._select_kernel": ({"STAGE": 1, "SLOTS": 512, "GROUP": 16, "ROOM": 8}, {}, {}),
    "triton_scores._scores_kernel": (
        {**SCORES, "QUERIES": 8, "STAGES": 2, "key_factors": None}, {}, {},
    ),
    "triton_scores._scores_kernel in fp8": ({**SCORES, "QUERIES": 8, "STAGES": 2}, {}, FP8),
    "gluon_topk._whole_kernel": ({"SLOTS": 2048, "ROOM": 512, "WARPS": 4}, {"maxnreg": 64}, {}),
    "gluon_topk._filtered_kernel": (
        {"SLOTS": 2048, "GROUP": 16, "ROOM": 512, "WARPS": 4}, {"maxnreg": 64}, {},
    ),
    "gluon_scores._scores_kernel": (
        {**SCORES, "QUERIES": 4, "BITS": 16, "key_factors": None}, {}, {},
    ),
    "gluon_scores._scores_kernel in fp8": ({**SCORES, "QUERIES": 4, "BITS": 8}, {}, FP8),
    "triton_fp8._round_kernel": (
        {"DIM": 64, "ROWS": 128, "ROTATE": True, "SMALLEST": 1e-30}, {}, {"values": "*fp8e4nv"},
    ),
}  # fmt: skip
"""Constants and options of a launch, and types that are not ``KINDS``; four warps are Triton's
default."""
KINDS = {
    "queries": "*bf16", "weights": "*fp32", "values": "*fp32", "scores": "*fp32", "best": "*fp32",
    "bests": "*fp32", "scale": "fp32", "groups": "*i32", "keys": "tensordesc<bf16[64,64]>",
    "first": "*i32", "end": "*i32", "out": "*i32", "rows": "*bf16", "factors": "*fp32",
    "key_factors": "*fp32",
}  # fmt: skip


def source_of(name: str) -> Any:
    """A kernel with the types and the alignment that it is launched with."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    constants, _, other = LAUNCHES[name]
    module, kernel = name.split()[0].split(".")
    fn = getattr(importlib.import_module(f"kernels.indexer.{module}"), kernel)
    kinds = KINDS | other
    of_gluon = module.startswith("gluon")
    if of_gluon:
        kind = kinds["queries"][1:]
        dtype = gl.bfloat16 if kind == "bf16" else gl.float8e4nv
        for operand, rows in (("queries", 128), ("keys", 64)):
            layout = gl.NVMMASharedLayout.get_default_for([rows, 64], dtype)
            kinds[operand] = f"tensordesc<{kind}[{rows},64],{layout!r}>"
    names = fn.arg_names
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
    found = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    whole = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n == "segment"
    }
    return (GluonASTSource if of_gluon else ASTSource)(fn, signature, found, whole)


@pytest.mark.parametrize(
    "name, addresses",
    [
        ("triton_topk._select_kernel", {"at", "begin"}),
        ("gluon_topk._whole_kernel", {"line", "begin"}),
        ("gluon_topk._filtered_kernel", {"to_best", "line", "begin", "noted"}),
        ("triton_scores._scores_kernel", {"q", "to_score", "to_best"}),
        ("gluon_scores._scores_kernel", {"to_score", "to_best"}),  # the rest goes by coordinates
        ("triton_scores._scores_kernel in fp8", {"q", "to_score", "to_best"}),
        ("gluon_scores._scores_kernel in fp8", {"to_score", "to_best"}),
        ("triton_fp8._round_kernel", {"row", "at"}),
    ],
)
def test_offsets_of_rows_are_64_bit(name, addresses):
    text = first_form(source_of(name))
    products = re.findall(r"%([a-z_]+?)(?:_\d+)? = arith\.muli .*?(?:x|: )(i\d+)[>,\s]", text)
    kinds = {name: kind for name, kind in products if name in addresses}
    assert kinds == dict.fromkeys(addresses, "i64"), products


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name.startswith("gluon")])
def test_kernels_are_compiled_for_hopper_and_choices_read_16_bytes_at_a_time(
    name, tmp_path, monkeypatch
):
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source_of(name), target=target, options=LAUNCHES[name][1])
    assert compiled.asm["cubin"]
    if "topk" in name:
        loads = re.findall(r"ld\.global\.(\S+)", compiled.asm["ptx"])
        assert loads.count("v4.b32") == len(loads) - 2 > 0, loads  # but for a row's first and end
