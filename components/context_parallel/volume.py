"""What a layer's mixer sends, before a run: the formulas that counted bytes are held against.

All are bytes that one rank sends to the others, in one pass, when shares are equal. A second
forward in backward (recompute) sends what the first sent once more, but for states, which are kept.
"""

from typing import Literal, NamedTuple, get_args

from components.context_parallel.layout import DEGREE, Kind

Exchange = Literal["hidden", "projections", "state"]

EXCHANGES = get_args(Exchange)

FULL = 4
"""Bytes of a float32: states, and gradients that are summed over ranks."""


class Volume(NamedTuple):
    """Bytes in either direction."""

    forward: int
    backward: int


def usual_exchange(ranks: int) -> Exchange:
    """What a KDA layer should exchange: hidden states while few ranks gather them, then states.

    The former computes what one process computes; its bytes grow with ranks and tokens.

    Raises:
        ValueError: fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"{DEGREE}: {ranks}; legal: 1 or more")
    return "hidden" if ranks <= 4 else "state"


def kda_volume(
    exchange: Exchange,
    *,
    tokens: int,
    ranks: int,
    dim: int,
    heads: int,
    head_dim: int,
    element_size: int,
    kind: Kind = "zigzag",
) -> Volume:
    """Of a KDA layer. Of "state" without the few tokens before each part.

    Args:
        tokens: of one rank.
        ranks: C.
        dim: width of hidden states.
        heads, head_dim: of the layer.
        element_size: bytes of an activation.
        kind: how the batch is cut; a zigzag's ranks have two parts, and a state for each.

    Raises:
        ValueError: no such exchange.
    """
    others, width = ranks - 1, heads * head_dim
    if exchange == "state":
        parts = 2 if kind == "zigzag" and ranks > 1 else 1
        states = parts * heads * head_dim * 2 * head_dim * FULL * others
        return Volume(states, states)
    outputs = tokens * width * element_size * others // ranks
    if exchange == "projections":
        inputs = tokens * (4 * width + heads) * element_size * others // ranks
        return Volume(inputs + outputs, inputs + outputs)
    if exchange == "hidden":
        hidden = tokens * dim * others
        return Volume(hidden * element_size + outputs, hidden * FULL + outputs)
    raise ValueError(f"exchange: {exchange!r}; legal: {', '.join(EXCHANGES)}")


def dsa_volume(
    *, tokens: int, ranks: int, kv_rank: int, index_dim: int, pool: int, element_size: int
) -> Volume:
    """Of a layer of sparse latent attention.

    Args:
        tokens: of one rank, in complete pools.
        ranks: C.
        kv_rank: width of the latent.
        index_dim: width of an index key.
        pool: tokens per index key.
        element_size: bytes of an activation.
    """
    others = ranks - 1
    latent = tokens * kv_rank * others
    keys = tokens // pool * index_dim * others
    return Volume((latent + keys) * element_size, latent * (element_size + FULL))
