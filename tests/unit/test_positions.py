"""Models with each position encoding: what they compute, share and keep as it was."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common import CosSinRoPE

from components.models.library import TitanModel
from components.models.moe import MoEModel
from components.models.position import LibraryPosition, Position, table_bytes
from components.titan.attention import SdpaAttention
from components.titan.position import AlibiAttention
from kernels.position.alibi import alibi_slopes
from tests.unit.models_support import tiny_moe

SEQ_LEN, TRAINED = 96, 32
STRETCHED: dict[str, Position] = {
    scaling: Position(scaling=scaling, factor=4.0, original_seq_len=TRAINED)
    for scaling in ("linear", "ntk", "yarn", "llama")
}
KINDS = STRETCHED | {
    "rope": Position(),
    "alibi": Position(kind="alibi"),
    "none": Position(kind="none"),
}


def build(model: MoEModel) -> Any:
    """The initialised model on the CPU, in float32, with an attention that has a CPU backward."""
    spec = model.build_spec()
    for layer in spec.model.layers:
        layer.attention.inner_attention = SdpaAttention.Config()
    built = spec.model.build()
    torch.manual_seed(0)
    built.init_states()
    return built


def documents() -> torch.Tensor:
    """Positions of three packed documents, (1, SEQ_LEN)."""
    return torch.cat([torch.arange(n) for n in (40, 1, SEQ_LEN - 41)])[None]


def loss_of(built: Any, seed: int = 1) -> torch.Tensor:
    tokens = torch.randint(258, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    masks = built.get_attention_masks(documents())
    logits = built(tokens[:, :-1], positions=documents(), attention_masks=masks)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("name", KINDS)
def test_every_encoding_trains_beyond_the_trained_length(name: str) -> None:
    built = build(tiny_moe(position=KINDS[name], max_seq_len=128, n_layers=1))
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-3)
    seen = []
    for _ in range(4):
        loss = loss_of(built)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert all(map(math.isfinite, seen)) and seen[-1] < seen[0]


def test_encodings_differ_where_they_should() -> None:
    found = {}
    for name, position in KINDS.items():
        found[name] = loss_of(build(tiny_moe(position=position, init_std=0.2, n_layers=1))).item()
    assert len(set(found.values())) == len(KINDS)


def test_the_default_is_torchtitans_rotary_embedding_to_the_bit() -> None:
    built = build(tiny_moe(rope_theta=5e5, max_seq_len=128))
    stock = CosSinRoPE.Config(dim=16, max_seq_len=128, theta=5e5).build()
    for layer in built.layers.values():
        assert torch.equal(layer.attention.rope.cache, stock.cache)
    spec = tiny_moe(rope_theta=5e5, max_seq_len=128).build_spec()
    for layer in spec.model.layers:
        layer.attention.inner_attention = SdpaAttention.Config()
        layer.attention.rope = CosSinRoPE.Config(dim=16, max_seq_len=128, theta=5e5)
    plain = spec.model.build()
    torch.manual_seed(0)
    plain.init_states()
    assert plain.state_dict().keys() == built.state_dict().keys()
    assert torch.equal(loss_of(plain), loss_of(built))


@pytest.mark.parametrize("name", KINDS)
def test_no_encoding_adds_to_a_checkpoint(name: str) -> None:
    assert build(tiny_moe(position=KINDS[name])).state_dict().keys() == (
        build(tiny_moe()).state_dict().keys()
    )


@pytest.mark.parametrize("name", [*STRETCHED, "rope"])
def test_layers_share_one_table_also_after_the_meta_device(name: str) -> None:
    spec = tiny_moe(position=KINDS[name], max_seq_len=64, n_layers=3).build_spec()
    with torch.device("meta"):
        built = spec.model.build()
    built.to_empty(device="cpu")
    built.init_states(buffer_device=torch.device("cpu"))
    tables = [layer.attention.rope.cache for layer in built.layers.values()]
    assert len({table.data_ptr() for table in tables}) == 1
    assert tables[0].device.type == "cpu" and tables[0].isfinite().all()


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        (tiny_moe(n_layers=3), 32),
        (tiny_moe(n_layers=3, position=STRETCHED["yarn"]), 32),
        (tiny_moe(n_layers=3, position=KINDS["alibi"]), 0),
        (TitanModel(family="gpt_oss", flavor="debugmodel"), 128),
        (TitanModel(family="llama3", flavor="debugmodel"), 6 * 16),
        (TitanModel(family="qwen3", flavor="debugmodel"), 8 * 256),
    ],
    ids=["moe", "yarn", "alibi", "gpt_oss", "llama3", "qwen3"],
)
def test_the_bytes_of_tables_are_what_a_model_holds(model: Any, numbers: int) -> None:
    config = model.build_spec().model
    assert table_bytes(config, 64) == 64 * numbers * 4
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 64
    held = {}
    for layer in config.layers:
        cache = layer.attention.rope.build().cache
        # A table lives as long as some layer holds it.
        held[cache.data_ptr()] = cache
    of_tables = [c for c in held.values() if c.shape[0] == 64]
    assert sum(c.nbytes for c in of_tables) == table_bytes(config, 64)


def test_tables_of_other_settings_are_not_shared() -> None:
    shapes = {}
    for theta in (1e4, 2e4):
        for name in STRETCHED:
            model = tiny_moe(position=KINDS[name], max_seq_len=64, rope_theta=theta)
            table = build(model).layers["0"].attention.rope.cache
            shapes[theta, name] = table
    tables = [*shapes.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


@pytest.mark.parametrize("name", STRETCHED)
def test_a_factor_of_one_is_the_plain_embedding_to_the_bit(name: str) -> None:
    position = Position(scaling=KINDS[name].scaling, factor=1.0, original_seq_len=TRAINED)
    stretched = build(tiny_moe(position=position)).layers["0"].attention.rope.cache
    assert torch.equal(stretched, build(tiny_moe()).layers["0"].attention.rope.cache)


def turned(vector: torch.Tensor, position: int, rates: list[float]) -> list[complex]:
    half = len(rates)
    pairs = [complex(vector[i], vector[i + half]) for i in range(half)]
    return [z * complex(math.cos(position * r), math.sin(position * r))
            for z, r in zip(pairs, rates, strict=True)]  # fmt: skip


@pytest.mark.parametrize("width", [16, 48])
def test_scores_under_yarn_are_those_of_the_paper(width: int) -> None:
    # Far beyond the trained length; one query against one key.
    position = Position(scaling="yarn", factor=4.0, original_seq_len=TRAINED)
    model = tiny_moe(position=position, head_dim=width, max_seq_len=128, rope_theta=100.0)
    rope = build(model).layers["0"].attention.rope
    q, k = (torch.randn(1, 1, 1, width, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    at, behind = torch.tensor([[120]]), torch.tensor([[7]])
    found = float((rope(q, q, at)[0] * rope(k, k, behind)[1]).sum())
    rates = []
    for i in range(width // 2):
        rate = 100.0 ** (-2 * i / width)
        rotations = TRAINED * rate / (2 * math.pi)
        ramp = min(max((rotations - 1) / (32 - 1), 0), 1)
        rates.append(rate * ramp + rate / 4 * (1 - ramp))
    pairs = zip(turned(q.flatten(), 120, rates), turned(k.flatten(), 7, rates), strict=True)
    score = sum((a * b.conjugate()).real for a, b in pairs)
    assert found == pytest.approx(score * (0.1 * math.log(4) + 1) ** 2, rel=1e-4)


class Dense(SdpaAttention):
    """Attention in float64 with the bias matrix spelled out."""

    def forward(self, q, k, v, *, attention_masks, score_mod, scale, **others):  # type: ignore[no-untyped-def]
        heads, length = q.shape[2], q.shape[1]
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        at = torch.arange(length, dtype=torch.float64)
        slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
        scores = q @ k.mT * scale - slopes[:, None, None] * (at[:, None] - at)
        document = (documents()[0] == 0).cumsum(0)
        seen = (at[:, None] >= at) & (document[:, None] == document)
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        return (weights @ v).transpose(1, 2).float()


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_gradients_equal_an_explicit_bias_matrix(heads: int) -> None:
    grads = []
    for dense in (False, True):
        built = build(tiny_moe(position=Position(kind="alibi"), n_heads=heads, qk_norm=True))
        if dense:
            for layer in built.layers.values():
                layer.attention.inner_attention = Dense(SdpaAttention.Config())
        loss_of(built).backward()
        grads.append({n: p.grad for n, p in built.named_parameters()})
    for name, expected in grads[1].items():
        error = (grads[0][name] - expected).norm() / expected.norm()
        # Experts multiply in bf16.
        assert float(error) < (2e-2 if "experts" in name else 2e-3), name


def test_alibi_does_not_see_where_documents_start() -> None:
    built = build(tiny_moe(position=Position(kind="alibi"), n_layers=1, init_std=0.2))
    tokens = torch.randint(258, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    packed = built(tokens, documents(), built.get_attention_masks(documents()))
    alone = torch.arange(SEQ_LEN - 41)[None]
    single = built(tokens[:, 41:], alone, built.get_attention_masks(alone))
    torch.testing.assert_close(packed[:, 41:], single, rtol=2e-2, atol=2e-3)


def ranks_of(attention: AlibiAttention, degree: int) -> Iterator[torch.Tensor]:
    for rank in range(degree):
        attention._head_ranks, attention._head_rank = degree, rank
        yield attention._local_slopes()


def test_ranks_take_the_slopes_of_their_heads() -> None:
    built = build(tiny_moe(position=Position(kind="alibi"), n_heads=6))
    attention = built.layers["0"].attention
    slopes = torch.tensor(alibi_slopes(6), dtype=torch.float32)
    assert torch.equal(torch.cat([*ranks_of(attention, 2)]), slopes)
    assert torch.equal(torch.cat([*ranks_of(attention, 1)]), slopes)


def gpt_oss(**changes: Any) -> TitanModel:
    return TitanModel(family="gpt_oss", flavor="debugmodel", **changes)


def layer_of(model: TitanModel, length: int) -> Any:
    """The first attention of a model, on the CPU, with a table of ``length`` positions."""
    config = model.build_spec().model.layers[0].attention
    config.rope.max_seq_len = length
    return config.build()


def test_gpt_oss_is_the_published_model_to_the_bit_unless_it_is_stretched() -> None:
    published = CosSinRoPE.Config(
        dim=64, max_seq_len=200, theta=150_000.0, scaling="yarn", rope_factor=32,
        truncate=False, original_seq_len=4096,
    ).build()  # fmt: skip
    for position in (
        LibraryPosition(),
        LibraryPosition(scaling="yarn", factor=32, original_seq_len=4096),
    ):
        model = gpt_oss(position=position)
        attention = layer_of(model, 200)
        assert model.max_seq_len == model.build_spec().model.max_seq_len == 131_072
        assert torch.equal(attention.rope.cache, published.cache)
        assert attention.softmax_scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8)


def test_gpt_oss_stretches_its_own_yarn_further() -> None:
    position = LibraryPosition(scaling="yarn", factor=64, original_seq_len=4096)
    model = gpt_oss(position=position, rope_theta=2e5)
    assert model.check() == []
    assert model.max_seq_len == model.build_spec().model.max_seq_len == 262_144
    attention = layer_of(model, 300)
    assert attention.softmax_scale == pytest.approx((0.1 * math.log(64) + 1) ** 2 / 8)

    def bound(rotations: float) -> float:
        """The pair, as a real number, that makes so many rotations in 4096 tokens."""
        return 32 * math.log(4096 / (rotations * 2 * math.pi)) / math.log(2e5)

    first, last = bound(32), bound(1)
    for pair in (0, 9, 13, 20, 31):
        plain = 2e5 ** (-pair / 32)
        slowed = min(max((pair - first) / (last - first), 0), 1)
        rate = plain * (1 - slowed) + plain / 64 * slowed
        cosine, sine = attention.rope.cache[299, [pair, 64 + 32 + pair]].tolist()
        assert cosine == pytest.approx(math.cos(299 * rate), abs=1e-4)
        assert sine == pytest.approx(-math.sin(-299 * rate), abs=1e-4)


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk"])
def test_gpt_oss_with_another_stretch_has_no_temperature(scaling: Any) -> None:
    extended = {} if scaling == "none" else {"factor": 64.0, "original_seq_len": 4096}
    model = gpt_oss(position=LibraryPosition(scaling=scaling, **extended))
    assert model.check() == []
    assert model.max_seq_len == (262_144 if extended else 131_072)
    attention = layer_of(model, 100)
    assert attention.softmax_scale == 1 / 8
    theta = 150_000.0 * (64 ** (64 / 62) if scaling == "ntk" else 1)
    rate = theta ** (-10 / 64) / (64 if scaling == "linear" else 1)
    assert attention.rope.cache[99, 5].item() == pytest.approx(math.cos(99 * rate), abs=1e-5)
    layers = model.build_spec().model.layers
    assert layers[0].attention.rope is not layers[1].attention.rope


def test_theta_of_any_library_model() -> None:
    model = TitanModel(family="llama3", flavor="debugmodel", rope_theta=7e5)
    plain = TitanModel(family="llama3", flavor="debugmodel").build_spec().model.layers[0]
    rope = model.build_spec().model.layers[0].attention.rope
    assert type(rope) is type(plain.attention.rope)
    assert (rope.theta, plain.attention.rope.theta) == (7e5, 500_000)
