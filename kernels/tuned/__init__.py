"""Configurations of kernels that were found by measuring on a GPU, kept as files.

``fla_<gpu>.json`` holds what fla's kernels need for GLM-5.3-Flash's linear attention; ``make tune``
writes it on a GPU, ``fla`` reads it and hands it to Triton before the first call.
"""
