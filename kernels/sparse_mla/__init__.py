"""Attention over selected pools of one latent row per token: definition and Hopper kernels."""
