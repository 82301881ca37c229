"""Packed documents: the native model sees a batch of them, transformers one at a time."""

from itertools import product

import pytest
import torch

from tests.glm_flash.oracle import build_reference
from tests.glm_flash.support import (
    Result,
    build_native,
    draw_cotangents,
    draw_tokens,
    gradient_errors,
    relative_error,
    restarting_positions,
    run_native,
    run_reference,
    smallest_margin,
)

# Of outputs and of gradients, as for a document alone.
TOLERANCES = ((torch.float32, 2e-5, 1e-3), (torch.float64, 1e-12, 1e-10))

GROUPS = {"index_topk": 16, "n_group": 4, "topk_group": 2}

# Documents in order, rows, and changes of the oracle. Every row ends with a document, because the
# oracle would not cut one there.
BATCHES: dict[str, tuple[list[int], int, dict[str, int]]] = {
    "one_row": ([37, 1, 64, 3, 130, 5], 1, {}),
    "two_rows": ([64, 56, 1, 3, 116], 2, {}),
    "three_rows": ([80, 4, 76, 2, 13, 65], 3, GROUPS),
    "rows_of_one_document": ([65, 65, 65], 3, {}),
    "single_tokens": ([1] * 6, 2, {}),
    "too_short_for_a_pool": ([3, 2, 1, 3, 3], 1, GROUPS),
}


def summed(results: list[Result]) -> Result:
    """All documents in one."""
    hidden, logits = (torch.cat([getattr(r, k) for r in results]) for k in ("hidden", "logits"))
    grads = {name: sum(r.grads[name] for r in results) for name in results[0].grads}
    return Result(hidden, logits, [], grads)


@pytest.mark.parametrize(("lengths", "rows", "changes"), BATCHES.values(), ids=BATCHES.keys())
def test_each_document_is_computed_as_if_alone(
    lengths: list[int], rows: int, changes: dict[str, int]
) -> None:
    reference = build_reference(3, **changes)
    natives = [build_native(reference, trimmed) for trimmed in (False, True)]
    reference = reference.double()
    documents = [draw_tokens(length, seed=k) for k, length in enumerate(lengths)]
    assert min(smallest_margin(reference, tokens) for tokens in documents) > 5e-5
    pushed = [draw_cotangents(length, reference, k) for k, length in enumerate(lengths)]
    alone = [
        run_reference(reference, tokens, [t.double() for t in cotangents])
        for tokens, cotangents in zip(documents, pushed, strict=True)
    ]
    expected = summed(alone)
    cotangents = [torch.cat(parts) for parts in zip(*pushed, strict=True)]
    positions = restarting_positions(lengths, rows)

    for native, (dtype, output_error, gradient_error) in product(natives, TOLERANCES):
        native, pushes = native.to(dtype), [t.to(dtype) for t in cotangents]
        together = run_native(native, torch.cat(documents), pushes, positions)
        for name in ("hidden", "logits"):
            pairs = zip(
                *(getattr(r, name).split(lengths) for r in (together, expected)), strict=True
            )
            assert max(relative_error(*pair) for pair in pairs) < output_error
        chosen = together.pools[0].split(lengths)
        for ours, right in zip(chosen, [result.pools[0] for result in alone], strict=True):
            known = right.shape[1]
            assert torch.equal(ours[:, :known], right)
            assert not ours[:, known:].any()
        errors = gradient_errors(together, expected)
        assert {name: error for name, error in errors.items() if not error < gradient_error} == {}


def test_a_document_that_runs_over_the_end_of_a_row_begins_anew_there() -> None:
    reference = build_reference(1)
    tokens, cotangents = draw_tokens(74, 1), draw_cotangents(74, reference, 1)
    native = build_native(reference)
    counting_on = run_native(native, tokens, cotangents, torch.arange(74).view(2, 37))
    restarted = run_native(native, tokens, cotangents, restarting_positions([37, 37], 2))
    assert torch.equal(counting_on.logits, restarted.logits)


def test_rows_without_positions_are_one_document_each() -> None:
    reference = build_reference(1)
    native = build_native(reference)
    tokens = draw_tokens(74, 1).view(2, 37)
    with torch.no_grad():
        plain = native(tokens)
        explicit = native(tokens, positions=restarting_positions([37, 37], 2))
        first = native(tokens[:1])
    assert torch.equal(plain, explicit)
    torch.testing.assert_close(plain[:1], first, rtol=1e-4, atol=1e-5)
