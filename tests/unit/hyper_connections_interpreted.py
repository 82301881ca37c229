"""Run the Triton kernels of the hyper-connections on a CPU, in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.unit.hyper_connections_interpreted`` exits with 0 if all is as
defined. The interpreter has to be on before Triton is first imported: hence the process of its own.
It multiplies no bfloat16, so float16 stands in for it where there are matrix products.
"""

import os
import sys

import torch

from kernels.hyper_connections import naive, triton_maps, triton_project, triton_streams
from kernels.hyper_connections.merge import merge_reference
from kernels.hyper_connections.naive import Constants
from tests.unit.kernel_support import draw

CONSTANTS = Constants(norm_eps=1e-5, eps=1e-6, iterations=4)


def close(found: torch.Tensor, expected: torch.Tensor, bound: float, what: object) -> None:
    assert found.shape == expected.shape and not found.isnan().any(), what
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= bound, (what, float(error))


def check_reading(tokens: int, n: int, dim: int, dtype: torch.dtype, held: bool) -> None:
    """Values and every gradient against the definition in float64."""
    m, what = n * (n + 2), (tokens, n, dim, dtype, held)
    streams, dheld = draw(tokens, n, dim).to(dtype), draw(tokens, n, dim, seed=1).to(dtype)
    fn = (draw(m, n * dim, seed=2) * dim**-0.5).to(dtype)
    terms, dx = draw(2, m, seed=3).float(), draw(tokens, dim, seed=4).to(dtype)
    dpost, dmix = draw(tokens, n, seed=5).float(), draw(tokens, n, n, seed=6).float()
    exact = [t.double() for t in (streams, fn, terms)]
    want = naive.map_and_read(*exact, CONSTANTS)
    z, norm = triton_project.project(streams, fn, CONSTANTS.norm_eps)
    pre, post, mix = triton_maps.maps(z, terms, n, CONSTANTS)
    bound = 2e-6 if dtype == torch.float32 else 1e-3
    close(triton_streams.read(streams, pre), want.x, bound, (what, "x"))
    for name, found in {"post": post, "mix": mix, "z": z, "norm": norm}.items():
        close(found, getattr(want, name), 2e-6, (what, name))

    upstream = [t.double() for t in (dx, dpost, dmix)]
    given = dheld if held else None
    wanted = naive.map_and_read_backward(
        *upstream, dheld.double() if held else None, *exact, want.z, want.norm, CONSTANTS
    )
    dpre = triton_streams.read_backward(streams, dx)
    again, dz, pull, dterms = triton_maps.gradients(
        dpre, dpost, dmix, z, norm, terms, n * dim, CONSTANTS
    )
    assert torch.equal(again, pre), what
    dstreams, dfn = triton_project.gradients(streams, dx, given, pre, dz, pull, fn, True)
    for name, found, expected in zip(
        ("dstreams", "dfn", "dterms"), (dstreams, dfn, dterms), wanted, strict=True
    ):
        close(found, expected, 5e-6 if name == "dterms" else bound, (what, name))
    same, none = triton_project.gradients(streams, dx, given, pre, dz, pull, fn, False)
    assert torch.equal(same, dstreams) and none.numel() == 0, what


def check_merging(tokens: int, n: int, dim: int, dtype: torch.dtype) -> None:
    streams, grad = draw(tokens, n, dim).to(dtype), draw(tokens, n, dim, seed=1).to(dtype)
    out = draw(tokens, dim, seed=2).to(dtype)
    post, mix = (draw(*s, seed=3).to(dtype).float() for s in ((tokens, n), (tokens, n, n)))
    exact = [t.double() for t in (streams, out, post, mix)]
    # The interpreter cuts digits off where a GPU rounds to bfloat16.
    bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    merged = triton_streams.merge(streams, out, post, mix)
    close(merged, merge_reference(*exact), bound, (tokens, n, dim, dtype))
    found = triton_streams.merge_backward(grad, streams, out, post, mix)
    wanted = naive.merge_backward(grad.double(), *exact)
    for which, pair in enumerate(zip(found, wanted, strict=True)):
        limit = bound if which < 2 else 2e-6
        close(pair[0], pair[1], limit, (tokens, n, dim, dtype, which))


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    triton_streams._BLOCK = triton_streams._BACK_BLOCK = 32
    triton_project._SPLIT_TOKENS = 64
    check_reading(1, 4, 8, torch.float32, held=True)
    check_reading(37, 4, 72, torch.float32, held=False)
    check_reading(70, 4, 40, torch.float16, held=True)
    check_reading(5, 2, 136, torch.float16, held=True)
    check_merging(1, 4, 8, torch.float32)
    check_merging(3, 4, 72, torch.bfloat16)
    check_merging(2, 2, 40, torch.float16)
    print("as defined")
