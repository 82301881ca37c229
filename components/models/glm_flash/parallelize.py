"""Apply tensor and expert parallelism, activation checkpointing and FSDP2 to the model."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh

from components.models.glm_flash.decoder import GlmFlashDecoder
from components.models.glm_flash.hyper_connections import MixAffine
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.short_conv import ShortConv

_FULL_PRECISION = (KdaCore, MixAffine, ShortConv)


def parallelize_glm_flash(
    model: GlmFlashDecoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> nn.Module:
    """torchtitan's ``parallelize_fn`` for this model.

    Other parallelism, and compilation, have been refused by ``GlmFlashModel.check_run``.
    """
    model.parallelize(parallel_dims)
    model.freeze()
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    mesh, dims = resolve_fsdp_mesh(parallel_dims)
    expert_mesh, expert_dims = resolve_sparse_fsdp_mesh(parallel_dims)
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
    _shard_full_precision(model, mesh, dims, reduce_dtype, offload)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=reduce_dtype,
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        edp_mesh=expert_mesh,
        dp_mesh_dims=dims,
        edp_mesh_dims=expert_dims,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    return model


def _shard_full_precision(
    model: GlmFlashDecoder,
    mesh: DeviceMesh,
    dims: DataParallelMeshDims | None,
    reduce_dtype: torch.dtype,
    offload: OffloadPolicy,
) -> None:
    """Keep a layer's float32 parameters out of the cast to the compute dtype.

    They are gathered together, about 0.4 MB per layer at full width, and stay gathered until
    backward: modules use them at several places of a layer's forward.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for layer in model.layers.values():
        modules: list[nn.Module] = [m for m in layer.modules() if isinstance(m, _FULL_PRECISION)]
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=False,
            dp_mesh_dims=dims,
        )
