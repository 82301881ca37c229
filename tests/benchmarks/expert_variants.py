"""Ways to run one layer of routed experts on several ranks, over the same weights and tokens.

Choose the device (``components.titan.device.use_device``) before importing this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from components.expert_dispatch.balanced_experts import balanced_experts
from components.expert_dispatch.experts import chunked_experts
from components.expert_dispatch.profiles import RoutingProfile
from components.expert_dispatch.routes import count_routes
from components.recompute.layer import RecomputedLayer
from components.titan.dispatch import gloo
from components.titan.moe import UnroundedDispatcher
from components.titan.parts import with_functions
from kernels.combine import weighted_sum
from tests.benchmarks.case import Outputs, Role
from tests.benchmarks.expert_shapes import Shape
from tests.benchmarks.published_llep import published_llep

Change = Callable[[RoutedExperts.Config, Shape], RoutedExperts.Config]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run the layer."""

    name: str

    role: Role

    change: Change
    """Plain routed experts -> these."""

    planned: bool = False
    """Rows are placed by the planner."""

    chunked: bool = False
    """In the shape's chunks, else in one."""

    whole: bool = True
    """Keeps for backward, or makes again at once, what all rows need."""

    recomputed: bool = False
    """Inside the project's recomputed layer, which keeps the tokens alone."""

    rounded: bool = False
    """torchtitan's own sum over a token's experts, instead of this project's, which all others
    share: at these shapes its fixed order costs more than anything that is compared here."""


def _plain(config: RoutedExperts.Config, shape: Shape) -> RoutedExperts.Config:
    return config


def _published(config: RoutedExperts.Config, shape: Shape) -> RoutedExperts.Config:
    return published_llep(config, minimum_rows=shape.minimum_rows)


def _llep(config: RoutedExperts.Config, shape: Shape) -> RoutedExperts.Config:
    settings = {"capacity_factor": 1.0, "minimum_rows": shape.minimum_rows, "threshold": 1.0}
    return balanced_experts(config, **settings)


def _pipelined(
    config: RoutedExperts.Config, shape: Shape, **more: int | bool
) -> RoutedExperts.Config:
    return balanced_experts(
        config,
        capacity_factor=1.0,
        minimum_rows=shape.minimum_rows,
        threshold=1.0,
        chunk_tokens=shape.chunk_tokens,
        max_chunks=shape.chunks,
        membership="strided",
        **more,
    )


def _chunked(config: RoutedExperts.Config, shape: Shape) -> RoutedExperts.Config:
    settings = {"chunk_tokens": shape.chunk_tokens, "max_chunks": shape.chunks}
    return chunked_experts(config, membership="strided", **settings)


REFERENCE = Variant(name="standard", role="peer", change=_plain)

VARIANTS = (
    REFERENCE,
    Variant(name="standard_recomputed", role="peer", change=_plain, recomputed=True),
    Variant(name="standard_stock", role="peer", change=_plain, rounded=True),
    Variant(name="llep_published", role="peer", change=_published, planned=True),
    Variant(
        name="llep_published_recomputed",
        role="peer",
        change=_published,
        planned=True,
        recomputed=True,
    ),
    Variant(name="llep", role="ours", change=_llep, planned=True),
    *(
        Variant(
            name=name,
            role="ours",
            change=partial(_pipelined, **more),
            planned=True,
            chunked=True,
            whole=False,
        )
        for name, more in (
            ("pipelined", {}),
            ("pipelined_rounded", {"rounded_sums": True}),
            ("pipelined_kept", {"rounded_sums": True, "kept_chunks": 2}),
            ("pipelined_all_kept", {"kept_chunks": 64}),
        )
    ),
    Variant(name="chunked", role="ours", change=_chunked, chunked=True, whole=False),
)


class Bench:
    """This rank's weights, and one profile's tokens at one shape at a time.

    Attributes:
        shape: of the tokens at hand.
    """

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self.shape, self._device, self._seed = shape, device, seed
        self._mesh = mesh_of(device)
        config = GroupedExperts.Config(
            dim=shape.dim, hidden_dim=shape.hidden, num_experts=shape.experts
        )
        with torch.device("meta"):
            named = config.build().named_parameters()
        draw = self._generator(0)
        self._weights = {
            name: nn.Parameter(self._randn(*p.shape, draw=draw) * p.shape[-1] ** -0.5)
            for name, p in named
        }

    def route(self, shape: Shape, profile: RoutingProfile) -> None:
        """Draw tokens of a shape; all ranks route alike, and weigh and compute values of their own.

        Route weights are positive and add up to 1 for each token.
        """
        self.shape = shape
        draw = self._generator(1)
        self._x = self._randn(shape.tokens, shape.dim, draw=draw)
        self._pull = self._randn(shape.tokens, shape.dim, draw=draw)
        size = shape.tokens, shape.top_k
        raw = torch.rand(*size, generator=draw, device=self._device) + 0.5
        self._scores = raw / raw.sum(1, keepdim=True)
        experts = shape.experts * self._mesh.size()
        self._ids = profile.expert_ids(*size, experts, self._device)
        self._counts = count_routes(self._ids, experts)

    @property
    def input_bytes(self) -> int:
        """Of this rank's weights, and of tokens, routing and incoming gradients."""
        given = self._x, self._pull, self._scores, self._ids, *self._weights.values()
        return sum(tensor.nbytes for tensor in given)

    def build(self, variant: Variant) -> RoutedExperts:
        """The variant's experts at the shape at hand, over the shared weights."""
        shape, experts = self.shape, self.shape.experts * self._mesh.size()
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=experts, top_k=shape.top_k)
        if not variant.rounded:
            dispatcher = with_functions(
                UnroundedDispatcher.Config(num_experts=experts, top_k=shape.top_k),
                "Trimmed",
                (("kernel", weighted_sum),),
            )
        config = RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=shape.dim, hidden_dim=shape.hidden, num_experts=shape.experts
            ),
            token_dispatcher=gloo(dispatcher) if self._device == "cpu" else dispatcher,
        )
        with torch.device("meta"):
            routed = variant.change(config, shape).build()
        for name, weight in self._weights.items():
            setattr(routed.inner_experts, name, weight)
        routed.token_dispatcher.wire_meshes(ep_mesh=self._mesh)
        return routed

    def forward(self, variant: Variant, experts: RoutedExperts) -> Outputs:
        """Without a graph: "out"."""
        with torch.no_grad():
            return {"out": self._run(variant, experts, self._x, self._scores)}

    def both(self, variant: Variant, experts: RoutedExperts) -> Outputs:
        """Forward and backward: "out", "dX", "dScores" and the gradient of every weight."""
        for weight in self._weights.values():
            weight.grad = None
        x, scores = self._x.detach().requires_grad_(), self._scores.detach().requires_grad_()
        out = self._run(variant, experts, x, scores)
        out.backward(self._pull)
        gradients = {f"d{name}": weight.grad for name, weight in self._weights.items()}
        for weight in self._weights.values():
            weight.grad = None  # it is the caller's now
        found = {"out": out.detach(), "dX": x.grad, "dScores": scores.grad, **gradients}
        return {name: value for name, value in found.items() if value is not None}

    def _run(
        self, variant: Variant, experts: RoutedExperts, x: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        layer = _Layer(experts, scores, self._ids, self._counts)
        return RecomputedLayer(layer)(x) if variant.recomputed else layer(x)

    def _generator(self, stream: int) -> torch.Generator:
        seed = (self._seed * 2 + stream) * dist.get_world_size() + dist.get_rank()
        return torch.Generator(self._device).manual_seed(seed)

    def _randn(self, *size: int, draw: torch.Generator) -> torch.Tensor:
        return torch.randn(*size, generator=draw, device=self._device, dtype=torch.bfloat16)


class _Layer(nn.Module):
    """What a decoder layer does around its experts, as far as they are concerned."""

    def __init__(self, experts: RoutedExperts, *routing: torch.Tensor) -> None:
        super().__init__()
        self.experts, self.routing = experts, routing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids, counts = self.routing
        return self.experts(x[None], scores[None], ids[None], counts)[0]


def mesh_of(device: str) -> DeviceMesh:
    """All ranks, known to torchtitan as those that share the experts."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    # As torchtitan's own start does: the meshes are known to this thread alone.
    torch.autograd.set_multithreading_enabled(False)
    return mesh
