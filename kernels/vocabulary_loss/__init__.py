"""Softmax statistics and gradients of a strip of logits: some rows, some columns of the vocabulary.

``naive`` is plain torch, ``triton_`` the CUDA kernels, ``op`` takes the one that fits the device,
``state`` is what is known about a row after some of its columns.
"""
