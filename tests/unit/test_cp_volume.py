"""The bytes that context parallelism sends per layer, at the published model's widths."""

import pytest

from components.context_parallel.volume import (
    EXCHANGES,
    Volume,
    dsa_volume,
    kda_volume,
    usual_exchange,
)

GLM = {"dim": 4096, "heads": 64, "head_dim": 128, "element_size": 2}


@pytest.mark.parametrize(
    ("ranks", "projections", "hidden"),
    [(2, 41_024, 16_384), (4, 61_536, 36_864), (8, 71_792, 71_680)],
)
def test_bytes_per_token_of_exchanging_projections_and_hidden_states(ranks, projections, hidden):
    def per_token(exchange):
        # As many tokens as ranks: the shares of a token are whole bytes.
        return kda_volume(exchange, tokens=ranks, ranks=ranks, **GLM).forward / ranks

    assert (per_token("projections"), per_token("hidden")) == (projections, hidden)


def test_hidden_states_are_summed_back_in_float32():
    forward, backward = kda_volume("hidden", tokens=2, ranks=2, **GLM)
    assert backward - forward == 2 * 4096 * (4 - 2)


def test_states_do_not_grow_with_tokens():
    short, long = (kda_volume("state", tokens=t, ranks=2, **GLM) for t in (8, 2**20))
    assert short == long == Volume(2 * 8_388_608, 2 * 8_388_608)
    one_part = kda_volume("state", tokens=8, ranks=2, kind="contiguous", **GLM)
    assert one_part == Volume(8_388_608, 8_388_608)


def test_keys_of_sparse_attention_take_1088_bytes_per_token():
    widths = {"kv_rank": 512, "index_dim": 128, "pool": 4, "element_size": 2}
    forward, backward = dsa_volume(tokens=4, ranks=2, **widths)
    assert forward == 4 * 1088
    assert backward == 4 * (1024 + 2048)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_sends_nothing(exchange):
    assert kda_volume(exchange, tokens=64, ranks=1, **GLM) == Volume(0, 0)


def test_few_ranks_exchange_hidden_states_and_many_states():
    assert [usual_exchange(ranks) for ranks in (1, 2, 4, 5, 8)] == [
        "hidden", "hidden", "hidden", "state", "state",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="degree: 0; legal: 1 or more"):
        usual_exchange(0)
    with pytest.raises(ValueError, match="exchange: 'q'; legal: hidden, projections, state"):
        kda_volume("q", tokens=1, ranks=2, **GLM)
