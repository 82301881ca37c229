"""Bytes that a layer keeps between forward and backward, by arithmetic.

T tokens of one document, compute dtype of e bytes (bfloat16 2, float32 4), numbers per token in the
symbols of ``GlmFlashModel``: D dim, n streams, m = n^2 + 2n, s Sinkhorn iterations; KDA: H heads,
d head width, Q = H d; DSA: h heads, d_q, d_v head widths, r_q, r latent widths, P = min(topk, T) /
kpool pools; F dense width; E experts, K chosen, I expert width, S = shared experts x I. Counted:
every storage that autograd saves, once, for the part that saves it first; not counted: parameters,
buffers, and what all layers share (positions of documents).

================== ======================================== =======================================
part               precision_trimming on                    off adds
================== ======================================== =======================================
mHC site, reading  nDe + 4 (2m + 3n + 1); 4m once           e < 4: 4nD and 4mnD once; 4nD; 8s n^2 +
                                                            4 (2s - 1) n - 4m
mHC site, writing  De + 4 (n + n^2)                         e < 4: n and n^2 in e instead of 4
mHC site, kernels  nDe + 4 (m + 1) and De + 4 (n + n^2); 8m the same
                   once
RMS norm of w      we                                       we + 4; without a fused norm (4 - e)w
KDA, reference     De + (3Q + 2d + H + 5Q) e, the gated     gated norm: 12Q + 4H (without fused
                   norm 2Qe; once per 1,024 tokens: 4Qd     norm 16Q + 4H) instead of 2Qe
KDA, fla           as above with, for the states, 128He     the same
                   + 12H (e = 4: 8H + 128He)
DSA                De + (r_q + r + h d_q + h d_v) e + 4P,   norms of r_q and r
                   norms of r_q and r
dense              De + 3Fe                                 3Fe
MoE, router        De + 4E + 8K + 4K + 4                    e < 4: 4D, and 4ED once
MoE, experts       (KD + 3KI) e + 24K; 4E once              3KIe
MoE, combine       KDe + 4K                                 4KD instead of KDe
MoE, shared        3Se                                      3Se
================== ======================================== =======================================

Experts that run again in backward (``components.expert_dispatch.cut``) keep the router's row, De
whatever is trimmed, 4K of weights, and the shared experts'; the rows of experts and combine are
then a chunk's.

Full recompute keeps nDe per layer. Every k layers keeps nDe per k layers, and (k - 1) nDe more
while one segment is differentiated.

Against the plan that was made before there was code (the published model, bfloat16, all sites
trimmed, fla, plain mHC where not said, bytes per token): the plan counts a mixer's input De = 8,192
at the mHC site, and is restated here with it at the mixer.

=========================== ======= ======= ==============================================
part                        planned    here difference
=========================== ======= ======= ==============================================
mHC site with the norm of u  49,256  49,476 logits twice and sigmoids are kept: 324, not 104
  with kernels               49,256  49,332 maps of the merge are kept: 180, not 104
KDA                         190,080 189,824 the gated norm keeps no statistic of its heads
DSA                         221,460  83,968 below
dense                        81,920  81,920
MoE                         186,720 251,332 below
45 layers                21,419,820 22,632,208
  without trimming                  46,032,001 (fused norms)
  full recompute          1,474,560 1,474,560
  every 7 layers            229,376   229,376 and 196,608 more while a segment is differentiated
=========================== ======= ======= ==============================================

* DSA: the kernel keeps queries, latents and pool numbers, and computes the absorbed form again. It
  keeps neither absorbed queries nor latent outputs (65,536 each), and 512 pool numbers instead of
  2,051 token numbers.
* MoE: the experts' weights meet their outputs after the down projection, as published, so KD
  outputs (65,536) are kept. Applying them before would spare that and round elsewhere. Of logits
  and scores one is kept (-1,152); orders of the rows and the weights are 228 more.
* The plan's "selective" column recomputes norms, activations and unit keys as well; whoever wants
  less than trimming leaves has layer recomputation.

fla's row is read from the source of fla-core 0.6.0 (``chunk_kda``'s save_for_backward): unit q and
k with a float32 factor each per head, v, the raw gate, beta in float32, and two matrices of 64
numbers per head. The other rows are measured to the byte in the tests.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.kda.chunked import SEGMENT
from kernels.kda.chunks import CHUNK

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel

FLA_CHUNK = 64
"""Tokens per chunk of fla's KDA."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the layers are computed.

    Attributes:
        itemsize: bytes of a number in the compute dtype.
        trimmed: sites of ``components.precision_trimming`` that are on.
        fla: whether KDA runs in fla's kernels.
        sparse_mla: what computes sparse attention; all keep the same.
        fused_norm: whether torch has a fused RMS norm on the device, as on CUDA: it keeps its input
            in its own dtype.
        fused_streams: whether kernels map, read and merge the streams.
    """

    itemsize: int
    trimmed: frozenset[str] = frozenset()
    fla: bool = False
    sparse_mla: str = "torch"
    fused_norm: bool = False
    fused_streams: bool = False

    @property
    def narrow(self) -> bool:
        """Whether a float32 copy is another tensor."""
        return self.itemsize < 4


def saved_bytes(model: "GlmFlashModel", layer: int, tokens: int, form: Form) -> dict[str, int]:
    """Bytes that layer number ``layer`` keeps for one document of ``tokens`` tokens, by part.

    Parts are named as the layer's modules; ``writes`` is what both mHC sites keep of writing.
    """
    site, norm = _site(model, tokens, form), _norm(model.dim, tokens, form)
    mixer = _kda if model.layer_types[layer] == "kda" else _dsa
    name, feed_forward = ("feed_forward", _dense) if is_dense(model, layer) else ("moe", _moe)
    return {
        "attention_hc": site,
        "attention_norm": norm,
        "attention": mixer(model, tokens, form),
        "ffn_hc": site,
        "ffn_norm": norm,
        name: feed_forward(model, tokens, form),
        "writes": 2 * _write(model, tokens, form),
    }


def is_dense(model: "GlmFlashModel", layer: int) -> bool:
    """Whether a layer has one SwiGLU in place of experts."""
    return layer < model.n_dense_layers or model.n_experts is None


def boundary_bytes(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """The residual streams between two layers."""
    return tokens * model.hc_mult * model.dim * form.itemsize


def _site(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    n, e = model.hc_mult, form.itemsize
    m, width = n * n + 2 * n, n * model.dim
    shared = 4 + 4 * m + 12 * n
    if form.fused_streams:
        return tokens * (e * width + 4 * m + 4) + 8 * m
    if "hyper_connections" in form.trimmed:
        return tokens * (e * width + shared + 4 * m) + 4 * m
    turns = 2 * model.hc_sinkhorn_iters - 1
    sinkhorn = 4 * n * n * (turns + 1) + 4 * n * turns
    copy, weight = (4 * width, 4 * m * width) if form.narrow else (0, 0)
    return tokens * (e * width + copy + 4 * width + shared + sinkhorn) + 4 * m + weight


def _write(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    n = model.hc_mult
    whole = form.fused_streams or "hyper_connections" in form.trimmed
    of_weights = 4 if whole else form.itemsize
    return tokens * (model.dim * form.itemsize + (n + n * n) * of_weights)


def _norm(width: int, tokens: int, form: Form) -> int:
    e = form.itemsize
    if "rms_norm" in form.trimmed:
        return tokens * width * e
    return tokens * (width * (e if form.fused_norm else 4) + 4 + width * e)


def _gated_norm(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    heads, width = model.kda_heads, model.kda_heads * model.kda_head_dim
    if "rms_norm" in form.trimmed:
        return tokens * 2 * width * form.itemsize
    copies = 3 if form.fused_norm else 4
    weight = 4 * model.kda_head_dim if form.narrow else 0
    return tokens * (4 * copies * width + 4 * heads) + weight


def _kda(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    e, heads, d = form.itemsize, model.kda_heads, model.kda_head_dim
    width = heads * d
    # Inputs of three convolutions, of the core (q, k, v, raw gate) and of the output projection.
    row = model.dim + 3 * width + 4 * width + width + 2 * d + heads
    return tokens * e * row + _core(model, tokens, form) + _gated_norm(model, tokens, form)


def _core(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """What the recurrence keeps beside its inputs."""
    heads, d = model.kda_heads, model.kda_head_dim
    if not form.fla:
        chunks = -(-tokens // CHUNK)
        return -(-chunks // SEGMENT) * heads * d * d * 4
    beta = 4 * heads if form.narrow else 0
    return tokens * (2 * FLA_CHUNK * heads * form.itemsize + 8 * heads + beta)


def _dsa(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    row = model.dim + model.q_lora_rank + model.kv_lora_rank
    row += model.n_heads * (model.qk_head_dim + model.v_head_dim)
    pools = min(model.index_topk, tokens) // model.index_kpool
    norms = _norm(model.q_lora_rank, tokens, form) + _norm(model.kv_lora_rank, tokens, form)
    return tokens * (row * form.itemsize + 4 * pools) + norms


def _swiglu(width: int, rows: int, form: Form) -> int:
    """Gate, up and the product; without the input."""
    return rows * width * form.itemsize * (3 if "swiglu" in form.trimmed else 6)


def _dense(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    return tokens * model.dim * form.itemsize + _swiglu(model.dense_hidden_dim, tokens, form)


def _routing(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """What the router keeps, its input in its own dtype left out."""
    assert model.n_experts is not None
    k, experts = model.top_k, model.n_experts
    total = tokens * (4 * experts + 8 * k)
    if model.route_norm:
        total += tokens * (4 * k + 4)
    if "router" not in form.trimmed and form.narrow:
        total += tokens * 4 * model.dim + 4 * experts * model.dim
    return total


def dispatched_bytes(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """Bytes that routed experts keep besides their tokens, weights and expert ids."""
    assert model.n_experts is not None
    e, k = form.itemsize, model.top_k
    # Two orders of the rows, and the places of a token's rows.
    total = tokens * (24 * k + k * model.dim * e) + 4 * model.n_experts
    total += _swiglu(model.expert_hidden_dim, tokens * k, form)
    outputs = e if "expert_combine" in form.trimmed else 4
    return total + tokens * (k * model.dim * outputs + 4 * k)


def shared_bytes(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """Bytes that shared experts keep besides their input, which the routed experts keep."""
    return _swiglu(model.n_shared_experts * model.expert_hidden_dim, tokens, form)


def moe_bytes_in_chunks(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    """Bytes that an MoE part keeps whose routed experts run a chunk of the tokens at a time."""
    shared = shared_bytes(model, tokens, form)
    weights = tokens * 4 * model.top_k
    return _routing(model, tokens, form) + tokens * model.dim * form.itemsize + weights + shared


def _moe(model: "GlmFlashModel", tokens: int, form: Form) -> int:
    total = _routing(model, tokens, form) + dispatched_bytes(model, tokens, form)
    if "router" in form.trimmed or not form.narrow or model.n_shared_experts:
        total += tokens * model.dim * form.itemsize
    return total + shared_bytes(model, tokens, form)
