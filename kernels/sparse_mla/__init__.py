"""Attention over selected pools of one latent row per token that all heads share, absorbed form.

``naive`` is the definition in plain torch, ``tilelang_forward`` and ``tilelang_backward`` run on
Hopper GPUs. Of each there are two kernels: ``*_split`` with roles for warpgroups and explicit
barriers, ``*_simple`` as the compiler schedules it; ``tuned.json`` says which runs, and from how
many tokens on backward takes its keys in another order (``walk``).
"""
