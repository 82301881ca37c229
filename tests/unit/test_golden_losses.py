"""Shipped recipes learn what they learnt when their losses were recorded."""

import pytest

from tests.golden.record import CASES, STEPS, read, run


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_on_record(case: str) -> None:
    present = run(case)
    assert len(present) == STEPS
    # Experts multiply in bf16; other processors sum in another order.
    assert present == pytest.approx(read(case), rel=2e-3)
