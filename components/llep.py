"""Routed experts whose rows are spread evenly over the ranks, whatever the router does."""

from dataclasses import dataclass

from components.expert_dispatch.balanced_experts import balanced_experts
from components.expert_dispatch.planned import PlannedExperts
from components.titan.plan import RunPlan


class Llep(PlannedExperts):
    """Let no rank compute many more rows than the others: those of experts that are chosen most go
    to other ranks, with a copy of the experts' weights.

    Every layer and pass, ranks tell each other how many rows each expert has (one exchange), make
    the same plan, and copy weights. Each rank's rows, and with them its memory and its time, are
    the mean, up to ``capacity_factor`` or ``threshold``. The experts keep their tokens, weights and
    expert ids alone; backward copies weights again, runs the experts once more without their last
    product, and sends the gradients of copies home in float32. Exact up to rounding.

    All tokens of a layer go at once: ``components.pipelined_llep`` is the same in chunks. With
    ``components.layer_recompute`` the experts run no more often than without.
    """

    name = "llep"
    summary = "busy experts' rows and weight copies go to idle ranks; every rank computes the mean"
    source = "arXiv 2601.17111"
    # It would run the experts, and every exchange, a third time: it knows no kept outputs.
    excludes = ("full_recompute", "pipelined_llep", "sequence_chunked_moe")

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedExperts.Config):
        pass

    config: Config

    def apply(self, plan: RunPlan) -> None:
        config = self.config
        plan.override(
            self.name,
            balanced_experts,
            capacity_factor=config.capacity_factor,
            minimum_rows=config.minimum_rows,
            threshold=config.threshold,
        )
