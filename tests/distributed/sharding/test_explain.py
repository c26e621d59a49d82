"""What torch says about sharded parameters and dtypes, in words that name the module and the remedy."""

import copy
import pickle
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composer_dist._torch import whole_gradients
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import parallelize_model, unparallelize_model
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import close, fails, grads, weights
from tests.kit.grids import crossed
from tests.kit.huggingface import llama
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).triu())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked(linear: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(parametrizations.spectral_norm(linear), "weight", Masked())
    return linear


@pytest.mark.parametrize("of", [parametrizations.spectral_norm, parametrizations.orthogonal, masked])
@on_ranks(2)
def test_a_parametrization_with_buffers_in_low_precision_is_that_of_autocast(of: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(of(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))
    alone = copy.deepcopy(model)
    parallelize_model(model, ParallelismConfig(), precision="amp_bf16")
    x = torch.randn(8, 4)
    for one in (model, alone):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        out.float().square().mean().backward()
    expected = {name: one.grad for name, one in alone.named_parameters()}
    close(grads(model), expected, rtol=0.05, atol=2e-3)
    close(dict(model.named_buffers()), dict(alone.named_buffers()), rtol=0.05, atol=0.02)
    unparallelize_model(model)
    assert all("forward" not in vars(one) for one in model.modules())


@pytest.mark.parametrize("trained", [False, True])
@on_ranks(2)
def test_a_dtype_that_changes_after_the_preparation_is_named(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    parallelize_model(model, "fsdp")
    if trained:
        model(torch.ones(2, 4)).sum().backward()
    model.to(torch.bfloat16)
    with fails(ParallelismRuntimeError, "The dtype of parameters has changed since parallelize_model"):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_whole_state_is_refused_and_the_model_stays(assign: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    state = copy.deepcopy(model.state_dict())
    parallelize_model(model, "fsdp")
    with fails(ParallelismRuntimeError, "0.weight", "load_full_model_state(model, state)"):
        model.load_state_dict(state, assign=assign)
    model.load_state_dict(model.state_dict())
    model(torch.ones(2, 4)).sum().backward()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table)


class Cyclic(nn.Module):
    """Its state contains itself, and every block writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Filled(), Filled()])

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        state: dict[str, Any] = {"x": x, "losses": []}
        state["self"], state["list"] = state, [state]
        for block in self.blocks:
            x = block(x, state)
        return x.sum() + sum(state["losses"]), state


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        x = self.linear(x)
        state["list"][0]["self"]["losses"].append(x.square().mean())
        return x


@pytest.mark.parametrize("precision", [None, "amp_bf16"])
@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
@on_ranks(2)
def test_containers_may_contain_themselves(mode: str, precision: str | None) -> None:
    torch.manual_seed(0)
    model = Cyclic()
    alone = copy.deepcopy(model)
    parallelize_model(model, _averages(mode), precision=precision)
    for one in (model, alone):
        loss, state = one(torch.ones(2, 4))
        assert state["self"] is state
        assert len(state["losses"]) == 2
        loss.backward()
    expected = {name: one.grad for name, one in alone.named_parameters()}
    rounding = 0.05 if precision else 1e-5
    close(grads(model), expected, rtol=rounding, atol=rounding)


def test_a_recomputed_block_is_refused_a_container_that_contains_itself() -> None:
    model = Cyclic()
    parallelize_model(model, ParallelismConfig(activation_checkpointing=True))
    with fails(
        ParallelismRuntimeError, "Filled that is recomputed", "contains itself", "Remove the reference"
    ):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_a_buffer_that_is_not_cast_is_named() -> None:
    model = nn.Sequential(Table(), Table(), nn.Linear(4, 1))
    parallelize_model(model, ParallelismConfig(), precision="amp_bf16")
    with fails(ParallelismRuntimeError, "0.linear mixed dtypes: ", "not its buffers: 0.table (float32)"):
        model(torch.ones(2, 4))
    model = nn.Sequential(Table(), Table(), nn.Linear(4, 1))
    whole = {"param_dtype": "float32", "output_dtype": "bfloat16"}  # as it says
    rules = [Rule(name, mixed_precision=whole) for name in ("0", "1")]
    parallelize_model(model, ParallelismConfig(rules=rules), precision="amp_bf16")
    model(torch.ones(2, 4)).sum().backward()


def _averages(mode: str) -> ParallelismConfig:
    if mode == "ddp":
        return ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1), ddp=DDPConfig())
    if mode == "tp":
        tp = TPConfig(plan={"0.linear": "colwise_gather"})
        return ParallelismConfig(mesh=MeshConfig(tp=2, dp_shard=1), tp=tp)
    return ParallelismConfig()


@pytest.mark.parametrize("mode", ["fsdp2", "ddp", "tp"])
@on_ranks(2)
def test_averaged_weights_are_those_of_one_process_and_a_late_copy_is_refused(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Table(), Table(), nn.Linear(4, 1))
    found: list[dict[str, Tensor]] = []
    for prepared in (False, True):
        one = copy.deepcopy(model)
        averaged = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        if prepared:  # both alike, as the refusal says
            parallelize_model(one, _averages(mode))
            parallelize_model(averaged.module, _averages(mode))
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            one(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(one)
        found.append(weights(averaged.module))
        found.append({"out": averaged(torch.ones(2, 4)).detach()})
    close(found[2], found[0])
    close(found[3], found[1])
    if mode == "tp":
        close({"out": copy.deepcopy(one)(torch.ones(2, 4))}, {"out": one(torch.ones(2, 4))})
        return
    for copied in (copy.deepcopy, AveragedModel, pickle.dumps):
        with fails(
            ParallelismRuntimeError, "A prepared Sequential cannot be copied", "averaged.module, config"
        ):
            copied(one)


class Threaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        thread = Thread(target=lambda: out.append(self.linear(x)))
        thread.start()
        thread.join()
        return out[0]


@on_ranks(2)
def test_a_gradient_that_another_thread_makes_late_is_no_matter_of_no_sync() -> None:
    model = nn.Sequential(Threaded(), Threaded(), nn.Linear(4, 1))
    parallelize_model(model, ParallelismConfig())
    model(torch.ones(2, 4)).sum().backward()
    with fails(ParallelismRuntimeError, "1.linear.weight came after those of its unit", "in another thread"):
        grads(model)
    model = nn.Sequential(Threaded(), Threaded(), nn.Linear(4, 1))
    parallelize_model(model, ParallelismConfig(rules=[Rule(r"re:\d\.linear", shard=False)]))  # as it says
    model(torch.ones(2, 4)).sum().backward()
    assert len(grads(model)) == 6


class Failing(nn.Module):
    """Its backward fails between its two layers, before FSDP2 reduces anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        between.register_hook(self.fail)
        return self.second(between)

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("between the layers")


@pytest.mark.promise(118)
@on_ranks(2)
def test_a_gradient_that_a_failed_backward_leaves_cannot_be_read() -> None:
    model = Failing()
    with patch.object(whole_gradients, "forgets_iterations", False):  # as before torch 2.13
        parallelize_model(model, ParallelismConfig())
    shard, loss = model.second.weight, model(torch.ones(2, 4)).sum()
    with pytest.raises(ValueError, match="between the layers"):
        loss.backward()
    with fails(ParallelismRuntimeError, "The gradient of second.weight"):
        assert shard.grad is None


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))

    def write(self) -> None:
        self.block.weight.grad.add_(torch.ones(4, 4))

    def read(self) -> Tensor:
        return self.block.weight + torch.ones(4, 4)


@on_ranks(2)
def test_a_whole_tensor_that_meets_a_sharded_one_in_a_method_is_explained() -> None:
    model = Penalized()
    parallelize_model(model, ParallelismConfig())
    model(torch.ones(2, 4)).sum().backward()
    with fails(ParallelismRuntimeError, "The root wrote a whole tensor into a sharded", "distribute_tensor("):
        model.write()
    said = ("The root was used while its", "forward_methods=['read']", "is sharded too: distribute_tensor(")
    with fails(ParallelismRuntimeError, *said):
        model.read()


@on_ranks(2)
def test_a_method_that_needs_whole_parameters_is_explained() -> None:
    model = llama()
    parallelize_model(model, ParallelismConfig(sync="rank0"))
    for checked in (True, False):  # what transformers draws from; torch.compile ends the checks
        with patch.object(torch.distributions.Distribution, "_validate_args", checked):
            _refuses_to_resize(model)
    model(torch.ones(1, 2, dtype=torch.int64)).logits.sum().backward()
    assert grads(model).keys() == dict(model.named_parameters()).keys()


def _refuses_to_resize(model: Any) -> None:
    with fails(ParallelismRuntimeError, "of sharded parameters", "before parallelize_model (resize_tok"):
        model.resize_token_embeddings(60)
    assert len(model.model.embed_tokens.weight) == 50


@crossed({"mode": ["fsdp2", "tp"], "traced": [False, True]})
@on_ranks(2)
def test_what_torch_jit_has_compiled_is_not_cut(traced: bool, mode: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        table = torch.jit.trace(Table(), torch.ones(1, 4)) if traced else torch.jit.script(Table())
    model = nn.Sequential(table, nn.Linear(4, 1))
    with fails(ParallelismValueError, "0.linear: torch.jit has compiled", "Rule(..., shard=False)"):
        parallelize_model(model, _averages(mode))
    with fails(ParallelismValueError, "torch.jit has compiled the whole model", "nn.Sequential(model)"):
        parallelize_model(table, _averages("ddp"))
    parallelize_model(model, _averages("ddp"))
    model(torch.ones(2, 4)).sum().backward()
    assert len(grads(model)) == 4


@on_ranks(2)
def test_pruning_of_sharded_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    prune.l1_unstructured(model[0], "bias", 2)
    parallelize_model(model, ParallelismConfig())
    for apply in (
        lambda: prune.l1_unstructured(model[1], "weight", 2),
        lambda: prune.custom_from_mask(model[1], "weight", torch.ones(1, 4)),
        lambda: prune.global_unstructured([(model[1], "weight")], prune.RandomUnstructured, amount=2),
    ):
        with fails(
            ParallelismRuntimeError, "prune cannot change weight of a Linear, because it is sharded. Prune"
        ):
            apply()
    with fails(ParallelismRuntimeError, "prune cannot change bias_orig of a Linear"):
        prune.remove(model[0], "bias")
    model(torch.ones(2, 4)).sum().backward()
    unparallelize_model(model)
    prune.remove(model[0], "bias")
    assert (model[0].bias == 0).sum() == 2
