"""AdamW with its master weights and moments in host memory.

Per parameter the host holds 12 bytes: fp32 master, exp_avg and exp_avg_sq. The device holds the
working weights, in whatever dtype they are computed with, and the gradients. A step updates buckets
of parameters in two ways at once:

- through the device: 12 bytes up, torch's fused kernel, 12 bytes down, in three lanes;
- by the CPU: 4 bytes of gradient down, torch's fused kernel there, 4 bytes of master up.

Each computes what ``torch.optim.AdamW(fused=True)`` does on fp32 parameters of its device, to
the bit. The two kernels round some values in the last place differently, so on a CUDA device a run
is repeated to the bit at one fixed ``split`` alone; a measured one can be written down.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from components.core.shards import local_of
from components.offload.slabs import cpus_near
from components.streamed_adamw.engine import Engine, Report
from components.streamed_adamw.host import HostMemory, HostState, host_bytes, tile_limit
from components.streamed_adamw.lanes import Lanes
from components.streamed_adamw.layout import Layout, lay_out
from components.streamed_adamw.settings import (
    FIXED,
    check_group,
    check_parameter,
    check_plan,
)
from components.streamed_adamw.split import Measured
from components.streamed_adamw.update import Rates, Target

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadStreamAdamW(torch.optim.Optimizer):
    """See the module.

    Attributes:
        masters: parameter -> fp32 master, in host memory: a tensor like the parameter, or a DTensor
            of its mesh and placements with a local tensor on the CPU. Complete after ``step``.
        state: parameter -> {"step": fp32 () on the CPU, "exp_avg" and "exp_avg_sq": as the master}.
            There from the start and never replaced; it may be written in place between steps.
        host_bytes: what ``host`` was asked for.
        measured: what "auto" is based on; None for a split that was given.
        report: of the last step; None before it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        host: Callable[[int], HostMemory],
        bucket_parameters: int = 100_000_000,
        slots: int = 2,
        split: float | Literal["auto"] = "auto",
        threads: int = 1,
        lanes: Lanes | None = None,
    ) -> None:
        """Make the state of all parameters that require gradients; the others are never touched.

        The parameters' values become the masters. Parameters may become narrower afterwards (in
        place, such as by ``module.to``): they are the working weights.

        Args:
            params: fp32 parameters or groups of them, plain or DTensors, all on one device. Groups
                may have their own lr, betas, eps and weight_decay.
            lr: learning rate; a scheduler may change it between steps.
            betas: decay of the first and second moment.
            eps: added to the root of the second moment.
            weight_decay: decoupled, multiplied by the learning rate.
            host: bytes (at least 1) -> memory of that size, pinned where the device is a CUDA one.
                Called once.
            bucket_parameters: values that go through the device at once; a larger parameter is cut.
            slots: buckets on the device at a time.
            split: part of the values that the CPU updates, 0 to 1; "auto" measures it now.
            threads: of the CPU's updates.
            lanes: how the device is used; made for the device by default.

        Raises:
            ValueError: an argument, a group's option or a parameter is not as said above.
        """
        check_plan(bucket_parameters, slots, split, threads)
        self._complete = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "foreach": None, **FIXED})
        self._complete = True
        self._names = _names(self.param_groups)
        self._numbered = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        layout = self._laid_out()
        self.host_bytes = host_bytes(layout, bucket_parameters, split != 0)
        tile = tile_limit(layout, bucket_parameters) if split != 0 else 0
        state = HostState(host(self.host_bytes), layout, tile)
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        for number, (parameter, _) in enumerate(self._numbered):
            self.masters[parameter] = state.lodge(number, 0, parameter)
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                **{name: state.lodge(number, 1 + i, parameter) for i, name in enumerate(MOMENTS)},
            }
        device = self._device()
        self._engine = Engine(
            lanes or Lanes(device), state, layout, bucket_parameters, slots, threads,
            cpus_near(device),
        )  # fmt: skip
        self.measured: Measured | None = self._engine.measure() if split == "auto" else None
        self._engine.split(self.measured.share if self.measured else float(split))
        self.report: Report | None = None
        self.read_weights()

    @property
    def share(self) -> float:
        """Part of the values that the CPU updates."""
        return self._engine.share

    def set_share(self, share: float) -> None:
        """Change, between steps, what the CPU updates.

        Args:
            share: part of the values, 0 to 1; above 0 only where ``split`` was not 0.

        Raises:
            ValueError: it is not as said above.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share!r}; it must be a number from 0 to 1")
        self._engine.split(share)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns when masters and moments are done.

        The working weights are refreshed for whatever is asked for next on the stream in use.

        Args:
            closure: computes the loss anew, and with it the gradients.

        Raises:
            ValueError: a gradient is sparse, or of another shape or layout than its parameter;
                nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = {id(group): _rates(group) for group in self.param_groups}
        targets = {
            number: self._target(parameter, rates[id(group)])
            for number, (parameter, group) in enumerate(self._numbered)
            if parameter.grad is not None
        }
        self.report = self._engine.run(targets)
        for number, target in targets.items():
            self.state[self._numbered[number][0]]["step"].fill_(target.step)
        return loss

    @torch.no_grad()
    def read_weights(self) -> None:
        """Make the masters what the parameters are."""
        for parameter, master in self.masters.items():
            local_of(master).copy_(local_of(parameter))

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Make the parameters what the masters are, rounded to their dtype."""
        self._engine.refresh({n: _flat(p) for n, (p, _) in enumerate(self._numbered)})

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy steps, moments and groups' options in place; masters and weights stay as they are.

        Args:
            state_dict: of this class or of ``torch.optim.AdamW`` for the same parameters. DTensors
                are of this rank's layout; a parameter without state there has had no update.

        Raises:
            ValueError: other groups, or other state, than this optimizer has.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes = [[len(group["params"]) for group in each] for each in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"saved groups have {sizes[0]} parameters, these have {sizes[1]}")
        for group, saved in zip(self.param_groups, groups, strict=True):
            options = {key: value for key, value in saved.items() if key != "params"}
            check_group({**group, **options})
            group.update(options)
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                self._load(parameter, states.get(key, {}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Used while the optimizer is made.

        Raises:
            ValueError: later, because the host memory is taken by then.
        """
        if self._complete:
            raise ValueError("a streamed AdamW gets all its parameter groups when it is made")
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    def close(self) -> None:
        """End the CPU's thread; there is no further step."""
        self._engine.close()

    def _laid_out(self) -> Layout:
        device = self._device()
        for parameter, _ in self._numbered:
            check_parameter(self._names[parameter], parameter, device)
        return lay_out([local_of(parameter).numel() for parameter, _ in self._numbered])

    def _device(self) -> torch.device:
        """Of the parameters; the CPU where none is to be updated."""
        locals_ = [local_of(parameter) for parameter, _ in self._numbered]
        return locals_[0].device if locals_ else torch.device("cpu")

    def _target(self, parameter: torch.Tensor, rates: Rates) -> Target:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {self._names[parameter]} is {gradient.layout}")
        if _placed(gradient) != _placed(parameter):
            raise ValueError(
                f"the gradient of {self._names[parameter]} is {_placed(gradient)}, "
                f"the parameter {_placed(parameter)}"
            )
        return Target(
            local_of(gradient).contiguous().view(-1),
            _flat(parameter),
            int(self.state[parameter]["step"]) + 1,
            rates,
        )

    def _load(self, parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
        state = self.state.get(parameter, {})
        if saved and saved.keys() != state.keys():
            raise ValueError(
                f"saved state of {self._names[parameter]} has {sorted(saved)}, "
                f"this optimizer's has {sorted(state)}"
            )
        for key, tensor in state.items():
            if not saved:
                local_of(tensor).zero_()
            elif saved[key] is not tensor:
                if _placed(saved[key]) != _placed(tensor):
                    raise ValueError(
                        f"saved {key} of {self._names[parameter]} is {_placed(saved[key])}, "
                        f"this optimizer's {_placed(tensor)}"
                    )
                local_of(tensor).copy_(local_of(saved[key]))


def _names(groups: list[dict[str, Any]]) -> dict[torch.Tensor, str]:
    """What messages call a parameter: its name where the groups tell it."""
    return {
        parameter: group["param_names"][i] if "param_names" in group else f"group {g} parameter {i}"
        for g, group in enumerate(groups)
        for i, parameter in enumerate(group["params"])
    }


def _rates(group: Mapping[str, Any]) -> Rates:
    beta1, beta2 = group["betas"]
    numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    return Rates(*map(float, numbers))


def _placed(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, and where it is sharded the placements."""
    shape = tuple(tensor.shape)
    return (shape, tensor.placements) if isinstance(tensor, DTensor) else (shape,)


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    return local_of(parameter).view(-1)
