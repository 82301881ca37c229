"""Softmax attention with the sequence split over ranks, by methods that exchange different things.

``heads`` (Ulysses) trades tokens for heads. ``gathered`` brings the keys and values of all tokens,
``window`` those within a window. ``ring`` lets them go round, in one ring or in two. What a part's
tokens may see of other parts is ``reach``'s affair, ``kernel`` computes attention of consecutive
queries to consecutive keys, and ``attend`` puts a layer together.

Only tokens of documents that go on in a later part ever travel.
"""
