"""What torchtitan's trainer asks of a decoder behind its public side."""

import torch
from torchtitan.models.common.decoder import Decoder


def project_to_vocabulary(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of (B, L, D), or ``hidden`` as it is where the loss applies the head, in chunks."""
    return hidden if decoder._skip_lm_head else decoder.lm_head(hidden)
