"""Rotary frequencies of contexts longer than the one that weights were trained at.

Channel pair i of a head of width d turns by theta ** (-2 i / d) radians per token. To stretch a
context by a factor s, linear interpolation (arXiv 2306.15595) turns every pair s times slower;
NTK-aware scaling raises theta so that the slowest pair turns s times slower and the fastest as
before; YaRN (arXiv 2309.00071, sections 3.2 and 3.4) decides by the rotations a pair makes within
the trained context. Llama 3.1 uses the same ramp with other bounds and without a temperature.
"""

import math
from typing import Literal

import torch

Stretch = Literal["none", "linear", "ntk", "yarn", "llama"]


def inverse_frequencies(
    dim: int,
    theta: float,
    stretch: Stretch = "none",
    *,
    factor: float = 1.0,
    trained_len: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> torch.Tensor:
    """Radians per token of every channel pair: float64 (dim / 2,), on the default device.

    Args:
        dim: width of a head; even, above 2 for "ntk".
        theta: base of the wavelengths.
        stretch: how the frequencies follow ``factor``.
        factor: new context over the trained one, 1 or more.
        trained_len: tokens of the trained context; for "yarn" and "llama".
        beta_fast: pairs with at least this many rotations within ``trained_len`` stay as they are.
        beta_slow: pairs with at most this many are interpolated; between the two in proportion.

    Raises:
        ValueError: ``trained_len`` is missing.
    """
    if stretch == "ntk":
        theta *= factor ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = theta**-exponents
    if stretch == "linear":
        return frequencies / factor
    if stretch in ("yarn", "llama"):
        if trained_len is None:
            raise ValueError(f"{stretch} needs the length of the trained context")
        rotations = trained_len * frequencies / (2 * math.pi)
        kept = ((rotations - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / factor
    return frequencies


def temperature_root(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, each: sqrt(1 / t) = 0.1 mscale ln(factor) + 1.

    The paper's ``mscale`` is 1; 0 leaves attention as sharp as it was.
    """
    return 0.1 * mscale * math.log(factor) + 1.0


def rotation_table(frequencies: torch.Tensor, length: int, scale: float = 1.0) -> torch.Tensor:
    """Cosines, then sines, of positions 0 to length - 1: float32 (length, 4 * pairs).

    Either is repeated for the two halves of a head. Angles are float64: in float32 those of the
    fastest pairs are off by 0.06 radians at a million tokens.

    Args:
        frequencies: radians per token, float64 (pairs,).
        length: positions.
        scale: factor on the whole table, and so on queries and keys.
    """
    positions = torch.arange(length, dtype=torch.float64, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    cosines, sines = ((f(angles) * scale).float() for f in (torch.cos, torch.sin))
    return torch.cat([cosines, cosines, sines, sines], dim=-1)
