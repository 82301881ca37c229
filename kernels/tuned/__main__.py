"""``make tune``: measure fla's kernels for GLM-5.3-Flash on this GPU and write the file for it.

Runs KDA and its convolution forward and backward at the published widths: whole documents, and the
pieces that chunks of tokens make, which take and hand on states. Takes a few minutes.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels.tuned.fla import Entry, Kernel, Tuned, installed, path_of, write

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


def exercise(device: torch.device) -> None:
    """Call the kernels in every form that training does."""
    from kernels.kda import fla
    from kernels.short_conv.fla import short_conv

    wide = HEADS * WIDTH
    for lengths in ((TOKENS,), (TOKENS // 2, TOKENS // 2)):
        for entering, carries in ((False, False), (True, False), (False, True), (True, True)):
            q, k, v, gate = _rows(device, 4)
            beta = torch.rand(TOKENS, HEADS, device=device).bfloat16()
            a_log, bias = torch.zeros(HEADS, device=device), torch.zeros(wide, device=device)
            state = torch.zeros(HEADS, WIDTH, WIDTH, device=device) if entering else None
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


def _rows(device: torch.device, count: int) -> list[torch.Tensor]:
    shape = TOKENS, HEADS, WIDTH
    return [torch.randn(shape, device=device).bfloat16() for _ in range(count)]


def main() -> int:
    """Returns the exit status: 2 without a GPU."""
    if not torch.cuda.is_available():
        print("make tune measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    path = path_of(gpu)
    if path.exists():
        # Or its entries would be taken for measured.
        path.rename(path.with_suffix(".json.old"))
    exercise(torch.device("cuda"))
    tuned = replace(Tuned(gpu, installed(), {}), kernels=collect())
    write(tuned, path)
    entries = sum(len(kernel.entries) for kernel in tuned.kernels.values())
    print(f"{path}: {entries} configurations of {len(tuned.kernels)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
