"""What is observed of layers does not stand in the way of compiling them."""

import pytest
import torch
import torch.nn as nn

from components.titan.expert_load import _Calls


@pytest.mark.parametrize("compiled", [True, False])
def test_counting_a_layers_calls_leaves_one_graph(compiled: bool) -> None:
    layer = nn.Linear(3, 3)
    calls = _Calls(layer)
    if compiled:
        layer.compile(fullgraph=True, backend="eager")
    x = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    assert x.grad is not None
    assert calls.take() == 1.0
