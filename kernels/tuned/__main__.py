"""``make tune``: measure kernels for GLM-5.3-Flash on this GPU and write the files for it.

Runs fla's KDA and its convolution forward and backward at the published widths: whole documents;
the pieces that chunks of tokens make, which take and hand on states; and what context parallelism
calls. Takes three to five minutes for each count of heads. ``--add`` keeps what the GPU's file has
and measures only what it lacks. Then sparse attention's kernels (``kernels.sparse_mla.tune``).
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.sparse_mla import tune as sparse_mla
from kernels.tuned.fla import Entry, Kernel, Tuned, find, installed, path_of, use, write

HEADS, WIDTH, TAPS, BOUND = 64, 128, 4, -5.0
TOKENS = 32_768
CONTEXT_RANKS = (2, 4, 8)
"""Degrees of context parallelism whose shares of the heads are measured: 32, 16 and 8 heads."""


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
            kernels[name] = Kernel(module, entries)
    return kernels


@dataclass(frozen=True)
class Form:
    """A call of KDA that training makes.

    Attributes:
        lengths: tokens of the documents.
        heads: on the rank.
        values: width of a value.
        entering, carries: whether a state comes in, and whether one goes out.
        backward: whether it is differentiated.
    """

    lengths: tuple[int, ...] = (TOKENS,)
    heads: int = HEADS
    values: int = WIDTH
    entering: bool = False
    carries: bool = False
    backward: bool = True


def forms() -> Iterator[Form]:
    """Every form; the last ones are context parallelism's."""
    for lengths in ((TOKENS,), (TOKENS // 2, TOKENS // 2)):
        for entering in (False, True):
            for carries in (False, True):
                yield Form(lengths, entering=entering, carries=carries)
    # Heads split over ranks: each has its share of them and all tokens.
    for ranks in CONTEXT_RANKS:
        yield Form(heads=HEADS // ranks)
    # States passed on: a part's summary runs values and the identity side by side.
    yield Form(values=2 * WIDTH, entering=True, carries=True, backward=False)


def exercise(device: torch.device, chosen: Iterable[Form]) -> None:
    """Call the kernels in these forms; the convolution once for each count of heads."""
    convolved = set()
    for form in chosen:
        _recur(form, device)
        if (form.lengths, form.heads) not in convolved:
            convolved.add((form.lengths, form.heads))
            _convolve(form, device)


def _recur(form: Form, device: torch.device) -> None:
    from kernels.kda import fla

    tokens, heads = sum(form.lengths), form.heads

    def draw(width: int) -> torch.Tensor:
        return torch.randn(tokens, heads, width, device=device).bfloat16()

    q, k, v, gate = draw(WIDTH), draw(WIDTH), draw(form.values), draw(WIDTH)
    beta = torch.rand(tokens, heads, device=device).bfloat16()
    a_log, bias = torch.zeros(heads, device=device), torch.zeros(heads * WIDTH, device=device)
    state = torch.zeros(heads, WIDTH, form.values, device=device) if form.entering else None
    leaves = [q, k, v, gate, beta, a_log, bias, *([] if state is None else [state])]
    for leaf in leaves:
        leaf.requires_grad_(form.backward)
    arguments = q, k, v, gate, beta, a_log, bias, form.lengths, state
    out, left = fla.kda_piece(*arguments, lower_bound=BOUND, carries=form.carries)
    if form.backward:
        (out.float().sum() + (0 if left is None else left.sum())).backward()


def _convolve(form: Form, device: torch.device) -> None:
    from kernels.short_conv import fla

    wide = form.heads * WIDTH
    x = torch.randn(sum(form.lengths), wide, device=device).bfloat16().requires_grad_()
    taps = torch.randn(wide, 1, TAPS, device=device).requires_grad_()
    position = torch.cat([torch.arange(length, device=device) for length in form.lengths])
    fla.short_conv(x, taps, position, form.lengths).float().sum().backward()


def known_keys() -> dict[str, set[tuple[Any, ...]]]:
    """What the autotuners remember, by kernel."""
    return {name: {tuple(key) for key in found.cache} for _, name, found in tunable()}


def added(
    held: dict[str, Kernel], found: dict[str, Kernel], known: dict[str, set[tuple[Any, ...]]]
) -> dict[str, Kernel]:
    """``held`` and those entries of ``found`` that were not ``known`` before."""
    merged = dict(held)
    for name, kernel in found.items():
        old = held[name].entries if name in held else []
        new = [e for e in kernel.entries if tuple(e.key) not in known.get(name, set())]
        if old or new:
            merged[name] = Kernel(kernel.module, [*old, *new])
    return merged


def tune_fla(add: bool) -> None:
    """Measure fla's kernels and write the file for this GPU.

    Args:
        add: keep what the file has, if it is for these versions, and measure only what it lacks.
    """
    gpu = torch.cuda.get_device_name()
    path = path_of(gpu)
    held = find(gpu)[0] if add else None
    known: dict[str, set[tuple[Any, ...]]] = {}
    if held is not None:
        use(shares=False)
        known = known_keys()
    elif path.exists():
        # Or its entries would be taken for measured.
        path.rename(path.with_suffix(".json.old"))
    exercise(torch.device("cuda"), forms())
    kernels = added({} if held is None else held.kernels, collect(), known)
    write(replace(Tuned(gpu, installed(), {}), kernels=kernels), path)
    entries = sum(len(kernel.entries) for kernel in kernels.values())
    print(f"{path}: {entries} configurations of {len(kernels)} kernels")


def main(arguments: Sequence[str] = ()) -> int:
    """Returns the exit status: 2 without a GPU, or for an argument other than ``--add``."""
    if [*arguments] not in ([], ["--add"]):
        print(f"kernels.tuned: {' '.join(arguments)}: legal is --add, or nothing", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("make tune measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    tune_fla(bool(arguments))
    # Says itself why not where its kernels do not run; fla's run on more GPUs.
    sparse_mla.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
