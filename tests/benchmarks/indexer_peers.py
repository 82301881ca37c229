"""TileLang's public indexer (``examples/deepseek_v32``) on the inputs of ours: fp8 products.

Operands are rounded to fp8 outside of the time. Scores are computed in chunks of queries, as they
are written out in float32, and left as they are where a pool is not open yet. Its radix selection
breaks ties as they fall, so what is compared is the scores of what it chose. At the gate numbers
are small integers, exact in fp8: how many pools fp8 finds on other numbers is not measured here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kernels.dsa.select import pool_scores
from kernels.indexer.fp8 import round_rows
from tests.benchmarks.case import Outputs, Runnable
from tests.benchmarks.fetched import Fetched
from tests.benchmarks.indexer_inputs import POOL, SCALE, Inputs
from tests.benchmarks.probes import Device

SCORE_FILES = ("fp8_lighting_indexer.py", "utils.py")
SELECT_FILES = (*SCORE_FILES, "topk_selector.py")
TOLERANCE = {"scores": 1e-3, "chosen scores": 1e-3}
_CHUNK_BYTES = 2**31
_CHUNK_QUERIES = 4096
_KEY_BLOCK = 256
_CHECK_QUERIES = 32


class Chunk(NamedTuple):
    """Queries ``rows``, pools before ``last`` and, int32 (Q,), where each query's pools end."""

    rows: slice
    last: int
    ends: torch.Tensor


def chunks(inputs: Inputs) -> Iterator[Chunk]:
    """All queries; in each run those with the most pools first, whose memory the others reuse."""
    pools = len(inputs.keys)
    step = max(4, min(_CHUNK_QUERIES, _CHUNK_BYTES // (4 * pools)) // 4 * 4)
    for part, begin in enumerate(inputs.begins):
        for q0 in reversed(range(0, inputs.run, step)):
            q1 = min(q0 + step, inputs.run)
            token = torch.arange(begin + q0, begin + q1, device=inputs.keys.device)
            last = (begin + q1) // POOL
            last = min(pools, last + -last % _KEY_BLOCK)
            rows = slice(part * inputs.run + q0, part * inputs.run + q1)
            yield Chunk(rows, last, ((token + 1) // POOL).int())


def _scorer(inputs: Inputs, fetched: Fetched) -> Callable[[Chunk], torch.Tensor]:
    """chunk -> float32 (Q, last) scores."""
    example = fetched.load("fp8_lighting_indexer.py").mqa_attn_return_logits_interface
    queries = inputs.queries.to(torch.float8_e4m3fn)
    keys, factors = round_rows(inputs.keys, rotate=False)
    weights = inputs.weights * SCALE

    def score(chunk: Chunk) -> torch.Tensor:
        begins = torch.zeros_like(chunk.ends)
        return example(
            queries[chunk.rows], keys[: chunk.last], factors[: chunk.last], weights[chunk.rows],
            begins, chunk.ends, clean_logits=False,
        )  # fmt: skip

    return score


def scores(inputs: Inputs, device: Device, fetched: Fetched) -> Runnable:
    """Scores alone, nothing chosen; only the gate's are kept, all would take gigabytes."""
    score, walk = _scorer(inputs, fetched), list(chunks(inputs))

    def call() -> Outputs:
        found = {}
        for chunk in walk:
            out = score(chunk)
            if inputs.gate:
                found[str(chunk.rows)] = out
        return found

    return Runnable(call=call)


def selection(inputs: Inputs, device: Device, fetched: Fetched) -> Runnable:
    """Scores, then the example's radix selection of the best pools."""
    score, walk = _scorer(inputs, fetched), list(chunks(inputs))
    choose = fetched.load("topk_selector.py").tl_topk

    def call() -> Outputs:
        ids = inputs.pools.before.new_empty(len(inputs.queries), inputs.count, dtype=torch.int32)
        for chunk in walk:
            begins = torch.zeros_like(chunk.ends)
            ids[chunk.rows] = choose(score(chunk), begins, chunk.ends, inputs.count)
        return {"ids": ids}

    return Runnable(call=call)


def _exact(inputs: Inputs) -> Iterator[tuple[Chunk, slice, torch.Tensor]]:
    """Chunk, some of its rows, and their scores in float64, -inf where a pool is not open."""
    for chunk in chunks(inputs):
        column = torch.arange(chunk.last, device=inputs.keys.device)
        for begin in range(0, len(chunk.ends), _CHECK_QUERIES):
            some = slice(begin, begin + _CHECK_QUERIES)
            queries = inputs.queries[chunk.rows][some].double()
            weights = inputs.weights[chunk.rows][some].double()
            wide = pool_scores(queries, weights, inputs.keys[: chunk.last].double(), SCALE)
            yield chunk, some, wide.masked_fill_(column >= chunk.ends[some, None], float("-inf"))


def check_scores(inputs: Inputs, outputs: Outputs) -> dict[str, float]:
    """``|scores - exact| / |exact|`` over all open pools."""
    wrong = total = 0.0
    for chunk, some, exact in _exact(inputs):
        open_ = exact.isfinite()
        got = outputs[str(chunk.rows)][some].double().where(open_, 0.0)
        exact = exact.where(open_, 0.0)
        wrong += (got - exact).square().sum().item()
        total += exact.square().sum().item()
    return {"scores": _ratio(wrong, total)}


def check_selection(inputs: Inputs, outputs: Outputs) -> dict[str, float]:
    """The same of the chosen pools' exact scores, sorted, against the best; a pool chosen twice,
    or one that is not open, is infinitely wrong. A query with fewer open pools has them first."""
    wrong = total = 0.0
    for chunk, some, exact in _exact(inputs):
        count = min(inputs.count, exact.shape[1])
        wanted = torch.arange(count, device=exact.device) < chunk.ends[some, None]
        ids = outputs["ids"][chunk.rows][some, :count].long()
        legal = (ids >= 0) & (ids < chunk.ends[some, None])
        spread = torch.where(wanted, ids, -1 - torch.arange(count, device=ids.device))
        again = spread.sort(1).values.diff(dim=1) == 0
        if bool((wanted & ~legal).any() or again.any()):
            return {"chosen scores": float("inf")}
        got = exact.gather(1, ids.where(wanted, 0)).where(wanted, float("-inf"))
        got = got.sort(1, descending=True).values.where(wanted, 0.0)
        best = exact.topk(count, dim=1).values.where(wanted, 0.0)
        wrong += (got - best).square().sum().item()
        total += best.square().sum().item()
    return {"chosen scores": _ratio(wrong, total)}


def _ratio(wrong: float, total: float) -> float:
    error = (wrong / total) ** 0.5 if total else float("inf")
    return error if error == error else float("inf")
