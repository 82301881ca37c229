"""Masked grouped-query attention in plain torch, for devices without a fused masked kernel."""
