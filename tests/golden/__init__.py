"""Losses of shipped recipes, step by step, on text that never changes."""
