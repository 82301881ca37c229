"""Scores of pools and the exact choice of the best, a window of queries at a time.

``naive`` is plain torch, ``windows`` cuts the work under a cap of memory, ``gluon_scores`` (Hopper)
and ``triton_scores`` (other GPUs) write the scores of a window, ``gluon_topk`` (Hopper) and
``triton_topk`` choose from them, ``walk`` runs them window by window, ``op`` is what a model calls.
"""
