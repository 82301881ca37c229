"""Kimi delta attention: linear attention with a decay per key channel and the delta rule.

Every module has the same ``kda(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, *, lower_bound)``
and ``kda_piece``, which goes on from a state and hands one on: ``recurrent`` is the definition,
``chunked`` plain torch that trains, ``fla`` the CUDA kernels.
"""
