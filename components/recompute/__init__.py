"""Layers that run again in backward: what they keep, where it stays, what is never repeated."""
