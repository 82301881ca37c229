"""Documents in a batch, FLOP counts, and other pieces of GLM-5.3-Flash that need no oracle."""

import pytest
import torch

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fla_kernels import fla_kda, fla_short_conv
from components.models.glm_flash.flops import mean_keys, training_flops_per_token
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.short_conv import ShortConv

ZEROS = dict.fromkeys(("A_log", "dt_bias", "weight"), torch.nn.init.zeros_)


def test_documents_begin_at_rows_and_where_positions_jump():
    positions = torch.tensor([[5, 6, 0, 1, 2], [0, 0, 1, 7, 8]])
    documents = Documents.from_positions(positions)
    assert documents.lengths == (2, 3, 1, 2, 2)
    assert documents.position.tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 0, 1]
    assert documents.start.tolist() == [0, 0, 2, 2, 2, 5, 6, 6, 8, 8]


def test_documents_from_lengths_are_the_same():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    one, other = Documents.from_positions(positions), Documents.from_lengths((3, 2, 1))
    assert one.lengths == other.lengths
    assert torch.equal(one.position, other.position) and torch.equal(one.start, other.start)


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    # Forward and backward at full size, in 1e9 per token, worked out by hand from the formulas of
    # the published shapes.
    [(2048, 105.8), (8192, 109.2), (32768, 110.3), (131072, 111.6), (262144, 113.2), (2**20, 122)],
)
def test_flops_per_token_of_the_published_model(seq_len: int, expected: float) -> None:
    found = training_flops_per_token(GlmFlashModel().build_spec().model, seq_len) / 1e9
    assert found == pytest.approx(expected, rel=1e-3)


def test_keys_per_query_are_those_that_selection_gives() -> None:
    model = GlmFlashModel(index_topk=8, index_kpool=4).build_spec().model
    mla = next(layer.attention for layer in model.layers if hasattr(layer.attention, "indexer"))
    for length in (1, 7, 11, 12, 50):
        # At most two pools of four, and the unfinished one.
        keys = [4 * min(2, (t + 1) // 4) + (t + 1) % 4 for t in range(length)]
        assert mean_keys(mla, length) == pytest.approx(sum(keys) / length, rel=0.03)


def test_pools_of_a_size_are_found_once() -> None:
    documents = Documents.from_lengths((9, 3, 8))
    assert documents.pools(4).first.tolist() == [0, 4, 12, 16]
    assert documents.pools(3).first.tolist() == [0, 3, 6, 9, 12, 15]
    assert documents.pools(4) is documents.pools(4)


def test_the_overrides_put_fla_s_kernels_in_place() -> None:
    """They run on CUDA only, and say so; the plain ones take the same tensors."""
    documents, heads = Documents.from_lengths((5,)), (5, 2, 16)
    q, k, v, gate = (torch.randn(heads) for _ in range(4))
    core = KdaCore.Config(heads=2, head_dim=16, lower_bound=-5.0, param_init=ZEROS)
    conv = ShortConv.Config(channels=32, kernel_size=4, param_init=ZEROS)
    for make in (lambda config: config, fla_kda):
        module = make(core).build()
        module.init_states()
        arguments = q, k, v, gate, torch.rand(5, 2), documents
        if make is fla_kda:
            with pytest.raises(ValueError, match="'fla' runs on CUDA only"):
                module(*arguments)
        else:
            assert module(*arguments).shape == v.shape
    with pytest.raises(ValueError, match="'fla' runs on CUDA only"):
        fla_short_conv(conv).build()(q.flatten(1), documents)
