"""MoEModel: what it becomes in torchtitan, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from components.models.moe import MoEModel
from components.titan.attention import SdpaAttention
from tests.unit.models_support import tiny_moe

SEQ_LEN = 64


def build(model: MoEModel, seed: int = 0) -> Qwen3Model:
    """The initialised model on the CPU, in float32, with an attention that has a CPU backward."""
    spec = model.build_spec()
    for layer in spec.model.layers:
        layer.attention.inner_attention = SdpaAttention.Config()
    built = spec.model.build()
    torch.manual_seed(seed)
    built.init_states()
    return built


def loss_of(built: Qwen3Model) -> torch.Tensor:
    tokens = torch.randint(258, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    masks = built.get_attention_masks(positions)
    logits = built(tokens[:, :-1], positions=positions, attention_masks=masks)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softmax_scores": {"score_func": "softmax", "route_norm": False},
    "qk_norm": {"qk_norm": True},
    "shared_and_dense": {"n_shared_experts": 2, "n_dense_layers": 1, "dense_hidden_dim": 96},
    "tied": {"tie_embeddings": True},
    "wide_heads": {"head_dim": 32},
    "no_balancing": {"load_balance_coeff": None},
    "all_experts": {"top_k": 4},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_forward_and_backward_are_finite_and_reach_every_parameter(changes: dict) -> None:
    built = build(tiny_moe(**changes))
    loss = loss_of(built)
    loss.backward()
    # Fresh logits are small, so the loss starts near that of a uniform guess.
    assert loss.item() == pytest.approx(torch.tensor(320.0).log().item(), abs=0.3)
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_initialisation_is_reproducible_and_scaled_by_depth() -> None:
    first, again = build(tiny_moe(n_layers=8)), build(tiny_moe(n_layers=8))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    experts = first.layers["3"].moe.routed_experts.inner_experts
    assert experts.w1_EFD.std().item() == pytest.approx(0.02, rel=0.05)
    assert experts.w2_EDF.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert first.layers["3"].attention.wo.weight.std().item() == pytest.approx(0.005, rel=0.05)


def test_tied_embeddings_share_one_initialised_matrix() -> None:
    built = build(tiny_moe(tie_embeddings=True, init_std=0.01))
    assert built.tok_embeddings.weight is built.lm_head.weight
    assert built.lm_head.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_router_and_balancing_settings_arrive_in_torchtitan() -> None:
    model = tiny_moe(
        score_func="softmax", route_norm=False, route_scale=2.5, load_balance_coeff=0.02, top_k=3
    )
    for layer in model.build_spec().model.layers:
        router = layer.moe.router
        assert (router.num_experts, router.top_k, router.score_func) == (4, 3, "softmax")
        assert (router.route_norm, router.route_scale) == (False, 2.5)
        assert layer.moe.load_balance_coeff == 0.02
        assert layer.moe.num_experts == 4
        assert layer.moe.shared_experts is None


def test_attention_settings_arrive_in_torchtitan() -> None:
    model = tiny_moe(rope_theta=500_000.0, max_seq_len=4096, qk_norm=True, norm_eps=1e-5)
    config = model.build_spec().model
    assert config.max_seq_len == 4096
    for layer in config.layers:
        attention = layer.attention
        assert (attention.n_heads, attention.n_kv_heads, attention.head_dim) == (4, 2, 16)
        assert (attention.rope.dim, attention.rope.theta) == (16, 500_000.0)
        assert (attention.qk_norm.normalized_shape, attention.qk_norm.eps) == (16, 1e-5)
    assert tiny_moe().build_spec().model.layers[0].attention.qk_norm is None


def test_layers_do_not_share_configurations() -> None:
    # torchtitan edits layer configurations in place, each on its own.
    layers = tiny_moe().build_spec().model.layers
    assert layers[0].attention.inner_attention is not layers[1].attention.inner_attention
    assert layers[0].moe.router is not layers[1].moe.router


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("auto", FlexAttention.Config),
        ("flex", FlexAttention.Config),
        ("sdpa", FlexAttention.Config),
        ("varlen", VarlenAttention.Config),
    ],
)
def test_the_inner_attention_is_the_one_asked_for(attention: Any, expected: type) -> None:
    config = tiny_moe(attention=attention).build_spec().model
    assert all(type(layer.attention.inner_attention) is expected for layer in config.layers)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("standard", AllToAllTokenDispatcher.Config),
        ("deepep", DeepEPTokenDispatcher.Config),
        ("hybridep", HybridEPTokenDispatcher.Config),
        ("minimal_async_ep", MinimalAsyncEPTokenDispatcher.Config),
    ],
)
def test_the_token_dispatcher_follows_comm_backend(backend: Any, expected: type) -> None:
    layer = tiny_moe(comm_backend=backend).build_spec().model.layers[0]
    dispatcher = layer.moe.routed_experts.token_dispatcher
    assert type(dispatcher) is expected
    assert (dispatcher.num_experts, dispatcher.top_k) == (4, 2)


def test_leading_layers_are_dense() -> None:
    model = tiny_moe(n_layers=3, n_dense_layers=2, dense_hidden_dim=96, n_shared_experts=2)
    layers = model.build_spec().model.layers
    assert [layer.moe is None for layer in layers] == [True, True, False]
    assert layers[0].feed_forward.w1.out_features == 96
    assert layers[2].feed_forward is None
    assert layers[2].moe.shared_experts.w1.out_features == 2 * 64


def test_the_routing_bias_moves_towards_balance_before_each_step() -> None:
    model = tiny_moe(load_balance_coeff=0.02)
    built = build(model)
    loss_of(built)
    moe = built.layers["0"].moe
    load = moe.tokens_per_expert_E.clone()
    assert load.sum().item() == 2 * SEQ_LEN * model.top_k
    hooks: list = []
    one_rank = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
    balance = model.build_spec().post_optimizer_build_fn
    balance(SimpleNamespace(register_step_pre_hook=hooks.append), [built], one_rank)
    hooks[0]()
    step = 0.02 * torch.sign(load.mean() - load)
    assert step.abs().sum() > 0
    torch.testing.assert_close(moe.expert_bias_E, step - step.mean())
    assert moe.tokens_per_expert_E.sum().item() == 0


def test_without_balancing_there_is_no_bias_and_no_hook() -> None:
    model = tiny_moe(load_balance_coeff=None)
    built = build(model)
    assert built.layers["0"].moe.expert_bias_E is None
    hooks: list = []
    balance = model.build_spec().post_optimizer_build_fn
    balance(SimpleNamespace(register_step_pre_hook=hooks.append), [built], None)
    assert hooks == []


def test_there_is_no_hugging_face_adapter_because_torchtitans_loses_parts() -> None:
    spec = tiny_moe(n_shared_experts=1).build_spec()
    assert spec.state_dict_adapter is None
    state = build(tiny_moe(n_shared_experts=1)).state_dict()
    exported = Qwen3StateDictAdapter(spec.model, None).to_hf(state)
    assert any("expert_bias_E" in key for key in state)
    assert any("shared_experts" in key for key in state)
    assert not any("bias" in key or "shared" in key for key in exported)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no_layers": (
        {"n_layers": 0},
        "model.n_layers: 0 is too small; legal: 1 or more",
    ),
    "negative_width": (
        {"expert_hidden_dim": -8},
        "model.expert_hidden_dim: -8 is too small; legal: 1 or more",
    ),
    "negative_shared": (
        {"n_shared_experts": -1},
        "model.n_shared_experts: -1 is too small; legal: 0 or more",
    ),
    "negative_theta": (
        {"rope_theta": -1.0},
        "model.rope_theta: -1.0 is not positive; legal: above 0",
    ),
    "nan_init": (
        {"init_std": float("nan")},
        "model.init_std: nan is not positive; legal: above 0",
    ),
    "zero_balancing": (
        {"load_balance_coeff": 0.0},
        "model.load_balance_coeff: 0.0 is not positive; "
        "legal: above 0 (usually 0.001), or null for no balancing",
    ),
    "kv_heads": (
        {"n_kv_heads": 3},
        "model.n_kv_heads: 3 does not divide model.n_heads = 4; legal: 1, 2, 4",
    ),
    "odd_head": (
        {"head_dim": 33},
        "model.head_dim: 33 does not suit the rotary embedding and flex attention; "
        "legal: an even number, 16 or more",
    ),
    "small_head": (
        {"head_dim": 8},
        "model.head_dim: 8 does not suit the rotary embedding and flex attention; "
        "legal: an even number, 16 or more",
    ),
    "top_k": (
        {"top_k": 5},
        "model.top_k: 5 is more than model.n_experts = 4; legal: 1 to 4",
    ),
    "top_1_normalised": (
        {"top_k": 1},
        "model.route_norm: true with model.top_k = 1 makes every routing weight 1, so the router "
        "would learn nothing; legal: false, or model.top_k 2 or more",
    ),
    "ragged_dim": (
        {"dim": 60},
        "model.dim: 60 does not suit the experts' grouped matrix multiplication; "
        "legal: a multiple of 8, such as 56 or 64",
    ),
    "ragged_expert": (
        {"expert_hidden_dim": 4},
        "model.expert_hidden_dim: 4 does not suit the experts' grouped matrix multiplication; "
        "legal: a multiple of 8, such as 8",
    ),
    "all_dense": (
        {"n_dense_layers": 2, "dense_hidden_dim": 64},
        "model.n_dense_layers: 2 leaves no expert layer of model.n_layers = 2; legal: 0 to 1 "
        "(for a dense model see components.models.library.TitanModel)",
    ),
    "dense_without_width": (
        {"n_dense_layers": 1},
        "model.dense_hidden_dim: None with model.n_dense_layers = 1; legal: 1 or more",
    ),
    "width_without_dense": (
        {"dense_hidden_dim": 64},
        "model.dense_hidden_dim: 64 has no effect with model.n_dense_layers = 0; "
        "legal: null, or model.n_dense_layers 1 or more",
    ),
    "autotune_without_flex": (
        {"attention": "sdpa", "flex_autotune": True},
        "model.flex_autotune: true has no effect with model.attention = 'sdpa'; "
        "legal: false, or model.attention 'auto' or 'flex'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_check_names_the_key_the_value_and_what_is_legal(changes: dict, message: str) -> None:
    model = tiny_moe(**changes)
    assert [f"{key}: {text}" for key, text in model.check()] == [message]


def test_check_accepts_every_variant() -> None:
    assert all(tiny_moe(**changes).check() == [] for changes in VARIANTS.values())
    assert tiny_moe(top_k=1, route_norm=False).check() == []
    assert tiny_moe(attention="flex", flex_autotune=True).check() == []


def test_building_refuses_with_all_problems_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        tiny_moe(n_kv_heads=3, top_k=5).build_spec()
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "model.n_kv_heads",
        "model.top_k",
    ]


def test_torch_refuses_the_widths_that_check_refuses() -> None:
    experts = GroupedExperts.Config(dim=60, hidden_dim=64, num_experts=2).build()
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        experts(torch.zeros(4, 60), torch.tensor([2, 2]))


@pytest.mark.parametrize(
    ("backend", "degree", "keys"),
    [
        ("standard", 1, []),
        ("standard", 4, []),
        ("deepep", 4, []),
        ("deepep", 1, ["model.comm_backend"]),
        ("minimal_async_ep", 1, ["model.comm_backend"]),
    ],
)
def test_an_exchange_without_expert_ranks_is_refused(
    backend: Any, degree: int, keys: list[str]
) -> None:
    parallelism = SimpleNamespace(expert_parallel_degree=degree, context_parallel_degree=1)
    training = SimpleNamespace(seq_len=SEQ_LEN)
    recipe: Any = SimpleNamespace(parallelism=parallelism, training=training)
    found = tiny_moe(comm_backend=backend).check_run(recipe)
    assert [key for key, _ in found] == keys
    assert all(f"{backend!r} exchanges tokens" in message for _, message in found)
    assert all("parallelism.expert_parallel_degree 2 or more" in message for _, message in found)
