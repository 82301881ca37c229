"""The parts of the model that can keep less for backward, and the kernels that do."""

from types import MappingProxyType
from typing import Any

from components.models.glm_flash.experts import ClampedSwiglu
from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.norms import CastFirstRMSNorm, GatedRMSNorm
from components.models.glm_flash.router import UnroundedRouter
from components.titan.moe import UnroundedDispatcher
from components.titan.parts import Functions, with_functions
from kernels.combine import weighted_sum
from kernels.hyper_connections.mapping import project
from kernels.hyper_connections.merge import merge
from kernels.hyper_connections.read import read
from kernels.hyper_connections.sinkhorn import sinkhorn
from kernels.norms import gated_rms_norm, rms_norm
from kernels.precision import linear_accumulate
from kernels.swiglu import clamped_swiglu

SITES: MappingProxyType[str, dict[type, Functions]] = MappingProxyType(
    {
        "hyper_connections": {
            HyperConnection.Config: (
                ("project", project),
                ("sinkhorn", sinkhorn),
                ("read", read),
                ("merge", merge),
            )
        },
        "router": {UnroundedRouter.Config: (("kernel", linear_accumulate),)},
        "rms_norm": {
            CastFirstRMSNorm.Config: (("kernel", rms_norm),),
            GatedRMSNorm.Config: (("kernel", gated_rms_norm),),
        },
        "expert_combine": {UnroundedDispatcher.Config: (("kernel", weighted_sum),)},
        "swiglu": {ClampedSwiglu.Config: (("kernel", clamped_swiglu),)},
    }
)
"""Site -> type of the parts' configs -> what is put in place of their functions of these names."""


def trimmed(config: Any, kernels: Functions) -> Any:
    """The config of the same part with kernels that keep less."""
    return with_functions(config, "Trimmed", kernels)


def trim(root: Any, *sites: str) -> None:
    """Put the kernels of some sites, by default of all, into a config tree that has no run yet.

    Args:
        root: any config above the parts.
        sites: keys of ``SITES``.
    """
    for site in sites or SITES:
        for target, kernels in SITES[site].items():
            for _, config, parent, attribute in root.traverse(target):
                setattr(parent, attribute, trimmed(config, kernels))
