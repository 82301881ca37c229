"""SiLU of a short depthwise causal convolution that restarts at every document.

Both modules have the same ``short_conv(x, weight, position, lengths)``: ``naive`` is plain torch,
``fla`` the CUDA kernel.
"""
