"""One batch of packed documents over several ranks: every rank computes a share of its tokens.

``layout`` says which, ``share`` is one rank's view of it, ``collectives`` move rows and count
their bytes. ``kda_heads``, ``kda_state`` and ``dsa`` are the mixers' exchanges: each takes the
model's own module and this rank's tokens, and returns this rank's outputs. Everything else in a
layer works token by token and needs nothing. ``softmax`` has the exchanges of softmax attention.
``component`` puts them into a run: it cuts batches and swaps mixers. ``plan`` says what a family of
models must tell for that; ``families`` are those that do, and ``checks`` says what a recipe may not
ask for.

Gradients of parameters are this rank's share of the whole batch's: their sum over the ranks of the
group is what one process would compute. FSDP sums over data-parallel and context-parallel ranks
alike, and the loss is divided by the tokens of the whole step, so no factor is needed.
"""
