"""float8: which layers compute in it, in place, and what is refused.

torchao is an extra and its kernels want a GPU, so but for the last test a stand-in plays its one function
that is used, as torchao 0.18 has it: a linear layer goes in, another module with the same parameters
comes out.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.distributed import parallelize_model, plan_parallelism, prepare_fully_shard
from composer_dist.errors import ParallelismValueError
from tests.kit.quantized import Float8Block, Float8Linear, float8_torchao

pytestmark = pytest.mark.promise(88)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Float8Block(), Float8Block()])
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()


LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


@pytest.fixture
def torchao() -> Iterator[None]:
    """A machine that can compute in float8."""
    with float8_torchao():
        yield


def test_the_plan_lists_the_layers_wherever_it_is_made() -> None:
    config = ParallelismConfig(compile={"backend": "eager"})
    plan = plan_parallelism(Model(), config, precision="amp_fp8")
    assert plan.float8 == LINEARS
    assert "It computes in float8" in plan.explain("layers.0.up")
    assert "float8" not in plan.explain("head")
    assert "float8: 4 linear layers" in str(plan)
    assert plan.warnings == ()
    assert plan_parallelism(Model(), config, precision="amp_bf16").float8 == ()


@pytest.mark.usefixtures("torchao")
def test_float8_uncompiled_is_warned_about() -> None:
    plan = plan_parallelism(Model(), "fsdp", precision="amp_fp8")
    assert plan.warnings == ("float8 without torch.compile is slower than amp_bf16; set compile=True.",)


@pytest.mark.usefixtures("torchao")
def test_a_model_without_such_layers_is_refused() -> None:
    small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ParallelismValueError, match="nn.Linear in the model's blocks .* multiples of 16"):
        plan_parallelism(small, "fsdp", precision="amp_fp8")


def test_what_is_missing_is_named_and_nothing_changes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model()
    with pytest.raises(
        ParallelismValueError, match="'amp_fp8' cannot run here: .*'cpu', not on a CUDA device"
    ):
        parallelize_model(model, "fsdp", precision="amp_fp8")
    assert {type(module) for module in model.modules()} >= {nn.Linear, Float8Block, Model}
    model(torch.randn(2, 16))


@pytest.mark.usefixtures("torchao")
@pytest.mark.filterwarnings("ignore:float8 without torch.compile")
@pytest.mark.parametrize("ac", [None, "selective"])
def test_layers_are_converted_in_place(ac: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model()
    reference = copy.deepcopy(model).bfloat16()
    linear, names = model.layers[0].up, [name for name, _ in model.named_parameters()]
    seen: list[nn.Module] = []
    linear.register_forward_hook(lambda module, args, output: seen.append(module))
    config = ParallelismConfig(activation_checkpointing=ac, fsdp2=FSDP2Config())
    parallelize_model(model, config, precision="amp_fp8")
    assert model.layers[0].up is linear
    assert [name for name, _ in model.named_parameters()] == names
    converted = [isinstance(module, Float8Linear) for module in model.layers[1].children()]
    assert converted == [True, True, False, False]
    x = torch.randn(4, 16)
    outputs = [model(x), reference(x.bfloat16())]
    for output in outputs:
        output.float().square().mean().backward()
    assert seen == [linear] * (2 if ac else 1)
    assert not torch.equal(*outputs), "the matrix products are rounded to float8"
    torch.testing.assert_close(*outputs, rtol=0.1, atol=0.1)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if "quantized" not in name:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.float(), rtol=0.2, atol=0.05)


@pytest.mark.usefixtures("torchao")
@pytest.mark.promise(87)
def test_prepare_fully_shard_converts_layers_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model()
    plan = prepare_fully_shard(model, ParallelismConfig(compile={"backend": "eager"}), precision="amp_fp8")
    assert plan.float8 == LINEARS
    assert [isinstance(model.get_submodule(name), Float8Linear) for name in LINEARS] == [True] * 4
    assert type(model.head) is nn.Linear


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
def test_torchao_trains_in_float8() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = Model().cuda()
    reference = copy.deepcopy(model)
    done = parallelize_model(model, ParallelismConfig(compile=True), precision="amp_fp8")
    assert done.plan.float8 == LINEARS
    x = torch.randn(64, 16, device="cuda")
    torch.testing.assert_close(model(x).float(), reference(x), rtol=0.1, atol=0.1)
