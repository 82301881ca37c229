"""Cross entropy over a vocabulary that the ranks of a ring share, in strips of logits.

Every rank of a ring has its own tokens and a shard of the projection (``layout``). The loss of all
tokens against all shards is worked out by one of three schedules: ``fused``, ``move_weights`` and
``move_activations``; ``choice`` says which is for what.
"""
