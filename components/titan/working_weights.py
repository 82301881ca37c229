"""Weights on the device in the dtype that layers compute in, for optimizers that keep fp32 masters.

FSDP gathers every weight in its mixed-precision dtype, whatever its shard is kept in. A shard kept
in that dtype already gathers the same numbers; only gradients must not follow it. FSDP casts them
to the shard's dtype after reducing them in fp32, so it is told that the shard is fp32.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def use_compute_dtypes(model: nn.Module) -> int:
    """Keep each trainable weight in the dtype that FSDP gathers it in, its gradients in float32.

    ``Parameter`` objects stay what they are: who holds one keeps the weight. Frozen weights are
    left alone, and those that FSDP does not manage as well unless their module has a
    ``working_dtype``.

    Args:
        model: after ``fully_shard`` and initialisation, before its first backward.

    Returns:
        How many weights changed their dtype.
    """
    return sum(map(_use_gathered_dtype, _groups(model))) + sum(map(_use_own_dtype, model.modules()))


def _use_gathered_dtype(group: Any) -> int:
    dtype = group.mp_policy.param_dtype
    if dtype is None:
        return 0
    cast = [sharded for sharded in _trainable(group) if sharded.sharded_param.dtype != dtype]
    for sharded in cast:
        _cast(sharded.sharded_param, dtype)
        sharded.reset_sharded_param()
    if cast:
        _expect_float32_gradients(group)
    return len(cast)


def _use_own_dtype(module: nn.Module) -> int:
    dtype = getattr(module, "working_dtype", None)
    if not isinstance(dtype, torch.dtype):
        return 0
    own = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dtype != dtype]
    for parameter in own:
        _cast(parameter, dtype)
    return len(own)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=True)
    vars(cast).update(vars(parameter))
    torch.utils.swap_tensors(parameter, cast)
    parameter.grad_dtype = torch.float32


def _expect_float32_gradients(group: Any) -> None:
    """FSDP settles a group's dtypes anew whenever it is told to gather it."""
    settle = group._init_mp_dtypes

    def and_reduce_to_float32() -> None:
        settle()
        group._orig_dtype = torch.float32
        _describe_gradients(group)

    group._init_mp_dtypes = and_reduce_to_float32


def _describe_gradients(group: Any) -> None:
    """Gradients take their description from FSDP's copy of the weight's."""
    for sharded in _trainable(group):
        spec = sharded._sharding_spec
        if sharded.sharded_param.grad_dtype not in (None, spec.tensor_meta.dtype):
            meta = spec.tensor_meta._replace(dtype=sharded.sharded_param.grad_dtype)
            sharded._sharding_spec = dataclasses.replace(spec, tensor_meta=meta)


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights: modules hold their shards afterwards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def restore_shards(model: nn.Module) -> None:
    """Make FSDP look again at the parameters that modules hold, after they held others."""
    for group in _groups(model):
        for sharded in group.fsdp_params:
            sharded.reset_sharded_param()
        _describe_gradients(group)


def _trainable(group: Any) -> list[Any]:
    return [sharded for sharded in group.fsdp_params if sharded.sharded_param.requires_grad]


def _groups(model: nn.Module) -> Iterator[Any]:
    """FSDP's groups of parameters, each once: several modules can share one."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group
