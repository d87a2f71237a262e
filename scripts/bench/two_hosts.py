"""What the cost model says of a step on two hosts of one rank each."""

from __future__ import annotations

import torch
from workload import WORKLOADS

from hf_zero.config import ZeroConfig
from hf_zero.integrations.planning.forecasts import Job
from hf_zero.integrations.planning.times import step_time
from hf_zero.plan.forecast import Activations
from hf_zero.plan.machine import Machine

_CALL_S = 2e-4


def simulated_ms(
    model: str,
    config: ZeroConfig,
    *,
    compute_s: float,
    link_bytes_a_second: float,
    memory_bytes_a_second: float,
    delay_s: float = 0.0,
) -> float:
    """Milliseconds a step.

    Args:
        model: a name of `WORKLOADS`.
        compute_s: of forward and backward; a third of it is forward's.
        memory_bytes_a_second: at which the optimizer's step reads and writes.
        delay_s: of the link, one way.
    """
    with torch.device("meta"):
        made = WORKLOADS[model].make_model()
    job = Job(
        model=made,
        optimizers=[torch.optim.AdamW(made.parameters(), fused=True)],
        device=torch.device("cpu"),
        world_size=2,
        ranks_a_node=1,
        activations=None,
    )
    work = Activations(curve=((0, 0),), saved_bytes=0, flops=3, forward_flops=1, tokens=1, shape="")
    machine = Machine(
        nodes=2,
        ranks_a_node=1,
        flops=3 / compute_s,
        link_bytes_a_second=link_bytes_a_second,
        memory_bytes_a_second=memory_bytes_a_second,
        call_s=_CALL_S + delay_s,
    )
    return 1000 * step_time(job.layout(config), machine, work, 1).step_s
