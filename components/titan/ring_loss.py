"""Cross entropy over a vocabulary that is shared by a ring of ranks, as torchtitan calls a loss."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn as nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig

from components.titan.head import RingHead, Rings, rings_of
from components.vocabulary.choice import Schedule, choose
from components.vocabulary.fused import fused
from components.vocabulary.move_activations import move_activations
from components.vocabulary.move_weights import move_weights

Setting = Literal["auto", "fused", "move_weights", "move_activations"]

_MOVES = {"move_weights": move_weights, "move_activations": move_activations}


class RingLoss(ChunkedLossWrapper):
    """The sum of cross entropies, divided by the number of valid tokens of all ranks.

    It takes hidden states in place of logits (torchtitan hands the head to every loss of this base
    class, and leaves it out of the model's forward). Gradients are made while the loss is: that of
    the head goes into its ``grad``, that of the hidden states to the decoder in backward, which
    must start from this loss with the gradient 1, as torchtitan's trainer does.

    Every rank must call it at the same time, also one without a valid token.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        degree: int | None = None
        """Ranks of a ring; null: all ranks that share the head."""

        schedule: Setting = "auto"
        """How strips of logits are computed; see ``components.ring_dtp``."""

        strip_rows: int = 4096
        """Tokens in a strip of logits."""

        timeout_seconds: int = 300
        """Timeout of collectives in a ring, where it is not FSDP's own group."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        # Nothing of the base class: it would build another loss. There is nothing to compile.
        self.config = config
        self.lm_head: nn.Module | None = None
        self._rings: Rings | None = None
        self._head: RingHead | None = None

    @property
    def rings(self) -> Rings:
        """Set once the trainer has handed over the head."""
        assert self._rings is not None
        return self._rings

    @property
    def head(self) -> RingHead:
        """The head as this rank computes with it."""
        assert self._head is not None
        return self._head

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Take the head and form the rings. Collective."""
        self.lm_head = lm_head
        weight = lm_head.weight
        assert isinstance(weight, torch.Tensor)
        timeout = timedelta(seconds=self.config.timeout_seconds)
        self._rings = rings_of(weight, self.config.degree, timeout)
        self._head = RingHead(lm_head, self._rings)

    def schedule(self, tokens: int, summed: bool) -> Schedule:
        """What is done with ``tokens`` of each rank, whose losses are ``summed`` or kept."""
        chosen = self.config.schedule
        if chosen == "auto" or (chosen == "fused" and not summed):
            return choose(tokens, self.rings.layout, summed=summed)
        return chosen

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of one rank's tokens. Collective.

        Args:
            pred: hidden states (B, L, H); a forward alone is done where they need no gradient.
            labels: int64 (B, L).
            global_valid_tokens: what the sum is divided by, an integer of no dimension; None: 1.
            loss_inputs: not used.

        Returns:
            The loss, float32 of no dimension, and no metrics.
        """
        with spmd.no_typecheck(), torch.no_grad():
            hidden, targets = pred.flatten(0, 1), labels.flatten()
            if global_valid_tokens is None:
                global_valid_tokens = torch.ones((), dtype=torch.int64, device=pred.device)
            if not pred.requires_grad:
                return self._loss_alone(hidden, targets) / global_valid_tokens, {}
            total, gradient = self._loss_and_gradients(
                hidden, targets, global_valid_tokens.to(torch.float32).reciprocal()
            )
        with spmd.no_typecheck():
            loss = total / global_valid_tokens
            gradient = gradient.view(pred.shape)
            return self._gradient_backprop(pred, gradient, loss, self.lm_head, False), {}

    @torch.no_grad()
    def log_probabilities(
        self, pred: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For evaluation: every token by itself. Collective.

        Args:
            pred: hidden states (B, L, H).
            labels: int64 (B, L).

        Returns:
            Log-probability of every label, and entropy of every distribution, in nats; float32
            (B, L), 0 where the label is ignored.
        """
        with spmd.no_typecheck():
            hidden, targets = pred.detach().flatten(0, 1), labels.flatten()
            move = _MOVES[self.schedule(len(targets), summed=False)]
            logs, entropies = move(hidden, *self._shared(hidden, targets), rows=self._rows, dw=None)
            return logs.view(labels.shape), entropies.view(labels.shape)

    def _loss_alone(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        schedule, shared = self.schedule(len(targets), summed=True), self._shared(hidden, targets)
        if schedule == "fused":
            one = torch.ones((), device=hidden.device)
            options: dict[str, Any] = {"rows": self._rows, "dw": None, "wants_dx": False}
            return fused(hidden, *shared, scale=one, **options)[0]
        return -_MOVES[schedule](hidden, *shared, rows=self._rows, dw=None)[0].sum()

    def _loss_and_gradients(
        self, hidden: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses, not scaled; gradient of the hidden states, scaled. The head's is added
        to its ``grad``."""
        schedule, shared = self.schedule(len(targets), summed=True), self._shared(hidden, targets)
        with self.head.gradient(hidden.device) as dw:
            if schedule == "fused":
                total, gradient = fused(hidden, *shared, scale=scale, rows=self._rows, dw=dw)
            else:
                leaf = hidden.detach().requires_grad_()
                with torch.enable_grad():
                    logs, _ = _MOVES[schedule](leaf, *shared, rows=self._rows, dw=dw)
                    total = -logs.sum()
                total.backward(scale)
                total, gradient = total.detach(), leaf.grad
        assert gradient is not None
        return total, gradient

    def _shared(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[Any, ...]:
        """What every schedule is given after the hidden states."""
        shard = self.head.shard(hidden.dtype, hidden.device)
        return shard, targets, self.rings.layout, self.rings.ring

    @property
    def _rows(self) -> int:
        return self.config.strip_rows
