"""Quantized weights, frozen, with trained adapters: sharded, delivered, trained, gathered and loaded.

Every test of the machinery runs on an 8-bit class of its own; those of NF4 need torchao.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import full_model_state, load_full_model_state, load_pretrained
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import (
    parallelize_model,
    plan_parallelism,
    prepare_fully_shard,
    register_tensor_codec,
    summon_full_params,
    sync_module_states,
)
from composer_dist.errors import ParallelismError, ParallelismTypeError, ParallelismValueError
from composer_dist.tensors.codec import codecs as known_codecs
from composer_dist.tensors.inner import dense, empty_like, encoded
from tests.kit.compare import close, fails, full, same
from tests.kit.grids import crossed
from tests.kit.huggingface import lora
from tests.kit.meshes import config, ddp
from tests.kit.quantized import KINDS, NF4, Adapted, Int8Rows, Stack, adam, nf4_llama, quantize
from tests.kit.toy import built, train
from tests.kit.world import on_ranks

BASE = "layers.0.base.weight"
QUANTIZED = [BASE, "layers.1.base.weight"]


def stack(kind: str, seed: int = 0, device: str = "cpu") -> Any:
    return built(lambda: Stack(kind), seed, device)


def reference(kind: str, seed: int = 0, steps: int = 0) -> dict[str, Tensor]:
    """The dense state of the unsharded model, trained on the whole batch."""
    model = stack(kind, seed)
    train(model, adam(model), steps, whole=True)
    return {name: dense(value).clone() for name, value in model.state_dict(keep_vars=True).items()}


def requantized(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Dense values after they were loaded: quantized, and that undone."""
    return {n: dense(quantize(v, kind)) if "base.weight" in n else v for n, v in state.items()}


@pytest.mark.promise(46)
@crossed(
    {
        "kind": ["int8", pytest.param("nf4", marks=NF4)],
        "others, transport, offload": [
            ("meta", "memory", False),
            ("meta", "messages", True),
            ("cpu", "auto", False),
        ],
    }
)
@on_ranks(2)
def test_it_trains_gathers_and_loads_as_the_unsharded_model(
    kind: str, others: str, transport: Any, offload: bool
) -> None:
    rank, start, other = dist.get_rank(), reference(kind), reference(kind, seed=1)
    model = stack(kind, device=others if rank else "cpu")
    optimizer = adam(model)
    parallelize_model(model, config(fsdp2=FSDP2Config(cpu_offload=offload), transport=transport), optimizer)
    weight = model.get_parameter(BASE)
    assert type(weight.to_local()).__name__ == {"int8": "Int8Rows", "nf4": "NF4Tensor"}[kind]
    assert {name: value for name, value in vars(weight).items() if name != "_is_param"} == {"tag": "frozen"}
    same(full_model_state(model, ranks="all"), start)
    train(model, optimizer)
    trained = full_model_state(model, ranks="all")
    close(trained, reference(kind, steps=2), rtol=1e-4, atol=1e-5)
    assert torch.equal(trained[BASE], start[BASE])
    assert list(full_model_state(model, select=lambda name, _: name == BASE)) == ([] if rank else [BASE])
    with summon_full_params(model, rank0_only=offload):
        if rank == 0 or not offload:
            assert torch.equal(dense(model.get_parameter(BASE)), start[BASE])
            model.get_submodule("layers.0.base").weight = nn.Parameter(-start[BASE])
    written = full_model_state(model, ranks="all")[BASE]
    assert torch.equal(written, dense(quantize(-start[BASE], kind)))
    load_full_model_state(model, {} if rank else other)
    same(full_model_state(model, ranks="all"), requantized(other, kind))
    assert isinstance(model.get_parameter(BASE), DTensor)
    model(torch.arange(4))  # gathers what was loaded


@pytest.mark.promise(46)
@KINDS
@on_ranks(2)
def test_a_state_loaded_by_every_rank_has_the_bits_of_the_single_device(kind: str) -> None:
    torch.manual_seed(5)
    weight = torch.randn(512, 512)
    expected = dense(quantize(weight, kind))
    layer: Any = nn.Linear(512, 512, bias=False)
    layer.weight = nn.Parameter(quantize(torch.eye(512), kind), requires_grad=False)
    model = nn.Sequential(layer, nn.LayerNorm(512))
    parallelize_model(model, config(sync="rank0"))
    load_full_model_state(model, {"0.weight": weight}, source="all", strict=False)
    assert torch.equal(full_model_state(model, ranks="all")["0.weight"], expected)
    assert layer.weight.to_local().shape[0] == 256
    output = nn.functional.layer_norm(expected.sum(1)[None], (512,))
    torch.testing.assert_close(model(torch.ones(1, 512)), output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "how"), [(4, "sync"), (2, "load"), (1, "load")])
@on_ranks("size")
def test_the_steps_one_by_one_on_two_replicas(size: int, how: str) -> None:
    model = stack("int8", seed=3, device="cpu" if size == 1 else "meta")
    plan = prepare_fully_shard(model, config(replicas=2 if size == 4 else 1))
    assert [name for name in plan.plain if "base" in name] == (QUANTIZED if size == 1 else [])
    dense_values = reference("int8")
    give = sync_module_states if how == "sync" else load_full_model_state
    give(model, {} if dist.get_rank() else dense_values)
    same(full_model_state(model, ranks="all"), requantized(dense_values, "int8"))
    train(model, adam(model))


@KINDS
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_files_hold_dense_values(kind: str, tmp_path: Path, size: int) -> None:
    stored = reference(kind)
    if dist.get_rank() == 0:
        save_file(stored, tmp_path / "model.safetensors")
    dist.barrier()
    model, later, bare = stack(kind, device="meta"), stack(kind, seed=1), stack(kind, device="meta")
    parallelize_model(model, config(), weights=tmp_path)
    parallelize_model(later, config())
    load_pretrained(later, tmp_path)
    load_pretrained(bare, tmp_path)  # not prepared
    assert type(bare.get_parameter(BASE)).__name__ in ("Int8Rows", "NF4Tensor")
    for one in (model, later, bare):
        same(full_model_state(one, ranks="all"), requantized(stored, kind))


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@on_ranks(2)
def test_whole_ones_are_delivered_too(strategy: str) -> None:
    model, start = stack("int8", device="meta" if dist.get_rank() else "cpu"), reference("int8")
    rules = (Rule("re:.*base", shard=False),)
    parallelize_model(model, "ddp" if strategy == "ddp" else config(rules=rules))
    weight: Any = model.get_parameter(BASE)
    assert [type(weight).__name__, weight.data8.device.type, weight.tag] == ["Int8Rows", "cpu", "frozen"]
    train(model, adam(model), steps=1)
    frozen = {name: value for name, value in full_model_state(model, ranks="all").items() if "base" in name}
    same(frozen, {name: start[name] for name in frozen})


@on_ranks(2)
def test_what_differs_between_ranks_is_named_down_to_the_inner_tensor() -> None:
    scaled, other, bare = stack("int8"), stack("int8"), stack("int8", device="meta")
    scaled.layers[0].base.weight.scales.mul_(1 + dist.get_rank())
    if dist.get_rank():
        weight = other.layers[0].base.weight
        weight.shift = weight.shift[None]
    for model, text in (
        (scaled, f"different values of {BASE}.scales."),
        (other, f"{BASE}: made of"),
        (bare, f"nothing initializes them: Linear: {BASE}, layers.1.base.weight"),
    ):
        with fails(ParallelismError, text):
            parallelize_model(model, config())
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


class Other(Int8Rows):
    """Has no codec unless a test registers one."""


class Closed(Tensor):
    """Cannot be gathered."""

    data8: Tensor

    @staticmethod
    def __new__(cls: Any, data8: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)

    def __init__(self, data8: Tensor) -> None:
        self.data8 = data8

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].data8)


def holding(weight: Tensor, requires_grad: bool = False) -> Stack:
    """A model whose first quantized weight is another one."""
    model = Stack()
    model.layers[0].base.weight = nn.Parameter(weight, requires_grad=requires_grad)  # type: ignore[union-attr]
    return model


@pytest.fixture
def codecs() -> Iterator[None]:
    """Codecs that a test registers are gone after it."""
    with mock.patch.dict(known_codecs):
        yield


def as_other(values: Tensor) -> Any:
    made = Int8Rows.of(values)
    return Other(made.data8, made.scales, made.shift)


OTHER: dict[str, Any] = {"to_dense": Int8Rows.dense, "from_dense": lambda dense, like: as_other(dense)}
SAME: dict[str, Any] = {"to_dense": lambda tensor: tensor, "from_dense": lambda dense, like: dense}
EIGHT = torch.arange(64.0).view(8, 8)


def refuse(model: nn.Module, message: str, world_size: int = 2, **options: Any) -> None:
    """Its plan is refused; with the weight left whole, it is not."""
    message = rf"{BASE}, a \w+, .*{message}.*Rule\(\.\.\., shard=False"
    with pytest.raises(ParallelismValueError, match=message):
        plan_parallelism(model, config(**options), world_size=world_size)
    rules = (Rule("re:.*base", shard=False),)
    plan_parallelism(model, config(rules=rules, **options), world_size=world_size)


@pytest.mark.promise(46)
def test_what_cannot_work_is_refused_when_planned(codecs: None) -> None:
    uneven = r"shape \(7, 8\), cannot be cut among 2 ranks.*it has 7.*data8 has 7"
    refuse(holding(Int8Rows.of(EIGHT[:7])), uneven)
    refuse(holding(Int8Rows.of(EIGHT), requires_grad=True), "is trainable, but codecs support only frozen")
    refuse(Stack(), "cannot be resharded to 2", world_size=4, fsdp2=FSDP2Config(reshard_after_forward=2))
    register_tensor_codec(Other, rows=["data8", "zeros"], **OTHER)
    refuse(holding(as_other(EIGHT)), "has no inner tensors zeros")
    register_tensor_codec(Other, rows=["data8"], replace=True, **OTHER)
    nested = Other(Int8Rows.of(EIGHT), torch.ones(8), torch.ones(()))
    refuse(holding(nested), r"contains other subclasses \(data8\)")
    flat = {"rows": ["data8"], "flatten": lambda tensor: ({"data8": tensor.data8}, None)}
    fixed = {"unflatten": lambda inner, context, shape: as_other(EIGHT)}
    register_tensor_codec(Other, replace=True, **flat, **fixed, **OTHER)
    other_shape = r"becomes a Other of shape \(8, 8\) if its codec is asked for shape \(4, 8\)"
    refuse(holding(as_other(EIGHT)), other_shape)
    register_tensor_codec(
        Closed, **flat, unflatten=lambda inner, context, shape: Closed(inner["data8"]), **SAME
    )
    refuse(holding(Closed(torch.zeros(8, 8))), "lacks fsdp_pre_all_gather")


@pytest.mark.promise(46)
@pytest.mark.parametrize("plan", [{}, {"layers.0.base": "colwise"}])
def test_tensor_parallelism_is_refused_by_name(plan: dict[str, str]) -> None:
    tp = TPConfig(plan=plan or {"head": "colwise"})
    settings = ParallelismConfig(mesh=MeshConfig(tp=2), fsdp2=FSDP2Config(), tp=tp)
    with pytest.raises(ParallelismValueError, match=f"{BASE}, a Int8Rows, cannot be used with tensor"):
        plan_parallelism(Stack(), settings, world_size=4)


@on_ranks(1)
def test_foreign_classes_are_refused_by_name() -> None:
    theirs = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    for weight, texts in (
        (as_other(EIGHT), [f"{BASE} is a Other", "register_tensor_codec"]),
        (theirs(torch.zeros(8, 8)), [f"{BASE} is a Params4bit of bitsandbytes", "NF4Tensor"]),
    ):
        model = Stack()
        model.layers[0].base._parameters["weight"] = weight.requires_grad_(False)  # type: ignore[union-attr]
        with fails(ParallelismValueError, *texts):
            parallelize_model(model, config())


def test_sizes_are_those_of_what_is_stored() -> None:
    plan = plan_parallelism(Stack(), config(), world_size=2)
    unit = next(unit for unit in plan.units if unit.name == "layers.0")
    inner = 64 + 8 * 4 + 4
    assert unit.nbytes == inner + 8 * 4 + 2 * (2 * 8 * 4)
    assert plan.structure != plan_parallelism(holding(as_other(EIGHT)), config(), world_size=2).structure


def test_registration_is_checked(codecs: None) -> None:
    half = {"flatten": lambda tensor: ({}, None)}
    register_tensor_codec(Other, rows=["data8", "scales"], **OTHER)
    for kind, options, error, text in (
        (int, {}, ParallelismTypeError, "needs a subclass of torch.Tensor, not <class 'int'>"),
        (nn.Parameter, {}, ParallelismTypeError, "Parameter"),
        (Closed, {}, ParallelismTypeError, "Closed has no __tensor_flatten__"),
        (Other, half, ParallelismValueError, "give both flatten and unflatten"),
        (Other, {}, ParallelismValueError, "Other already has a codec; pass replace=True"),
    ):
        with pytest.raises(error, match=text):
            register_tensor_codec(kind, rows=[], **options, **OTHER)  # type: ignore[type-var]
    register_tensor_codec(Other, rows=["data8", "scales"], replace=True, **OTHER)
    part = empty_like(as_other(EIGHT), "cpu", parts=4)
    assert type(part) is Other
    assert part.shape == (2, 8)


def test_a_codec_that_makes_something_else_is_refused(codecs: None) -> None:
    register_tensor_codec(
        Other, rows=["data8"], to_dense=Int8Rows.dense, from_dense=lambda dense, like: as_other(dense[:4])
    )
    like = as_other(EIGHT)
    assert encoded(like, like) is like
    with pytest.raises(ParallelismValueError, match="from_dense returns a Other with .*but the model has"):
        encoded(EIGHT, like)


@pytest.mark.promise(46)
@NF4
def test_nf4_that_is_not_aligned_with_the_rows_is_refused() -> None:
    model = nn.Sequential(Adapted("nf4", 768, 64))  # three blocks of 256 scales
    message = r"0\.base\.weight, a NF4Tensor, .*2 ranks.*quantization_factor has 3"
    with pytest.raises(ParallelismValueError, match=message):
        plan_parallelism(model, config(), world_size=2)
    with pytest.raises(ParallelismValueError, match="4 ranks"):
        plan_parallelism(model, config(replicas=2), world_size=8)
    plan_parallelism(model, config(), world_size=3)


@pytest.mark.promise(46)
@NF4
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@on_ranks(2)
def test_qlora_by_peft_trains_as_on_one_device() -> None:
    rank, reference = dist.get_rank(), lora(nf4_llama(), r=2)
    model = lora(nf4_llama(), r=2).to("meta" if rank else "cpu")
    optimizers = [adam(one) for one in (reference, model)]
    done = parallelize_model(model, config(bucket_bytes=1 << 16), optimizers[1])
    assert [unit.name for unit in done.plan.units][1:] == ["base_model.model.model.layers.0"]
    batch = torch.arange(16).view(4, 4)
    for one, optimizer, rows in zip(
        (reference, model), optimizers, (batch, batch.chunk(2)[rank]), strict=True
    ):
        one(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    expected, found = (full_model_state(one, select="adapters", ranks="all") for one in (reference, model))
    assert len(found) == 4
    close(found, expected, rtol=1e-4, atol=1e-5)
    held = [p for name, p in model.named_parameters() if "_proj" in name and "lora" not in name]
    assert {type(p.to_local()).__name__ for p in held if isinstance(p, DTensor)} == {"NF4Tensor"}


@pytest.mark.promise(46)
@NF4
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@on_ranks(2)
def test_other_weights_of_torchao_stay_whole_and_reach_all_ranks(kind: str) -> None:
    from torchao import quantization

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        quantization.quantize_(model[0], getattr(quantization, kind)())
        model[0].requires_grad_(False)
        return model

    single, x = built(make), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()
    rank = dist.get_rank()
    with fails(ParallelismValueError, "0.weight, a ", "cannot be cut", "Rule(..., shard=False)"):
        parallelize_model(built(make), config())
    for wanted, seed in ((config(rules=[Rule("0", shard=False)]), 0), (ddp(), 0), (ddp(sync="rank0"), rank)):
        model = built(make, seed)
        parallelize_model(model, wanted)
        model(x.chunk(2)[rank]).square().mean().backward()
        same({"": dense(model[0].weight)}, {"": dense(single[0].weight)})
        close({"": full(model[1].weight.grad)}, {"": single[1].weight.grad})
