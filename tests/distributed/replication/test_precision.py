"""Mixed precision under DDP in place."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.optim import Adam

from composer_dist.distributed import parallelize_model
from tests.kit import models
from tests.kit.compare import alike, close
from tests.kit.grids import crossed
from tests.kit.meshes import ddp, mine
from tests.kit.models import M
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


@pytest.mark.promise(61)
@crossed({"precision": ["amp_bf16", "amp_fp16"], "mixed_precision": ["DEFAULT", "PURE"]})
@on_ranks(2)
def test_mixed_precision_is_autocast_with_full_parameters(precision: str, mixed_precision: str) -> None:
    torch.manual_seed(2)
    model = models.tied()
    single = copy.deepcopy(model)
    optimizers = [Adam(one.parameters(), 0.01) for one in (model, single)]
    parallelize_model(model, ddp(mixed_precision=mixed_precision), optimizers[0], precision)
    dtypes: set[torch.dtype] = set()
    model.layers[0].mlp.up.register_forward_hook(lambda m, args, out: dtypes.add(out.dtype))
    low = torch.float16 if "fp16" in precision else torch.bfloat16
    for step in range(3):
        x = models.batch(single, step)
        output = model(mine(x))
        with torch.autocast("cpu", low):
            expected = single(x)
        output.float().square().mean().backward()
        expected.float().square().mean().backward()
        found, wanted = ({n: p.grad for n, p in one.named_parameters()} for one in (model, single))
        close(found, wanted, rtol=0.1, atol=4e-3)
        assert alike(model, lambda p: p.grad)
        rounded = all(torch.equal(p.grad, p.grad.to(low).float()) for p in model.parameters())
        assert rounded == (mixed_precision == "PURE")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert dtypes == {low}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@on_ranks(2)
def test_outputs_are_cast_and_half_gradients_reduced_in_float32() -> None:
    model = M()
    mixed = {"param_dtype": "bf16", "output_dtype": "fp32"}
    parallelize_model(model, ddp(mixed_precision=mixed, activation_checkpointing=None))
    assert model(torch.ones(2, 8)).dtype is torch.float32
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 7))
    assert not torch.is_autocast_enabled("cpu")
    model(torch.ones(2, 8)).sum().backward()
    low = M().bfloat16()
    parallelize_model(low, ddp(mixed_precision={"reduce_dtype": "fp32"}))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    low(x).float().square().mean().backward()
    alone = copy.deepcopy(M().bfloat16())
    alone.load_state_dict(low.state_dict())
    alone(x).float().square().mean().backward()
    for p, q in zip(low.parameters(), alone.parameters(), strict=True):
        total = q.grad.float()
        dist.all_reduce(total)
        torch.testing.assert_close(p.grad, (total / 2).bfloat16(), rtol=0, atol=0)


@on_ranks(2)
def test_an_interrupted_forward_leaves_no_autocast_behind() -> None:
    model = M()
    parallelize_model(model, ddp(), precision="amp_bf16")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = next(iter(model.children())).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 8))
    assert not torch.is_autocast_enabled("cpu")
    handle.remove()
    assert model(torch.ones(2, 8)).dtype is torch.bfloat16
