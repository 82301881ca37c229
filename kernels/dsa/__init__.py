"""DeepSeek sparse attention over pooled keys in plain torch: the slow twin of fast kernels."""
