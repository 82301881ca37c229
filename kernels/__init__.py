"""Operators, one folder each: ``naive`` (slow plain-torch twin), the kernel, and the public op."""
