"""Which layers of a model are recomputed, and how many at a time."""

from dataclasses import dataclass

import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.tools.logging import logger

from components.recompute.layer import RecomputedLayer
from components.recompute.segment import Segment


class LayerRecomputePolicy(FullAC):
    """Every layer is recomputed whole; the inputs of ``every`` - 1 of ``every`` layers as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        every: int = 1
        """Layers per kept input."""

        keep_sublayers: bool = False
        """Keep the outputs of mixers and feed-forward parts."""

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Wrap every child of ``model.layers``; the last segment may be shorter."""
        layers, every = model.get_submodule("layers"), self.config.every
        children = list(layers.named_children())
        for start in range(0, len(children), every):
            group = children[start : start + every]
            segment = Segment(len(group))
            for place, (name, layer) in enumerate(group):
                wrapped = RecomputedLayer(
                    layer,
                    segment,
                    place,
                    # The last one is never rebuilt, so nobody would ask for its outputs.
                    keep_sublayers=self.config.keep_sublayers and place + 1 < len(group),
                    preserve_rng_state=self.config.preserve_rng_state,
                )
                layers.register_module(name, wrapped)
        kept = -(-len(children) // every)
        logger.info(f"Layer recompute: {kept} of {len(children)} layer inputs are kept")
