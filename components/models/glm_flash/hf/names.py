"""What tensors are called: in the model here, in the published files, and in transformers' memory.

Three name spaces exist for one set of weights. *Native* names are this project's. *Release* names
are those of the published files: the finest cut, one tensor per expert and projection, and so the
common tongue of this package. *Memory* names are those of transformers' modules, which stack
experts and fuse the three convolutions. Every name below is a leaf: what follows
``layers.<index>.``.
"""

import re
from dataclasses import dataclass

PREFIX = "model.language_model."
"""In front of every release name but the output head's."""

HEAD = "lm_head.weight"
SCALE = "_scale_inv"
"""Ends the name of a block-scaled tensor's scales; what comes before is that tensor's name."""

_TOP = {
    "embed_tokens.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
}

_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "hc_attn_fn": "attention_hc.fn",
    "hc_attn_base": "attention_hc.affine.base",
    "hc_attn_scale": "attention_hc.affine.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.affine.base",
    "hc_ffn_scale": "ffn_hc.affine.scale",
    # Linear attention (KDA); the output projection is called the same in sparse attention.
    "self_attn.q_proj.weight": "attention.q_proj.weight",
    "self_attn.k_proj.weight": "attention.k_proj.weight",
    "self_attn.v_proj.weight": "attention.v_proj.weight",
    "self_attn.b_proj.weight": "attention.b_proj.weight",
    "self_attn.f_a_proj.weight": "attention.f_a_proj.weight",
    "self_attn.f_b_proj.weight": "attention.f_b_proj.weight",
    "self_attn.g_a_proj.weight": "attention.g_a_proj.weight",
    "self_attn.g_b_proj.weight": "attention.g_b_proj.weight",
    "self_attn.o_proj.weight": "attention.o_proj.weight",
    "self_attn.q_conv1d.weight": "attention.q_conv.weight",
    "self_attn.k_conv1d.weight": "attention.k_conv.weight",
    "self_attn.v_conv1d.weight": "attention.v_conv.weight",
    "self_attn.A_log": "attention.core.A_log",
    "self_attn.dt_bias": "attention.core.dt_bias",
    "self_attn.o_norm.weight": "attention.o_norm.weight",
    # Sparse attention: MLA and its indexer.
    "self_attn.q_a_proj.weight": "attention.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attention.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.kv_a_proj.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.kv_b_proj.weight",
    "self_attn.indexer.wq_b.weight": "attention.indexer.wq_b.weight",
    "self_attn.indexer.wk.weight": "attention.indexer.wk.weight",
    "self_attn.indexer.weights_proj.weight": "attention.indexer.weights_proj.weight",
    "self_attn.indexer.k_norm.weight": "attention.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "attention.indexer.k_norm.bias",
    "self_attn.indexer.index_kpool_compress_ape": "attention.indexer.compress_ape",
    "self_attn.indexer.index_kpool_compress_gate": "attention.indexer.compress_gate",
    # Feed-forward: dense layers, then mixture-of-experts layers.
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
}

_STACK = "moe.routed_experts.inner_experts."
# The native tensor of every expert's gate, down and up projection, stacked on a leading dimension.
_EXPERTS = {
    "gate_proj": f"{_STACK}w1_EFD",
    "down_proj": f"{_STACK}w2_EDF",
    "up_proj": f"{_STACK}w3_EFD",
}

_RENAMED_IN_MEMORY = {
    **{f"{site}_hc.{part}": f"hc_{site}_{part}"
       for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{f"self_attn.forget_gate.{part}": f"self_attn.{part}"
       for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")},
}  # fmt: skip

CONVOLUTION = "self_attn.conv1d.weight"
GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
FUSED = {
    CONVOLUTION: ("self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight",
                  "self_attn.v_conv1d.weight"),
    GATE_UP: ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    DOWN: ("mlp.experts.{}.down_proj.weight",),
}  # fmt: skip
"""Memory leaf -> the release leaves whose equal row ranges it holds, in this order. ``{}``: the
tensor has a leading expert dimension and holds them once per expert."""

# What a multi-token prediction layer holds besides an ordinary layer's tensors.
_PREDICTION = ("eh_proj.", "enorm.", "hnorm.", "shared_head.")
_VISION = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")

# Storage stays float32 whatever the rest of the model is in: bfloat16 moves their effect too far.
_FLOAT32 = (".core.A_log", ".core.dt_bias", "_conv.weight", ".affine.base", ".affine.scale",
            ".expert_bias_E")  # fmt: skip

_TO_RELEASE = {native: release for release, native in {**_TOP, **_LAYER}.items()}
_TO_RELEASE_EXPERT = {
    native: f"mlp.experts.{{}}.{projection}.weight" for projection, native in _EXPERTS.items()
}
_FUSED_IN = {part: fused for fused, parts in FUSED.items() for part in parts}
_TO_MEMORY = {release: memory for memory, release in _RENAMED_IN_MEMORY.items()}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|down_proj|up_proj)\.weight")
_EXPERT_INDEX = re.compile(r"experts\.\d+\.")
_ANY_PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?")


@dataclass(frozen=True)
class Leaf:
    """A tensor name without its prefix.

    Attributes:
        layer: index of its layer; None for the embedding, the last norm and the head.
        leaf: release spelling, or a ``FUSED`` key, or a name nobody here knows.
    """

    layer: int | None
    leaf: str

    @property
    def is_text(self) -> bool:
        """Whether the text model has such a tensor."""
        if self.layer is None:
            return self.leaf in _TOP or self.leaf == HEAD
        known = self.leaf in _LAYER or self.leaf in FUSED
        return known or _IN_EXPERT.fullmatch(self.leaf) is not None

    @property
    def is_prediction(self) -> bool:
        """Whether only a multi-token prediction layer has such a tensor."""
        return self.layer is not None and self.leaf.startswith(_PREDICTION)

    @property
    def is_vision(self) -> bool:
        """Whether it belongs to the vision tower or its projector."""
        return self.layer is None and self.leaf.startswith(_VISION)


def parse(name: str) -> Leaf:
    """Read a name of any layout, with any of the prefixes '', 'model.', 'model.language_model.'."""
    bare = _ANY_PREFIX.sub("", name)
    match = _IN_LAYER.fullmatch(bare)
    if match is None:
        return Leaf(None, name if name == HEAD else bare)
    return Leaf(int(match[1]), _RENAMED_IN_MEMORY.get(match[2], match[2]))


def release_name(leaf: Leaf, expert: int | None = None) -> str:
    """Spell a leaf in full; ``expert`` fills its ``{}``."""
    if leaf.leaf == HEAD:
        return HEAD
    layer = "" if leaf.layer is None else f"layers.{leaf.layer}."
    return PREFIX + layer + (leaf.leaf if expert is None else leaf.leaf.format(expert))


def memory_name(leaf: Leaf) -> str:
    """Spell a leaf as transformers' modules do."""
    return release_name(Leaf(leaf.layer, _TO_MEMORY.get(leaf.leaf, leaf.leaf)))


def fused_leaf(leaf: str) -> str | None:
    """The ``FUSED`` key of the tensor that a release leaf is a part of in memory, if any."""
    return _FUSED_IN.get(_EXPERT_INDEX.sub("experts.{}.", leaf))


def native_name(release: str) -> tuple[str, int | None]:
    """Native tensor that holds a release tensor, and its index there if experts are stacked.

    Raises:
        KeyError: not a release name.
    """
    leaf = parse(release)
    if leaf.layer is None:
        return (HEAD if leaf.leaf == HEAD else _TOP[leaf.leaf]), None
    match = _IN_EXPERT.fullmatch(leaf.leaf)
    if match is None:
        return f"layers.{leaf.layer}.{_LAYER[leaf.leaf]}", None
    return f"layers.{leaf.layer}.{_EXPERTS[match[2]]}", int(match[1])


def from_native(native: str) -> Leaf:
    """Release leaf of a native tensor; it has a ``{}`` for the expert where experts are stacked.

    Raises:
        KeyError: the release has no such tensor.
    """
    if native == HEAD:
        return Leaf(None, HEAD)
    match = _IN_LAYER.fullmatch(native)
    if match is None:
        return Leaf(None, _TO_RELEASE[native])
    leaf = _TO_RELEASE_EXPERT.get(match[2]) or _TO_RELEASE[match[2]]
    return Leaf(int(match[1]), leaf)


def is_stacked(native: str) -> bool:
    """Whether a native tensor holds one matrix per expert on its leading dimension."""
    return f".{_STACK}" in native


def stays_float32(native: str) -> bool:
    """Whether a native tensor is stored in float32 even where the model is in bfloat16."""
    return native.endswith(_FLOAT32)
