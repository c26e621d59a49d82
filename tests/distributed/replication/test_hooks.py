"""Gradients that travel compressed, on CPU as elsewhere."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.replication.hooks import plan_comm_hook, reduced_in
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit import models
from tests.kit.compare import alike
from tests.kit.meshes import mine
from tests.kit.world import on_ranks

POWER = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
POWERED = ("powersgd", "fp16(powersgd)", "bf16(powersgd)", "fp16( bf16(powersgd) )")


@pytest.mark.promise(62)
@pytest.mark.parametrize(
    ("ranks", "hook", "options", "precision", "limit"),
    [
        *[(2, hook, {}, None, 1e-2) for hook in ("fp16", "bf16", "fp16(bf16)")],
        *[(2, hook, POWER, None, 5e-2) for hook in POWERED],
        (4, "bf16", {}, "amp_bf16", 1e-2),
    ],
)
@on_ranks("ranks", gloo_threads=2)  # PowerSGD waits for a collective in one of them
def test_compressed_gradients_keep_ranks_equal_and_close_to_one_process(
    ranks: int, hook: str, options: dict[str, Any], precision: str | None, limit: float
) -> None:
    torch.manual_seed(1)
    model = models.M()
    single = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, single)]
    parallelize_model(model, DDPConfig(comm_hook=hook, comm_hook_options=options), optimizers[0], precision)
    for step in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(mine(x)).square().mean().backward()
        single(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert alike(model)
    found, expected = (nn.utils.parameters_to_vector(one.parameters()).detach() for one in (model, single))
    assert 0 < (found - expected).norm() / expected.norm() < limit


def own(state: list[int], bucket: dist.GradBucket) -> Any:  # type: ignore[name-defined]
    state.append(bucket.index())
    return reduced_in(torch.float32)(None, bucket)


del own.__annotations__["bucket"], own.__annotations__["return"]  # deferred ones, which DDP refuses


@on_ranks(2)
def test_a_function_is_a_hook_as_well() -> None:
    state: list[int] = []
    model = models.M()
    parallelize_model(model, DDPConfig(comm_hook=own, comm_hook_state=state))
    model(torch.ones(2, 8)).sum().backward()
    assert state == [0]
    late = models.M()
    parallelize_model(late, DDPConfig())
    late.register_comm_hook(state, own)  # composable replicate's way
    late(torch.ones(2, 8)).sum().backward()
    assert state == [0, 0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(
            {"comm_hook": "powersdg"},
            "no comm_hook 'powersdg'.*fp16, bf16, p.*'powersgd'",
            marks=pytest.mark.promise(62),
        ),
        ({"comm_hook": "fp16(powersgd"}, "must have the form"),
        ({"comm_hook": "powersgd(fp16)"}, "'powersgd' in .* cannot be put around"),
        ({"comm_hook": "fp16", "comm_hook_options": {"rank": 1}}, "'rank', which comm_hook='fp16'"),
        ({"comm_hook": "powersgd", "comm_hook_options": {"rank": 1}}, "It takes matrix_approximation_rank"),
        ({"comm_hook": "powersgd", "comm_hook_options": {"start_powerSGD_iter": 1}}, "_iter. > 1"),
        ({"comm_hook_options": {"rank": 1}}, "no effect without a named comm_hook"),
        ({"comm_hook": "fp16", "comm_hook_state": 1}, "is for a comm_hook that is a function"),
        ({"comm_hook": "post_local_sgd", "averaging_period": 0}, "must be a positive number of steps, not 0"),
    ],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ParallelismValueError, match=text):
        plan_comm_hook(DDPConfig(**config), None)


def test_a_hook_beside_a_reduce_dtype_and_other_kinds_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="both determine the dtype"):
        plan_comm_hook(DDPConfig(comm_hook="fp16"), torch.bfloat16)
    with pytest.raises(ParallelismTypeError, match="must be a name or a function, not int"):
        plan_comm_hook(DDPConfig(comm_hook=3), None)  # type: ignore[arg-type]
    assert plan_comm_hook(DDPConfig(comm_hook="fp16"), torch.float32)


def test_the_innermost_hook_communicates() -> None:
    local = plan_comm_hook(DDPConfig(comm_hook="fp16(post_local_sgd)", averaging_period=2), None)
    assert local.is_local_sgd
    assert local.options == {"averaging_period": 2}
    assert not plan_comm_hook(DDPConfig(comm_hook=nn.Identity()), None).is_local_sgd
