"""``make tune``: measure fla's kernels for GLM-5.3-Flash on this GPU and write the file for it.

Runs KDA and its convolution forward and backward at the published widths: whole documents, and the
pieces that chunks of tokens make, which take and hand on states. Takes a few minutes.

``python -m kernels.tuned --context 2`` adds what context parallelism over 2 ranks runs besides: a
share of the heads, and the summary of a part that ranks pass states by.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.tuned.fla import (
    Entry,
    Kernel,
    Tuned,
    find,
    installed,
    path_of,
    served_keys,
    write,
)

HEADS, WIDTH, TAPS, BOUND = 64, 128, 4, -5.0
TOKENS = 32_768
FREE = {"l2norm_fwd_kernel": 1, "l2norm_bwd_kernel": 1}
"""Places in keys that count blocks of 65,536 rows."""


def tunable() -> Iterator[tuple[str, str, Any]]:
    """Module, name and autotuner of every kernel of fla that has been imported."""
    seen: set[int] = set()
    for module, held in sorted(sys.modules.items()):
        if not module.startswith("fla."):
            continue
        for name, value in sorted(vars(held).items()):
            found: Any = value
            while hasattr(found, "fn") and not hasattr(found, "cache"):
                found = found.fn
            tuned = hasattr(found, "cache") and hasattr(found, "configs")
            # Where it is defined, and not where it is imported from there.
            if tuned and found.base_fn.__module__ == module and id(found) not in seen:
                seen.add(id(found))
                yield module, name, found


def collect() -> dict[str, Kernel]:
    """What the autotuners of this process have found."""
    kernels = {}
    for module, name, found in tunable():
        entries = [
            Entry(list(key), dict(config.kwargs), config.num_warps, config.num_stages)
            for key, config in found.cache.items()
        ]
        if entries:
            kernels[name] = Kernel(module, entries, FREE.get(name))
    return kernels


def added(held: dict[str, Kernel], found: dict[str, Kernel]) -> dict[str, Kernel]:
    """Kernels of a file, and what has been found for keys that it serves no entry for."""
    kernels = dict(held)
    for name, kernel in found.items():
        known = held.get(name, Kernel(kernel.module, [], kernel.free))
        served = {tuple(key) for _, key in served_keys(known)}
        new = [entry for entry in kernel.entries if tuple(entry.key) not in served]
        kernels[name] = replace(known, entries=[*known.entries, *new])
    return kernels


def exercise(device: torch.device, heads: int = HEADS, pieces: bool = True) -> None:
    """Call the kernels in every form that training does; without ``pieces``, for whole documents
    alone."""
    from kernels.kda import fla
    from kernels.short_conv.fla import short_conv

    wide = heads * WIDTH
    for lengths in ((TOKENS,), (TOKENS // 2, TOKENS // 2)):
        for entering, carries in ((False, False), (True, False), (False, True), (True, True)):
            if not pieces and (entering or carries):
                continue
            q, k, v, gate = _rows(device, heads, 4)
            beta = torch.rand(TOKENS, heads, device=device).bfloat16()
            a_log, bias = torch.zeros(heads, device=device), torch.zeros(wide, device=device)
            state = torch.zeros(heads, WIDTH, WIDTH, device=device) if entering else None
            leaves = [q, k, v, gate, beta, a_log, bias, *([] if state is None else [state])]
            for leaf in leaves:
                leaf.requires_grad_()
            arguments = q, k, v, gate, beta, a_log, bias, lengths, state
            out, left = fla.kda_piece(*arguments, lower_bound=BOUND, carries=carries)
            (out.float().sum() + (0 if left is None else left.sum())).backward()
        x = torch.randn(TOKENS, wide, device=device).bfloat16().requires_grad_()
        taps = torch.randn(wide, 1, TAPS, device=device).requires_grad_()
        ends = [torch.arange(length, device=device) for length in lengths]
        short_conv(x, taps, torch.cat(ends), lengths).float().sum().backward()


@torch.no_grad()
def exercise_summary(device: torch.device) -> None:
    """Call the kernels as ``components.context_parallel.kda_state`` sums up a part: values and a
    map side by side, twice as wide."""
    from kernels.kda import fla

    q, k, v, gate = _rows(device, HEADS, 4)
    beta = torch.rand(TOKENS, HEADS, device=device).bfloat16()
    a_log, bias = (torch.zeros(n, device=device) for n in (HEADS, HEADS * WIDTH))
    state = torch.zeros(HEADS, WIDTH, 2 * WIDTH, device=device)
    arguments = q, k, torch.cat([v, v], 2), gate, beta, a_log, bias, (TOKENS,), state
    fla.kda_piece(*arguments, lower_bound=BOUND, carries=True)


def _rows(device: torch.device, heads: int, count: int) -> list[torch.Tensor]:
    shape = TOKENS, heads, WIDTH
    return [torch.randn(shape, device=device).bfloat16() for _ in range(count)]


def main(arguments: Sequence[str] = ()) -> int:
    """Returns the exit status: 2 without a GPU, or where there is nothing to add to.

    Raises:
        ValueError: a number of ranks that does not divide the heads.
    """
    parser = argparse.ArgumentParser(prog="python -m kernels.tuned", description=__doc__)
    parser.add_argument("--context", nargs="+", type=int, metavar="RANKS", default=[])
    context: list[int] = parser.parse_args(arguments).context
    for ranks in context:
        if ranks < 1 or HEADS % ranks:
            legal = ", ".join(str(n) for n in range(1, HEADS + 1) if HEADS % n == 0)
            raise ValueError(f"--context: {ranks} ranks cannot split {HEADS} heads; legal: {legal}")
    if not torch.cuda.is_available():
        print("make tune measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    gpu, device = torch.cuda.get_device_name(), torch.device("cuda")
    path = path_of(gpu)
    if context:
        held, note = find(gpu)
        if held is None:
            print(f"--context adds to a file, and this is {note}", file=sys.stderr)
            return 2
        for ranks in context:
            exercise(device, HEADS // ranks, pieces=False)
        exercise_summary(device)
        kernels = added(held.kernels, collect())
    else:
        if path.exists():
            # Or its entries would be taken for measured.
            path.rename(path.with_suffix(".json.old"))
        exercise(device)
        kernels = collect()
    write(Tuned(gpu, installed(), kernels), path)
    entries = sum(len(kernel.entries) for kernel in kernels.values())
    print(f"{path}: {entries} configurations of {len(kernels)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
