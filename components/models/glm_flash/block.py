"""One decoder layer: a mixer and a feed-forward part, each inside a hyper-connection."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.config import derive
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.common import FeedForward, RMSNorm
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.kda import KDA
from components.models.glm_flash.mla import SparseMLA
from components.recompute.tape import sublayer, unread
from kernels.hyper_connections.merge import MadeOf


class Handover(Module):
    """Gives a mixer's output back to the ranks that hold the tokens. No parameters.

    Where tensor ranks compute some heads each, its sharding sums what they made; else it does
    nothing.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, D) -> (B, L or fewer, D)."""
        return x


class GlmFlashBlock(Module):
    """No layer knows which memory technique is on; techniques swap the configs below it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention_hc: HyperConnection.Config
        attention_norm: RMSNorm.Config
        attention: KDA.Config | SparseMLA.Config
        handover: Handover.Config
        ffn_hc: HyperConnection.Config
        ffn_norm: RMSNorm.Config
        feed_forward: FeedForward.Config | None = None
        moe: MoE.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_hc = config.attention_hc.build()
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.handover = config.handover.build()
        self.ffn_hc = config.ffn_hc.build()
        self.ffn_norm = config.ffn_norm.build()
        # torchtitan's sharding and load balancing look for these names.
        self.moe_enabled = config.moe is not None
        if config.moe is not None:
            self.moe = config.moe.build()
        else:
            assert config.feed_forward is not None
            self.feed_forward = config.feed_forward.build()

    def forward(self, streams: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Residual streams (B, L, n, D) -> (B, L, n, D).

        Over tensor ranks L is this rank's part of a sequence, padding included.
        """
        x, streams, post, mix = self.attention_hc(streams)
        out = sublayer(lambda: self._mix(x, documents))
        made_of = self.keep_instead(streams, out, post, mix)
        streams = self.attention_hc.write(streams, out, post, mix)
        x, streams, post, mix = self.ffn_hc(streams, made_of)
        out = sublayer(lambda: self._feed_forward(x, documents))
        return self.ffn_hc.write(streams, out, post, mix, made_of, unread())

    def keep_instead(self, *merged: torch.Tensor) -> MadeOf:
        """What is kept instead of the streams between both parts, of what they are merged of."""
        return ()

    def _mix(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        x, padding = self.attention_norm(x), _padding(documents)
        if not padding:
            return self.handover(self.attention(x, documents))
        # What follows the tokens belongs to no document.
        out = self.attention(x[:, :-padding], documents)
        return self.handover(F.pad(out, (0, 0, 0, padding)))

    def _feed_forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        x = self.ffn_norm(x)
        return self.moe(x, _padding(documents)) if self.moe_enabled else self.feed_forward(x)


class RebuildingBlock(GlmFlashBlock):
    """A layer that merges the streams between its parts again in backward, whenever they are read
    there, and not its result where it runs again for its graph alone. Its hyper-connections are
    trimmed, or in kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(GlmFlashBlock.Config):
        pass

    def keep_instead(self, *merged: torch.Tensor) -> MadeOf:
        """All of it: it is kept anyway."""
        return tuple(tensor.detach() for tensor in merged)


def rebuilding(config: GlmFlashBlock.Config) -> RebuildingBlock.Config:
    """The config of the same layer, of this kind."""
    return derive(config, RebuildingBlock.Config)


def _padding(documents: Documents) -> int:
    """What ``GlmFlashDecoder`` has put behind the tokens of its only row."""
    return -len(documents.position) % spmd_mesh_size("tp")
