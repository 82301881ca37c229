"""Operators, a folder or a module each, with a slow plain-torch twin; and what they share."""
