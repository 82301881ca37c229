"""Rows of tokens between the order of tokens and that of experts."""
