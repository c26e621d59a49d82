"""FSDP2 from the plan: the prepared model is the same function, on two and four gloo ranks.

Longer than other files: all structures are compared by one function.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Shard

from composer_dist import (
    DDPConfig,
    FSDP2Config,
    MeshConfig,
    ParallelismConfig,
    ParallelismError,
    Rule,
    _torch,
)
from composer_dist.distributed import named_parameters_canonical, parallelize_model
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit import models
from tests.kit.compare import assert_same_training, fails_alike
from tests.kit.grids import in_the_default_run, slow
from tests.kit.models import batch
from tests.kit.world import on_ranks

# On a CPU the output of a biased linear layer over sequences is a view, which torch 2.13 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

Build = Callable[[], nn.Module]


def _units(build: Build, config: Any = "fsdp", **options: Any) -> tuple[list[str], list[str]]:
    """Trains beside the reference; the units, and the parameters that stayed plain."""
    done = assert_same_training(build, config, **options)
    for name, parameter in named_parameters_canonical(done.model):
        assert isinstance(parameter, DTensor) == (name not in done.plain_parameters), name
        assert done.plain_parameters.get(name, parameter) is parameter, name
    return ["+".join(unit.modules) for unit in done.plan.units], list(done.plain_parameters)


def _rules(*rules: Rule, **options: Any) -> ParallelismConfig:
    return ParallelismConfig(rules=rules, **options)


BLOCKS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.promise(22, 24, 84)
@pytest.mark.parametrize(
    ("build", "units", "plain"),
    [
        (models.M, ["", "0", "2"], []),
        (models.B, ["", *BLOCKS], []),
        (models.tied, ["", *BLOCKS], []),
        (models.mamba, ["", *BLOCKS], []),
        (models.bert, ["", *BLOCKS], []),
        (
            models.EncoderDecoder,
            ["", *(f"{h}.block.{i}" for h in ("encoder", "decoder") for i in (0, 1))],
            [],
        ),
        (models.moe, ["", *BLOCKS], []),
        (models.tied_blocks, ["", *BLOCKS], []),
        (models.parent_child, ["", *BLOCKS], []),
        (models.scalar, ["", *BLOCKS], [f"{block}.gain" for block in BLOCKS]),
        (models.non_contiguous, ["", *BLOCKS], []),
        (models.dtypes, ["", *(f"{block}{end}" for block in BLOCKS for end in ("", ".norm"))], []),
        (models.own_dtype, ["", *(f"{block}{end}" for block in BLOCKS for end in ("", ".linear"))], []),
        (models.borrowed, ["", *BLOCKS], []),
        (models.Shell, ["", "net.0", "net.2", "net.4"], []),
        (models.Composers, [""], []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@on_ranks(2)
def test_every_structure_trains_like_one_process(build: Build, units: list[str], plain: list[str]) -> None:
    assert _units(build) == (units, plain)


@pytest.mark.promise(15, 19, 22)
@pytest.mark.parametrize(
    ("build", "rules", "units", "plain"),
    [
        (models.B, [Rule("layers.0.mlp", shard=True), Rule("layers.0", shard=True)], 2, 25),
        (models.B, [Rule("layers.0", shard=True), Rule("layers.2", shard=True)], 2, 15),
        (models.B, [Rule("re:layers.*mlp", shard=True), Rule("", shard=True)], 4, 0),
        (models.tied, [Rule("embed", shard=True), Rule("head", shard=True)], 2, 32),
        (models.tied, [Rule("embed", shard=True), Rule("head", shard=True), Rule("", shard=True)], 1, 0),
        (models.EncoderDecoder, [Rule("encoder", shard=False)], 3, 21),
        (models.Composers, [Rule("m2.a", shard=True, reshard_after_forward=False)], 1, 6),
        (models.moe, [Rule(models.Mlp, shard=True), Rule("", shard=True)], 7, 0),
    ],
)
@on_ranks(2)
def test_rules_train_like_one_process(build: Build, rules: Sequence[Rule], units: int, plain: int) -> None:
    found, left = _units(build, _rules(*rules))
    assert (len(found), len(left)) == (units, plain)
    sharded = tuple(f"{rule.match}." for rule in rules if rule.shard)
    assert not any(name.startswith(sharded) for name in left)


class Rotary(nn.Module):
    """Holds buffers only, and is called by each block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, models.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def _with_rotary() -> nn.Module:
    model, rotary = models.B(), Rotary()
    for layer in model.layers:
        layer.mlp = nn.Sequential(rotary, layer.mlp)  # type: ignore[assignment]
    return model


def _repeated_block() -> nn.Module:
    model = models.B()
    model.layers.append(model.layers[0])
    return model


def _inner_layer() -> nn.Module:
    model = models.B()
    model.layers[2].mlp = model.layers[0].mlp
    return model


def _beside() -> nn.Module:
    model = models.B()
    model.net = nn.Sequential(model.embed)  # as Composer's own test models: not called under this name
    return model


DDP = ParallelismConfig(ddp=DDPConfig())
WRAPPED = ParallelismConfig(activation_checkpointing="wrapped")


@pytest.mark.promise(82)
@pytest.mark.parametrize(
    ("build", "config"),
    in_the_default_run(
        *((_with_rotary, WRAPPED), (_repeated_block, "fsdp"), (_repeated_block, DDP)),
        *((_inner_layer, "fsdp"), (_inner_layer, WRAPPED), (_beside, DDP)),
        among=itertools.product(
            (_with_rotary, _repeated_block, _inner_layer, _beside), ("fsdp", DDP, WRAPPED)
        ),
    ),
)
@on_ranks(2)
def test_one_module_under_several_names_trains_like_one_process(build: Build, config: Any) -> None:
    assert_same_training(build, config)


def _spectral() -> nn.Module:
    normalized = [nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(normalized[0], nn.Tanh(), normalized[1])


@pytest.mark.parametrize("config", ["fsdp", DDP])
@on_ranks(2)
def test_spectral_norm_with_hooks_trains_like_one_process(config: Any) -> None:
    assert_same_training(_spectral, config)


@pytest.mark.promise(14)
@on_ranks(2)
def test_a_list_stands_for_its_blocks() -> None:
    with pytest.warns(UserWarning, match="its children are used"):
        found = _units(models.B, _rules(Rule("layers", shard=True), Rule("", shard=True)))
    assert found == (["", *BLOCKS], [])


@pytest.mark.promise(22)
@on_ranks(2)
def test_nothing_is_replaced_or_renamed() -> None:
    model = models.tied()
    modules = list(model.modules())
    names = list(model.state_dict())
    parallelize_model(model, "fsdp")
    assert all(now is before for now, before in zip(model.modules(), modules, strict=True))
    assert list(model.state_dict()) == names
    assert [isinstance(m, FSDPModule) for m in (model, model.layers[1], model.norm)] == [True, True, False]
    assert isinstance(model.layers[1], models.Block)


def _shard_first(model: nn.Module) -> None:
    fully_shard(model.layers[1], mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.promise(16)
@on_ranks(2)
def test_what_the_user_has_sharded_is_left_and_the_rest_prepared() -> None:
    config = _rules(Rule(r"re:layers\.\d(\.mlp)?", shard=True), Rule("", shard=True))
    with pytest.warns(UserWarning, match=r"Already sharded, left unchanged: layers.1, layers.1.mlp\."):
        done = assert_same_training(models.B, config, first=_shard_first)
    found = [unit.name for unit in done.plan.units]
    assert found == ["", "layers.0", "layers.0.mlp", "layers.2", "layers.2.mlp"]


@pytest.mark.promise(89)
@pytest.mark.parametrize(
    ("shape", "names", "placed"),
    [
        ((2,), None, ["S(0)"]),
        slow((2,), ("a",), ["S(0)"]),
        slow((2, 2), None, ["R", "S(0)"]),
        ((2, 2), ("a", "b"), ["R", "S(0)"]),
    ],
)
@on_ranks(lambda shape, **_: math.prod(shape))
def test_a_mesh_of_the_user_s_shards_and_replicates(shape: Any, names: Any, placed: list[str]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    done = assert_same_training(models.tied, FSDP2Config(device_mesh=mesh))
    weight: Any = done.model.get_parameter("embed.weight")
    assert [str(place) for place in weight.placements] == placed
    assert weight.to_local().shape == (8, 8)


def _replicas(shards: int) -> ParallelismConfig:
    return ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=shards))


@pytest.mark.promise(24, 34, 89)
@pytest.mark.parametrize(
    ("ranks", "build", "config", "units"),
    [
        (2, models.tied, _replicas(1), 4),
        (4, models.scalar, _replicas(2), 4),
        slow(4, models.EncoderDecoder, _replicas(2), 5),
        (4, models.B, FSDP2Config(reshard_after_forward=2), 4),
    ],
)
@on_ranks("ranks")
def test_replicas_and_resharding_to_fewer_ranks(ranks: int, build: Build, config: Any, units: int) -> None:
    found, left = _units(build, config)
    assert found[0] == ""
    assert len(found) == units
    assert left == ([f"{block}.gain" for block in BLOCKS] if build is models.scalar else [])


A, B, C, PARENT = "m2.a.weight", "m2.b.weight", "m5.a.weight", "m2.weight"


@pytest.mark.promise(84)
@pytest.mark.parametrize(
    ("ties", "attributes", "chosen", "units", "plain"),
    [
        ({}, {"": True, "m2": True, "m5": True}, None, ["", "m2", "m5"], 0),
        ({}, {"": False, "m2": False, "m2.a": True}, None, ["m2.a"], 6),  # the others are averaged
        ({}, {}, ["", "m2", "m2.a", "m2.b", "m5", "m5.a", "m5.b"], ["", "m2.a", "m2.b", "m5.a", "m5.b"], 0),
        ({}, {"": False}, ["m2"], ["m2"], 4),
        # Composer refuses these; here they train like one process.
        ({B: A}, {"": True, "m2.a": True, "m2.b": True}, None, ["", "m2.a", "m2.b"], 0),
        slow({B: A}, {"": True, "m2.a": True}, None, ["", "m2.a"], 0),
        slow({B: A}, {"": True, "m2": True}, None, ["", "m2"], 0),
        slow({C: A}, {"": True, "m2": True}, None, ["", "m2"], 0),
        slow({C: A}, {"": True}, None, [""], 0),
        ({C: A}, {"": True, "m2.a": False, "m5.a": True}, None, ["", "m5.a"], 0),
        ({C: A}, {}, ["m2"], ["", "m2"], 0),
        slow({PARENT: A}, {"": True, "m2": True}, None, ["", "m2"], 0),
        ({PARENT: A}, {"": True, "m2": True, "m2.a": True}, None, ["", "m2", "m2.a"], 0),
        ({PARENT: A}, {"": True, "m2.a": True}, None, ["", "m2.a"], 0),
        ({PARENT: A, C: A}, {"": True, "m2": True}, None, ["", "m2"], 0),
    ],
)
@on_ranks(2)
def test_composer_s_wrap_attributes_and_functions(
    ties: Any, attributes: dict[str, bool], chosen: Any, units: list[str], plain: int
) -> None:
    def build() -> nn.Module:
        model = models.composers(ties)
        for name, value in attributes.items():
            model.get_submodule(name)._fsdp_wrap = value
        if chosen is not None:
            modules = {model.get_submodule(name) for name in chosen}
            model.fsdp_wrap_fn = lambda module: (
                {"reshard_after_forward": False} if module in modules else False
            )
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = assert_same_training(build, FSDP2Config(), optimizer=torch.optim.Adam)
    assert not [w for w in caught if "view" not in str(w.message)]
    assert [unit.name for unit in done.plan.units] == units
    assert len(done.plain_parameters) == plain
    for name, parameter in named_parameters_canonical(done.model):
        assert isinstance(parameter, DTensor) == (name not in done.plain_parameters), name
    for unit in done.plan.units:
        assert not (chosen and unit.name in chosen and unit.reshard_after_forward)


def _options(module: nn.Module) -> Any:
    return {"reshard_after_forward": False} if isinstance(module, models.Pair) else False


@pytest.mark.promise(84)
@pytest.mark.parametrize("policy", [_options, CustomPolicy(_options)])
@on_ranks(2)
def test_policies(policy: Any) -> None:
    done = assert_same_training(models.Composers, "fsdp", policy=policy)
    assert [unit.name for unit in done.plan.units] == ["", "m2", "m5"]
    assert not any(unit.reshard_after_forward for unit in done.plan.units)


class Stuck(nn.Module):
    """Two dtypes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.float()


def _stuck_dtype() -> nn.Module:
    return models.B(block=Stuck)


def _no(module: nn.Module) -> bool:
    return False


def _tacos(module: nn.Module) -> dict[str, bool]:
    return {"tacos": False}


APART = _rules(Rule("embed", shard=True, reshard_after_forward=False), Rule("head", shard=True))
PURE, DEFAULT, HALF = (FSDP2Config(mixed_precision=name) for name in ("PURE", "DEFAULT", "HALF"))  # type: ignore
CHECK_FN = "activation_checkpointing_check_fn"


@pytest.mark.promise(12, 22, 23, 82, 86, 88)
@pytest.mark.parametrize(
    ("build", "config", "options", "text"),
    [
        (models.B, _rules(Rule("heed", shard=True)), {}, "Did you mean 'head'"),
        (models.B, "fsdp", {"fsdp_wrap_policy": _no}, "Nothing would be sharded"),
        (models.B, "fsdp", {"fsdp_wrap_policy": _tacos}, "'tacos'"),
        (models.B, "fsdp", {CHECK_FN: _no}, CHECK_FN),
        (_stuck_dtype, "fsdp", {}, "layers.1.shift (float64)"),
        (models.tied, APART, {}, "different options"),
        (models.M, PURE, {}, "precision is None"),
        (models.M, DEFAULT, {"precision": "bf16"}, "amp_bf16"),
        (models.M, HALF, {"precision": "fp32"}, "'DEFAULT', 'PURE', 'FULL'"),
    ],
)
@on_ranks(2)
def test_refusals_come_before_anything_is_touched(
    build: Build, config: Any, options: dict[str, Any], text: str
) -> None:
    model = build()
    before = dict(model.named_parameters())
    with fails_alike(ParallelismError, text) as caught:
        parallelize_model(model, config, **options)
    assert isinstance(caught.value, KeyError if "tacos" in text else ValueError)
    assert dict(model.named_parameters()) == before
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert model(batch(model)).requires_grad


@pytest.mark.promise(29)
@pytest.mark.parametrize("cpu_offload", [True, "pageable"])
@on_ranks(2)
def test_offload_works_without_an_accelerator(cpu_offload: Any) -> None:
    done = assert_same_training(models.B, FSDP2Config(cpu_offload=cpu_offload))
    assert {str(p.device) for p in done.model.parameters()} == {"cpu"}


@pytest.mark.promise(29)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine that has no accelerator")
def test_pinning_without_an_accelerator_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ParallelismRuntimeError, match="cpu_offload='pinned'.*needs an accelerator"):
        parallelize_model(models.B(), FSDP2Config(cpu_offload="pinned"))


@pytest.mark.promise(16)
@on_ranks(2)
def test_a_model_is_prepared_once() -> None:
    model = models.M()
    parallelize_model(model, "fsdp")
    with pytest.raises(ParallelismValueError, match="already sharded"):
        parallelize_model(model, "fsdp")
    with pytest.raises(ParallelismValueError, match=r"^0 is a model that was prepared already, .* the whole"):
        parallelize_model(torch.nn.Sequential(model), "fsdp")
    model(batch(model)).mean().backward()


@on_ranks(2)
def test_shards_are_detached_as_torch_does_it() -> None:
    local = torch.arange(10.0 * (1 + dist.get_rank())).view(-1, 5)
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(
        local, mesh, [Shard(0)], shape=torch.Size((6, 5)), stride=(5, 1), run_check=False
    )
    whole.requires_grad_()
    theirs = whole.detach()
    with _torch.cheap_detach():
        ours = whole.detach()
        parameter = nn.Parameter(whole)
    assert type(ours) is DTensor
    assert (ours.shape, ours.stride(), ours.placements) == (theirs.shape, theirs.stride(), theirs.placements)
    assert not ours.requires_grad
    assert parameter.requires_grad
    version = whole._version
    ours.add_(1)
    assert whole._version == theirs._version == version + 1
    assert whole.to_local().data_ptr() == parameter.to_local().data_ptr() == local.data_ptr()
    assert torch.ops.aten.detach.default not in DTensor._op_dispatcher._custom_op_handlers


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (4, 5, 6)])
def test_strides_and_zeros_of_shards_are_torchs(shape: tuple[int, ...]) -> None:
    size, zeros = torch.Size(shape), torch.ones(3).new_zeros(2, dtype=torch.int32)
    theirs = torch.empty(3, device="meta", dtype=torch.bfloat16).new_zeros(size)
    before = _fsdp_param.make_contiguous_strides_for
    with _torch.cheap_shards():
        assert _fsdp_param.make_contiguous_strides_for(size) == before(size) == theirs.stride()
        ours = torch.empty(3, device="meta", dtype=torch.bfloat16).new_zeros(size)
        assert (ours.shape, ours.stride(), ours.dtype) == (size, theirs.stride(), torch.bfloat16)
        assert ours.is_meta
        assert torch.equal(torch.ones(3).new_zeros(2, dtype=torch.int32), zeros)
    assert _fsdp_param.make_contiguous_strides_for is before
    assert "new_zeros" not in vars(torch.Tensor)


class Spectral(nn.Module):
    """Multiplies in the frequency domain, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.gain, n=8)


@on_ranks(2)
def test_complex_parameters_beside_a_cast_need_a_unit_without_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Spectral(), nn.Linear(8, 2))
    single, x = copy.deepcopy(model), torch.randn(4, 8)
    with fails_alike(ParallelismValueError, "0.gain is complex, and", "Add Rule('0', shard=True"):
        parallelize_model(model, "fsdp", precision="amp_bf16")
    uncast = {"param_dtype": None, "reduce_dtype": None}
    parallelize_model(model, _rules(Rule("0", shard=True, mixed_precision=uncast)), precision="amp_bf16")
    for one in (model, single):
        one(x).float().sum().backward()
    found, expected = model[0].gain.grad.full_tensor(), single[0].gain.grad
    assert found.imag.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class Codes(nn.Module):
    """Sums up frozen integers, which bfloat16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.full((4, 2), 1001), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up(x), self.codes.sum()


def cast_all(param: Any, policy: Any) -> None:
    """As before torch 2.13."""
    param.orig_dtype = param.sharded_param.dtype
    param.param_dtype, param.reduce_dtype = policy.param_dtype, None


@pytest.mark.promise(88)
@pytest.mark.parametrize("older", [False, True])
@on_ranks(2)
def test_integers_are_not_cast(older: bool) -> None:
    model, real = Codes(), _fsdp_param.FSDPParam.init_dtype_attrs
    with mock.patch.object(_fsdp_param.FSDPParam, "init_dtype_attrs", cast_all if older else real):
        parallelize_model(model, ParallelismConfig(sync="rank0"), precision="amp_bf16")
        assert int(model(torch.ones(1, 4))[1]) == 8008
