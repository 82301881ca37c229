"""Kernels of others for sparse latent attention, on the inputs of ours.

They take token ids: at most 2,051 a query, padded to a multiple of their blocks. TileLang's public
example (``examples/deepseek_v32``, 576/512) walks all 2,112 slots and gets 64 columns of zeros
beside our 512. FlashMLA and cuDNN's frontend take 512 and stop at the length of a row, so rows are
compacted for them. Ids, columns and lengths are made outside of the time.
"""

import math

import torch

from kernels.dsa.keys import selected_tokens
from kernels.sparse_mla.inputs import Inputs
from tests.benchmarks.case import Outputs, Runnable
from tests.benchmarks.fetched import Fetched
from tests.benchmarks.probes import Device

SIZE, SCALE = 4, 1 / 16
EXAMPLE_FILES = ("sparse_mla_fwd.py", "utils.py")
EXAMPLE_BACKWARD_FILES = ("sparse_mla_bwd.py", *EXAMPLE_FILES)
_ROWS = 8192
_TAIL = 64
_UNUSED_KEYS = 64


def token_ids(inputs: Inputs, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 (T, slots) flat indices of keys, -1 where unused, slots a multiple; bool: used."""
    found, open_ = [], []
    for begin in range(0, len(inputs.pools), _ROWS):
        some = inputs.rows(slice(begin, begin + _ROWS))
        tokens, used = selected_tokens(some.pools, some.position, some.start, SIZE)
        pad = (0, -tokens.shape[1] % multiple)
        tokens = torch.where(used, tokens, -1).int()
        found.append(torch.nn.functional.pad(tokens, pad, value=-1))
        open_.append(torch.nn.functional.pad(used, pad))
    return torch.cat(found), torch.cat(open_)


def compacted(inputs: Inputs, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``token_ids`` with the used ones first, in the same order; int32 (T,) how many they are."""
    ids, used = token_ids(inputs, multiple)
    for rows, open_ in zip(ids.split(_ROWS), used.split(_ROWS), strict=True):
        first = (~open_).byte().argsort(dim=1, stable=True)
        rows.copy_(rows.gather(1, first))
    return ids, used.sum(1).int()


def masked_ids(inputs: Inputs, multiple: int) -> torch.Tensor:
    """``token_ids`` for a kernel that skips keys later than the query, but reads and adds to them.

    An unused slot points at one of ``_UNUSED_KEYS`` keys after the last: in bounds, and not all at
    the same one, where the backward's atomic additions of zeros would queue.
    """
    ids, used = token_ids(inputs, multiple)
    slot = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32) % _UNUSED_KEYS
    for rows, open_ in zip(ids.split(_ROWS), used.split(_ROWS), strict=True):
        rows.copy_(torch.where(open_, rows, len(inputs.latent) + slot))
    return ids


class Padded:
    """What TileLang's example takes: a batch of one, 576 columns, one group of keys.

    Attributes:
        q: (1, T, H, 576).
        kv: (1, T + 64, 1, 576).
        ids: int32 (1, T, 1, slots).
    """

    def __init__(self, inputs: Inputs) -> None:
        pad = torch.nn.functional.pad
        self.q = pad(inputs.q, (0, _TAIL)).unsqueeze(0)
        self.kv = pad(inputs.latent, (0, _TAIL, 0, _UNUSED_KEYS))[None, :, None]
        self.ids = masked_ids(inputs, 64)[None, :, None]


def example_forward(inputs: Inputs, device: Device, fetched: Fetched) -> Runnable:
    """TileLang's ``sparse_mla_fwd_interface``; its logarithms are to the base of 2."""
    forward = fetched.load("sparse_mla_fwd.py").sparse_mla_fwd_interface
    padded = Padded(inputs)

    def call() -> Outputs:
        out, lse = forward(padded.q, padded.kv, padded.ids, sm_scale=SCALE)
        return {"out": out[0], "lse": lse[0] * math.log(2)}

    return Runnable(call=call)


def example_backward(inputs: Inputs, device: Device, fetched: Fetched) -> Runnable:
    """TileLang's ``sparse_mla_bwd``, after its own forward: gradients of keys in float32 atomics,
    handed out in bfloat16."""
    forward = fetched.load("sparse_mla_fwd.py").sparse_mla_fwd_interface
    backward = fetched.load("sparse_mla_bwd.py").sparse_mla_bwd
    padded, grad, (keys, width) = Padded(inputs), inputs.grad.unsqueeze(0), inputs.latent.shape
    out, lse = forward(padded.q, padded.kv, padded.ids, sm_scale=SCALE)

    def call() -> Outputs:
        dq, dkv = backward(padded.q, padded.kv, out, grad, padded.ids, lse, sm_scale=SCALE)
        return {"dq": dq[0, ..., :width], "dlatent": dkv[0, :keys, 0, :width]}

    return Runnable(call=call)


def flash_mla(inputs: Inputs, device: Device) -> Runnable:
    """FlashMLA's sparse prefill: 64 heads, 512 columns; natural logarithms."""
    from flash_mla import flash_mla_sparse_fwd

    ids, lengths = compacted(inputs, 128)
    ids, latent = ids.unsqueeze(1), inputs.latent.unsqueeze(1)

    def call() -> Outputs:
        out, _, lse = flash_mla_sparse_fwd(inputs.q, latent, ids, SCALE, topk_length=lengths)
        return {"out": out, "lse": lse}

    return Runnable(call=call)


def cudnn_backward(inputs: Inputs, device: Device) -> Runnable:
    """The sparse backward of cuDNN's frontend (1.32), after the forward of ours; no sink."""
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

    from kernels.sparse_mla.tilelang_forward import forward

    ids, lengths = compacted(inputs, 128)
    out, lse = forward(*inputs[:5], size=SIZE, scale=SCALE)
    sink = lse.new_full(lse.shape[1:], float("-inf"))

    def call() -> Outputs:
        got = sparse_attention_backward_wrapper(
            inputs.q, inputs.latent, out, inputs.grad, lse, sink, ids,
            softmax_scale=SCALE, topk_length=lengths,
        )  # fmt: skip
        return {"dq": got["dq"], "dlatent": got["dkv"]}

    return Runnable(call=call)
