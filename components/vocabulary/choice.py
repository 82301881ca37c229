"""Which schedule suits a loss."""

from typing import Literal

from components.vocabulary.layout import VocabularyLayout

Schedule = Literal["fused", "move_weights", "move_activations"]


def choose(tokens: int, layout: VocabularyLayout, *, summed: bool) -> Schedule:
    """The schedule for ``tokens`` tokens per rank.

    ========================  =============  ==================================================
    schedule                  matrix         numbers that leave a rank, forward and backward,
                              products       P ranks, v = V / P, b bytes each
    ========================  =============  ==================================================
    fused                     3              (P - 1) N H: b gathered, 4 of dX in float32
    move_weights              4              (P - 1) v H: 2 b, and P v H: 4 of dW in float32
    move_activations          4              (P - 1) N H: 2 b, and P N H: 4 of dX in float32
    ========================  =============  ==================================================

    A loss that is a sum over tokens is trained with ``fused``: it does three quarters of the
    others' arithmetic. It moves less than ``move_activations``, and up to N = 4 v / 3 (b = 2) less
    than ``move_weights``. Beyond that it moves more, but its products outlast its messages: per
    token and rank 6 v H operations against (4 + b) H bytes, which at v = 25,000 and 600 TFLOP/s
    asks for 24 GB/s and less. Measured on one H200 (N = 16,384, H = 7168, V = 200,000, strips of
    4,096 rows): 216 ms, where three products at the peak measured in the same run would take 178,
    and 284 ms with strips computed twice
    (tests/benchmarks/results/vocabulary_loss_nvidia-h200_a.md).

    Losses that need log-probabilities before their gradients are known (per-token weights from
    elsewhere) take one of the other two, whose strips are computed again in backward. Then what is
    smaller travels: the compute shard when N > v, else the hidden states (arXiv 2609.14306).

    Args:
        tokens: of one rank, the same number on all ranks.
        layout: of the vocabulary.
        summed: whether the loss is a plain sum over tokens with a factor known in advance.
    """
    if summed:
        return "fused"
    return "move_weights" if tokens > layout.widest else "move_activations"
