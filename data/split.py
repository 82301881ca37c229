"""Which documents are held out for validation, decided by the name of each document alone."""

import hashlib

import numpy as np


def name_hash(name: str) -> int:
    """Return 64 bits that depend on ``name`` only, the same in every process and version."""
    data = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def held_out_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents belong to validation.

    A document keeps its side when others are added. Should the fraction select none, or all, the
    document with the lowest (highest) hash changes sides, so that neither split is empty.

    Args:
        hashes: ``name_hash`` of each document, uint64, shape (documents,).
        fraction: part of the documents to hold out, 0 <= fraction < 1; 0 holds out none.

    Returns:
        bool, shape (documents,).

    Raises:
        ValueError: fewer than two documents, and a fraction above 0.
    """
    if fraction == 0:
        return np.zeros(len(hashes), dtype=bool)
    if len(hashes) < 2:
        raise ValueError(
            f"data.held_out: {fraction} cannot divide a corpus of {len(hashes)} document into two "
            "splits; add documents, or write 0 and turn validation off"
        )
    mask = hashes < np.uint64(int(fraction * 2**64))
    if not mask.any():
        mask[np.argmin(hashes)] = True
    if mask.all():
        mask[np.argmax(hashes)] = False
    return mask
