"""One compiled form of fla's norms of queries and keys, whatever the number of rows.

fla-core 0.6.0 gives these two kernels the number of blocks of 65,536 rows as a constant. They do
not read it: it is a key to measure by. But for every number that comes up they are compiled again,
0.15 s forward and 0.1 s backward on an H200's host, and measured again where no file has it. Pieces
of a sequence are cut where documents end, so the first dozens of steps bring new numbers, and on
each rank in other steps, while the others wait.
"""

import importlib
from collections.abc import Callable
from typing import Any

MODULE = "fla.modules.norm.l2norm"
KERNELS = ("l2norm_fwd_kernel", "l2norm_bwd_kernel")
BLOCKS = 16
"""What they are told: 16,384 tokens of 64 heads, one of the numbers that have been measured."""


class OneForm:
    """Stands in for a kernel, which is launched with ``NB=BLOCKS`` whatever the caller says.

    Attributes:
        fn: the kernel, where Triton's wrappers have what they wrap.
    """

    def __init__(self, kernel: Any) -> None:
        self.fn = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch = self.fn[grid]
        return lambda **arguments: launch(**(arguments | {"NB": BLOCKS}))


def use_one_form() -> None:
    """Make fla launch these kernels in one form. A version whose kernels take no such number is
    left as it is."""
    module = importlib.import_module(MODULE)
    for name in KERNELS:
        kernel = getattr(module, name, None)
        if "NB" in getattr(kernel, "arg_names", ()):
            setattr(module, name, OneForm(kernel))
