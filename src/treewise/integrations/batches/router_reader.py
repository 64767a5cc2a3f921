"""The router losses of a batch as a differentiable value, for trainers that add it to a loss of their own.

Letters: T tokens of a micro-batch.
"""

import numpy as np
from torch import Tensor

from treewise.base.shapes import Float
from treewise.engine.edge_scorer import Entries, Values
from treewise.engine.values import Reader
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.router_loss import RouterLoss
from treewise.planning.plans import Plan


def router_loss_reader(router_loss: RouterLoss, plan: Plan) -> Reader:
    """Reads the router losses, one entry for each micro-batch; `router_loss_of` gives their sum."""

    def read(output: MicroBatchOutput) -> Entries:
        part = router_loss.part(output.router_logits, output.positions)
        return np.array([output.index]), {"router_loss": part[None]}

    return Reader(read, ("router_loss",), plan.num_micro_batches, reads_routers=True)


def router_loss_of(router_loss: RouterLoss, values: Values) -> Float[Tensor, ""]:
    """The router losses of a forest, a differentiable scalar, from the values of `router_loss_reader`."""
    parts = values["router_loss"].sum()
    # The first walk counts, so the parts that it gave are incomplete; the backward's walk gives the right gradients.
    return router_loss.total().to(parts) + (parts - parts.detach())
