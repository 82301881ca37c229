"""The ``model.position`` section: how a model tells positions apart, and its longer contexts."""

import math
from dataclasses import dataclass
from typing import Literal, cast

from torchtitan.config import derive
from torchtitan.models.common import CosSinRoPE, RoPE
from torchtitan.models.common.decoder import Decoder

from components.core.problems import shown
from components.core.units import Tokens
from components.models.settings import Finding
from components.titan.position import NoRotation, SharedRoPE, StretchedRoPE
from kernels.position.alibi import alibi_slopes
from kernels.position.rotary import Stretch

Kind = Literal["rope", "alibi", "none"]
Scaling = Literal["library", "none", "linear", "ntk", "yarn", "llama"]

_KEY = "model.position"
# Rotations within the trained context that bound the ramp: fast, slow.
_BETAS = {"yarn": (32.0, 1.0), "llama": (4.0, 1.0)}


@dataclass(kw_only=True, slots=True)
class Position:
    """A position encoding, and how it stretches to contexts longer than the trained one."""

    kind: Kind = "rope"
    """"rope": queries and keys are rotated; "alibi": scores fall with the distance, at a rate per
    head (arXiv 2108.12409); "none": the causal mask alone."""

    scaling: Scaling = "none"
    """How rotary frequencies follow factor. "linear": all slower (arXiv 2306.15595); "ntk": a
    larger theta; "yarn": by the rotations that a pair of channels makes within original_seq_len,
    with sharper attention (arXiv 2309.00071); "llama": the same ramp as Llama 3.1 uses it.
    "library" (models of torchtitan alone): as the model was published."""

    factor: float = 1.0
    """The longest context over original_seq_len, 1 or more."""

    original_seq_len: Tokens | None = None
    """Length of the context that the weights were trained at, in tokens; for every scaling."""

    beta_fast: float | None = None
    """Pairs of channels with at least this many rotations keep their frequency ("yarn": 32,
    "llama": 4 when null)."""

    beta_slow: float | None = None
    """Pairs with at most this many rotations are slowed down by factor (1 when null)."""

    mscale: float = 1.0
    """"yarn" multiplies queries and keys by 0.1 x mscale x ln(factor) + 1 each; 0: by 1."""

    @property
    def longest(self) -> int | None:
        """Tokens that the stretched encoding is meant for; None where no scaling says."""
        stretched = self.scaling in ("linear", "ntk", "yarn")
        if not stretched or self.original_seq_len is None or not self.factor < math.inf:
            return None
        return int(self.factor * self.original_seq_len)

    @property
    def betas(self) -> tuple[float, float]:
        """``beta_fast`` and ``beta_slow`` with the defaults of the scaling filled in."""
        fast, slow = _BETAS.get(self.scaling, _BETAS["yarn"])
        return (
            fast if self.beta_fast is None else self.beta_fast,
            slow if self.beta_slow is None else self.beta_slow,
        )

    def check(self) -> list[Finding]:
        """Problems between the keys of the section."""
        if self.scaling in ("none", "library"):
            return self._check_unused()
        if self.kind != "rope":
            message = (
                f"{self.scaling!r} has no effect with {_KEY}.kind = {self.kind!r}; "
                f"legal: 'none', or {_KEY}.kind 'rope'"
            )
            return [(f"{_KEY}.scaling", message)]
        return self._check_stretch() + self._check_yarn()

    def _check_unused(self) -> list[Finding]:
        neutral = {"factor": 1.0, "original_seq_len": None}
        changed = {name: old for name, old in neutral.items() if getattr(self, name) != old}
        found = []
        for name, old in changed.items():
            message = (
                f"{getattr(self, name)} has no effect with {_KEY}.scaling = {self.scaling!r}; "
                f"legal: {shown(old)}, or {_KEY}.scaling {self._legal()}"
            )
            found.append((f"{_KEY}.{name}", message))
        return found + self._check_yarn()

    def _legal(self) -> str:
        """The scalings that take a factor."""
        published = self.scaling == "library"
        return "'linear', 'ntk' or 'yarn'" if published else "'linear', 'ntk', 'yarn' or 'llama'"

    def _check_stretch(self) -> list[Finding]:
        found = []
        if not 1 <= self.factor < math.inf:
            found.append((f"{_KEY}.factor", f"{self.factor} does not stretch; legal: 1 or more"))
        length = self.original_seq_len
        if length is None or length < 1:
            message = (
                f"{shown(length)} with {_KEY}.scaling = {self.scaling!r}, which starts from the "
                "length that the weights were trained at; legal: 1 or more, such as 4k"
            )
            found.append((f"{_KEY}.original_seq_len", message))
        return found

    def _check_yarn(self) -> list[Finding]:
        found: list[Finding] = []
        ramp = self.scaling in _BETAS
        for name in ("beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is not None and not ramp:
                message = (
                    f"{value} has no effect with {_KEY}.scaling = {self.scaling!r}; "
                    f"legal: null, or {_KEY}.scaling 'yarn' or 'llama'"
                )
                found.append((f"{_KEY}.{name}", message))
        fast, slow = self.betas
        if ramp and not 0 < slow < fast < math.inf:
            message = f"{fast} rotations with {_KEY}.beta_slow = {slow}; legal: beta_fast > "
            found.append((f"{_KEY}.beta_fast", f"{message}beta_slow > 0, such as 32 and 1"))
        if self.scaling != "yarn" and self.mscale != 1.0:
            message = (
                f"{self.mscale} has no effect with {_KEY}.scaling = {self.scaling!r}; "
                f"legal: 1, or {_KEY}.scaling 'yarn'"
            )
            found.append((f"{_KEY}.mscale", message))
        elif not 0 <= self.mscale < math.inf:
            message = f"{self.mscale} would flatten attention; legal: 0 or more"
            found.append((f"{_KEY}.mscale", message))
        return found

    def check_length(self, seq_len: int) -> list[Finding]:
        """A sequence longer than the stretched context."""
        if self.longest is None or seq_len <= self.longest:
            return []
        message = (
            f"{self.factor} x {_KEY}.original_seq_len = {self.longest} tokens, and "
            f"training.seq_len is {seq_len}; legal: {seq_len / (self.original_seq_len or 1):.6g} "
            "or more"
        )
        return [(f"{_KEY}.factor", message)]


@dataclass(kw_only=True, slots=True)
class LibraryPosition(Position):
    """The section of a model that torchtitan's library defines."""

    scaling: Scaling = "library"
    """How rotary frequencies follow factor. "library": as the model was published; "none",
    "linear", "ntk": instead of that; "yarn": the model's own form of it with this factor."""


@dataclass(kw_only=True, slots=True)
class NoPosition(Position):
    """The section of a model without position embeddings."""

    kind: Kind = "none"
    """"none" alone: layers tell the order of tokens by what they are."""


def build_rope(
    position: Position, *, dim: int, max_seq_len: int, theta: float, n_heads: int
) -> RoPE.Config:
    """What ``attention.rope`` becomes. ``position`` has passed its check.

    Args:
        position: any kind; a scaling other than "library".
        dim: width of a head.
        max_seq_len: positions, in tokens.
        theta: base of the rotary wavelengths.
        n_heads: query heads of the whole model.
    """
    if position.kind != "rope":
        rates = alibi_slopes(n_heads) if position.kind == "alibi" else []
        return NoRotation.Config(dim=dim, max_seq_len=max_seq_len, theta=theta, rates=rates)
    if position.scaling in ("none", "library") or position.factor == 1:
        return SharedRoPE.Config(dim=dim, max_seq_len=max_seq_len, theta=theta)
    assert position.original_seq_len is not None
    fast, slow = position.betas
    return StretchedRoPE.Config(
        dim=dim,
        max_seq_len=max_seq_len,
        theta=theta,
        rope_factor=position.factor,
        original_seq_len=position.original_seq_len,
        beta_fast=fast,
        beta_slow=slow,
        stretch=cast(Stretch, position.scaling),
        mscale=position.mscale,
    )


def restretch(position: Position, published: CosSinRoPE.Config) -> RoPE.Config:
    """A published rotary embedding with another stretch. ``position`` has passed its check.

    torchtitan's YaRN ramps linearly in the number of the pair of channels, between bounds given in
    rotations, and its attention applies the temperature: what published weights are used to.
    """
    longest = position.longest or published.max_seq_len
    if position.scaling == "library":
        return derive(published, SharedRoPE.Config)
    if position.scaling == "yarn":
        fast, slow = position.betas
        return derive(
            published,
            SharedRoPE.Config,
            max_seq_len=longest,
            scaling="yarn",
            rope_factor=position.factor,
            original_seq_len=position.original_seq_len,
            beta_fast=fast,
            beta_slow=slow,
        )
    return build_rope(
        position,
        dim=published.dim,
        max_seq_len=longest,
        theta=published.theta,
        n_heads=1,
    )


def table_bytes(model: Decoder.Config, seq_len: int) -> int:
    """What rotary tables of ``seq_len`` positions take on every rank, whatever is cut; bytes.

    Layers share equal ``SharedRoPE`` tables; torchtitan's own have one each.
    """
    shared: list[RoPE.Config] = []
    total = 0
    for layer in model.layers:
        rope = getattr(layer.attention, "rope", None)
        if rope is None or isinstance(rope, NoRotation.Config) or rope in shared:
            continue
        if isinstance(rope, SharedRoPE.Config):
            shared.append(rope)
        numbers = 2 * rope.dim if isinstance(rope, CosSinRoPE.Config) else rope.dim
        total += seq_len * numbers * 4
    return total
