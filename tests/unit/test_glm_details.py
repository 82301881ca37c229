"""Details of GLM-5.3-Flash that no comparison with transformers sees."""

import json

import pytest
import torch
import torch.nn.functional as F
from torchtitan.protocols.sharding import ShardingConfig

from components.core.base import Target
from components.models.glm_flash.flops import training_flops_per_token
from components.models.glm_flash.hyper_connections import MixAffine
from components.models.glm_flash.indexer_loss import IndexerLoss
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.mla import SparseMLA
from components.models.glm_flash.sharding import set_sharding
from components.models.glm_flash.short_conv import ShortConv
from components.titan.build import prepare
from components.titan.checkpoint import RunCheckpoints
from components.titan.trainer import RecipeTrainer
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.rundir import RunDir
from launch.summary import memory_terms
from tests.training import metrics, small_overrides, train, write_corpus
from tests.unit.models_support import tiny_glm

ON = ["components.indexer_training.enabled=true"]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("indexers") / "corpus")
    return [*small_overrides(corpus), "model=glm_flash_tiny", "model.index_topk=16"]


def test_the_loss_of_every_sparse_layer_has_that_layers_scales(tmp_path, overrides):
    changes = [
        "components.indexer_training.coefficient=0.5",
        "components.indexer_training.support=visible",
        "training.global_batch_size=6",
    ]
    recipe = load_recipe(RECIPES / "quickstart.yaml", [*overrides, *ON, *changes]).recipe
    run = prepare(recipe, tmp_path, "cpu", 1)
    losses = [
        layer.attention.indexer_loss
        for layer in run.config.model_spec.model.layers
        if isinstance(layer.attention, SparseMLA.Config)
    ]
    # 6 sequences of 128 tokens per step; heads of 32 in the attention, of 16 in the indexer.
    assert losses == [
        IndexerLoss.Config(
            coefficient=0.5,
            tokens=768,
            support="visible",
            kpool=4,
            scale=32**-0.5,
            index_scale=16**-0.5,
        )
    ]


def test_the_divergence_is_a_mean_over_tokens_passes_and_layers(tmp_path, overrides):
    settings = [
        *overrides,
        *ON,
        "components.indexer_training.coefficient=0.25",
        "model.layer_types=[dsa,kda,kda,dsa]",
        "training.steps=1",
    ]
    kept = {}

    def use(trainer: RecipeTrainer):
        from components.models.glm_flash import indexer_loss

        real, sums = indexer_loss.indexer_kl, []

        def watched(*args):
            loss = real(*args)
            sums.append(float(loss.detach()))
            return loss

        indexer_loss.indexer_kl = watched
        try:
            trainer.train()
        finally:
            indexer_loss.indexer_kl = real
        kept["expected"] = sum(sums) / (4 * 128) / 2
        kept["calls"] = len(sums)

    train(tmp_path, [*settings, "training.global_batch_size=4"], use=use)
    (found,) = [line["indexer/kl"] for line in metrics(tmp_path) if "indexer/kl" in line]
    assert kept["calls"] == 4
    assert found == pytest.approx(kept["expected"], rel=1e-5)


def test_evaluation_adds_nothing_to_the_divergence(tmp_path, overrides):
    recipe = load_recipe(RECIPES / "quickstart.yaml", [*overrides, *ON]).recipe
    model = prepare(recipe, tmp_path, "cpu", 1).config.model_spec.model.build()
    model.init_states()
    (loss,) = [m for m in model.modules() if isinstance(m, IndexerLoss)]
    model.eval()
    model(torch.arange(64).unsqueeze(0)).sum().backward()
    assert loss.divergence is None
    model.train()
    with torch.no_grad():
        model(torch.arange(64).unsqueeze(0))
    assert loss.divergence is None
    model(torch.arange(64).unsqueeze(0)).sum().backward()
    assert loss.divergence > 0


def test_a_model_built_in_bfloat16_keeps_its_float32_parameters():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = tiny_glm().build_spec().model.build()
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        kept = isinstance(module, KdaCore | MixAffine | ShortConv)
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_initial_values():
    model = tiny_glm(init_std=0.05).build_spec().model.build()
    torch.manual_seed(0)
    model.init_states()
    p = dict(model.named_parameters())
    assert not p["layers.0.attention.core.A_log"].any()
    step = F.softplus(p["layers.0.attention.core.dt_bias"])
    assert 1e-3 * 0.99 < step.min() < 2e-3 and 0.05 < step.max() < 0.1 * 1.01
    assert (p["layers.3.attention.indexer.compress_gate"] == 1).all()
    assert not p["layers.3.attention.indexer.compress_ape"].any()
    assert not p["layers.0.attention_hc.affine.base"].any()
    assert (p["layers.0.attention_hc.affine.scale"] == 1).all()
    for name in ("attention.q_proj.weight", "attention_hc.fn", "feed_forward.w1.weight"):
        assert p[f"layers.0.{name}"].std().item() == pytest.approx(0.05, rel=0.05), name


def test_the_indexers_layer_norm_has_its_own_eps():
    model = tiny_glm(norm_eps=1e-3).build_spec().model
    assert [
        layer.attention.indexer.k_norm.eps
        for layer in model.layers
        if isinstance(layer.attention, SparseMLA.Config)
    ] == [1e-6]


def test_flops_of_one_layer_of_each_kind_to_the_unit():
    settings = tiny_glm(n_layers=2, layer_types=["kda", "dsa"], n_dense_layers=1, index_topk=8,
                        n_shared_experts=1, expert_hidden_dim=128, top_k=2)  # fmt: skip
    model = settings.build_spec().model
    length, width, low = 50, 128, 32
    kda = 2 * (4 * width * width + 2 * (width * low + low * width) + width * 4)
    kda += 3 * 2 * width * 4 + 4 * (10 * 64 * low + 6 * low * low + 64 * 64 * 2 / 3)
    keys = sum(4 * min(2, (t + 1) // 4) + (t + 1) % 4 for t in range(length)) / length
    mla = (
        2 * (width * 64 + 64 * 4 * 32 + width * 32 + 32 * 4 * 64 + 4 * 32 * width)
        + 4 * 4 * 32 * keys
    )
    indexer = 2 * (64 * 8 * 16 + 2 * width * 16 + width * 8) + 2 * 8 * 16 * length / 2 / 4
    dense, experts = 6 * width * 256, 6 * width * 128 * 3 + 2 * width * 8
    sites = 4 * (2 * 24 * 4 * width + 2 * width * 24)
    head = 2 * width * 320
    expected = 3 * (kda + mla + dense + experts + sites + head) + indexer
    found = training_flops_per_token(model, length)
    assert found == pytest.approx(expected, rel=3e-5), (found, expected)


def test_forced_balance_gives_every_expert_as_many_tokens(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    changes = ["model=glm_flash_tiny", "debug.moe_force_load_balance=true",
               "metrics.expert_load=true", "training.steps=1"]  # fmt: skip
    train(tmp_path / "run", [*small_overrides(corpus), *changes])
    line = json.loads((tmp_path / "run/expert_load.jsonl").read_text().splitlines()[0])
    counts = [c for name, c in line.items() if name != "step"]
    assert len(counts) == 3 and all(c == [2 * 128 * 2 // 8] * 8 for c in counts)


def test_the_parameter_count_is_that_of_the_built_model():
    config = tiny_glm().build_spec().model
    built = config.build()
    count, _ = config.get_nparams_and_flops(built, 64)
    assert count == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("train", ["backbone", "everything", "indexers"])
def test_flops_follow_what_is_trained(train):
    config = tiny_glm().build_spec().model
    once = training_flops_per_token(config, 64)
    config.train = train
    found = training_flops_per_token(config, 64)
    assert (found > once, found < once) == (train == "everything", train == "indexers")


def test_a_sharding_config_that_is_there_stays():
    config = tiny_glm().build_spec().model
    mine = ShardingConfig(state_shardings={})
    config.layers[0].attention.q_proj.sharding_config = mine
    set_sharding(config, expert_parallel=False)
    assert config.layers[0].attention.q_proj.sharding_config is mine
    assert config.layers[0].attention.k_proj.sharding_config is not None


def test_load_is_the_same_with_recomputation_also_where_nothing_is_recomputed(tmp_path, overrides):
    """With frozen layers, those below the first trained one are not computed again in backward."""
    only = [*ON, "components.indexer_training.only=true", "metrics.expert_load=true"]
    lines = []
    for recompute in ("false", "true"):
        settings = [*overrides, *only, f"components.full_recompute.enabled={recompute}"]
        train(tmp_path / recompute, [*settings, "training.steps=1"])
        lines.append(json.loads((tmp_path / recompute / "expert_load.jsonl").read_text()))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("later", [ON, [*ON, "components.indexer_training.only=true"]])
def test_a_checkpoint_with_other_frozen_parameters_is_refused_with_the_way_out(
    tmp_path, overrides, later
):
    first = [*overrides, "training.steps=1", "checkpoint.interval=1"]
    train(tmp_path / "first", first)
    load = f"checkpoint.initial_load_path='{tmp_path}/first/checkpoint/step-1'"
    second = [*overrides, *later, "training.steps=2", load]
    with pytest.raises(ValueError, match="no optimizer state.*indexer.*initial_load_model_only"):
        train(tmp_path / "second", second)
    train(tmp_path / "third", [*second, "checkpoint.initial_load_model_only=true"])


def test_relative_paths_of_weights_are_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunCheckpoints.Config(initial_load_path="runs/step-2")
    assert config.initial_load_path == str(tmp_path / "runs/step-2")
    remote = RunCheckpoints.Config(initial_load_path="gs://bucket/step-2")
    assert remote.initial_load_path == "gs://bucket/step-2"


def test_frozen_parameters_have_no_gradients_and_no_moments():
    stock = "components.offload_stream_adamw.enabled=false"
    overrides = [*ON, "components.indexer_training.only=true", stock]
    recipe = load_recipe(RECIPES / "glm_flash_128k_64xh200.yaml", overrides).recipe
    target = Target("cuda", 64)
    state = memory_terms(recipe, target)
    total, indexers = 313_326_799_870, 82_190_592
    device = sum(t.nbytes for t in state if "moments" in t.name)
    assert device == pytest.approx((4 * total + 12 * indexers) / 64, rel=1e-6)


def test_an_export_is_named_at_the_end(tmp_path):
    folder = tmp_path / "checkpoint/step-7"
    folder.mkdir(parents=True)
    assert RunDir(tmp_path).exports() == {}
    (folder / "model.safetensors.index.json").write_text("{}")
    assert RunDir(tmp_path).exports() == {7: folder}
    assert RunDir(tmp_path).checkpoints() == {}
