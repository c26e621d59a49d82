"""Quantized weights, frozen, with trained adapters: sharded, delivered, trained, gathered and loaded.

Every test of the machinery runs on an 8-bit class of its own; those of NF4 need torchao.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.kit.compare import close, same
from tests.kit.meshes import config
from tests.kit.quantized import KINDS, NF4, Adapted, Int8Rows, Stack, adam, nf4_llama, quantize
from tests.kit.toy import built, train
from tests.kit.world import run

BASE = "layers.0.base.weight"
QUANTIZED = [BASE, "layers.1.base.weight"]


def stack(kind: str, seed: int = 0, device: str = "cpu") -> Any:
    return built(lambda: Stack(kind), seed, device)


def reference(kind: str, seed: int = 0, steps: int = 0) -> dict[str, Tensor]:
    """The dense state of the unsharded model, trained on the whole batch."""
    model = stack(kind, seed)
    train(model, adam(model), steps, whole=True)
    return {name: dense(value).clone() for name, value in model.state_dict(keep_vars=True).items()}


@pytest.mark.promise(46)
@KINDS
@pytest.mark.parametrize(
    ("others", "transport", "offload"),
    [("meta", "memory", False), ("meta", "messages", True), ("cpu", "auto", False)],
)
def test_it_trains_gathers_and_loads_as_the_unsharded_model(
    kind: str, others: str, transport: str, offload: bool
) -> None:
    start, trained, other = reference(kind), reference(kind, steps=2), reference(kind, seed=1)
    for rank, found in enumerate(run(prepared, 2, kind, others, transport, offload)):
        assert found["shard"] == {"int8": "Int8Rows", "nf4": "NF4Tensor"}[kind]
        assert found["attributes"] == {"tag": "frozen"}
        same(found["start"], start)
        close(found["trained"], trained, rtol=1e-4, atol=1e-5)
        same({BASE: found["trained"][BASE]}, {BASE: start[BASE]})
        assert found["selected"] == ([] if rank else [BASE])
        same(found["loaded"], {name: again(value, name, kind) for name, value in other.items()})
        assert (rank and offload) or torch.equal(found["summoned"], start[BASE])
        assert torch.equal(found["written"], again(-start[BASE], BASE, kind))


def again(value: Tensor, name: str, kind: str) -> Tensor:
    """A value that was loaded dense: quantized, and that undone."""
    return dense(quantize(value, kind)) if "base.weight" in name else value


def prepared(kind: str, others: str, transport: str, offload: bool) -> dict[str, Any]:
    model = stack(kind, device="cpu" if dist.get_rank() == 0 else others)
    optimizer = adam(model)
    options = FSDP2Config(cpu_offload=offload)
    parallelize_model(model, config(fsdp2=options, transport=transport), optimizer)
    weight = model.get_parameter(BASE)
    assert isinstance(weight, DTensor)
    attributes = {name: value for name, value in vars(weight).items() if name != "_is_param"}
    found: dict[str, Any] = {
        "shard": type(weight.to_local()).__name__,
        "attributes": attributes,
        "start": full_model_state(model, ranks="all"),
    }
    train(model, optimizer)
    found["trained"] = full_model_state(model, ranks="all")
    found["selected"] = list(full_model_state(model, select=lambda name, _: name == BASE))
    with summon_full_params(model, rank0_only=offload):
        if dist.get_rank() == 0 or not offload:
            weight = model.get_parameter(BASE)
            found["summoned"] = dense(weight).clone()
            model.get_submodule("layers.0.base").weight = nn.Parameter(-dense(weight))
    found["written"] = full_model_state(model, ranks="all")[BASE]
    load_full_model_state(model, reference(kind, seed=1) if dist.get_rank() == 0 else {})
    found["loaded"] = full_model_state(model, ranks="all")
    assert isinstance(model.get_parameter(BASE), DTensor)
    model(torch.arange(4))  # gathers what was loaded
    return found


@pytest.mark.promise(46)
@KINDS
def test_a_state_loaded_by_every_rank_has_the_bits_of_the_single_device(kind: str) -> None:
    torch.manual_seed(5)
    weight = torch.randn(512, 512)
    expected = dense(quantize(weight, kind))
    for found in run(loaded, 2, kind, weight):
        torch.testing.assert_close(found["state"], expected, rtol=0, atol=0)
        output = nn.functional.layer_norm(expected.sum(1)[None], (512,))
        torch.testing.assert_close(found["output"], output, rtol=1e-4, atol=1e-4)
        assert found["local"] == 256


def loaded(kind: str, weight: Tensor) -> dict[str, Any]:
    layer = nn.Linear(512, 512, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(quantize(torch.zeros(512, 512) + torch.eye(512), kind), requires_grad=False)
    model = nn.Sequential(layer, nn.LayerNorm(512))
    parallelize_model(model, config(sync="rank0"))
    load_full_model_state(model, {"0.weight": weight}, source="all", strict=False)
    state = full_model_state(model, ranks="all")["0.weight"]
    local: Any = layer.weight
    return {"state": state, "output": model(torch.ones(1, 512)).detach(), "local": local.to_local().shape[0]}


def test_the_steps_one_by_one_on_two_replicas() -> None:
    start = {name: again(value, name, "int8") for name, value in reference("int8").items()}
    for size, device, how in ((4, "meta", "sync"), (2, "meta", "load"), (1, "cpu", "load")):
        for found in run(stepwise, size, device, how):
            same(found, start)


def stepwise(device: str, how: str) -> dict[str, Tensor]:
    model = stack("int8", seed=3, device=device)
    size = dist.get_world_size()
    plan = prepare_fully_shard(model, config(replicas=2 if size == 4 else 1))
    assert [name for name in plan.plain if "base" in name] == (QUANTIZED if size == 1 else [])
    state = reference("int8") if dist.get_rank() == 0 else {}  # dense values
    if how == "sync":
        sync_module_states(model, state)
    else:
        load_full_model_state(model, state)
    found: dict[str, Tensor] = full_model_state(model, ranks="all")
    train(model, adam(model))
    return found


@KINDS
@pytest.mark.parametrize("size", [1, 2])
def test_files_hold_dense_values(kind: str, tmp_path: Path, size: int) -> None:
    stored = reference(kind)
    save_file(stored, tmp_path / "model.safetensors")
    expected = {name: again(value, name, kind) for name, value in stored.items()}
    for states in run(from_files, size, kind, str(tmp_path)):
        for state in states:
            same(state, expected)


def from_files(kind: str, path: str) -> list[dict[str, Tensor]]:
    model, later, bare = stack(kind, device="meta"), stack(kind, seed=1), stack(kind, device="meta")
    parallelize_model(model, config(), weights=path)
    parallelize_model(later, config())
    load_pretrained(later, path)
    load_pretrained(bare, path)  # not prepared
    assert type(bare.get_parameter(BASE)).__name__ in ("Int8Rows", "NF4Tensor")
    return [full_model_state(one, ranks="all") for one in (model, later, bare)]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_whole_ones_are_delivered_too(strategy: str) -> None:
    start = reference("int8")
    for rank in run(replicated, 2, strategy):
        same(rank["state"], start)
        assert rank["kind"] == ["Int8Rows", "cpu", "frozen"]


def replicated(strategy: str) -> dict[str, Any]:
    model = stack("int8", device="meta" if dist.get_rank() else "cpu")
    rules = (Rule("re:.*base", shard=False),)
    parallelize_model(model, "ddp" if strategy == "ddp" else config(rules=rules))
    weight: Any = model.get_parameter(BASE)
    kind = [type(weight).__name__, weight.data8.device.type, weight.tag]
    train(model, adam(model), steps=1)
    return {"state": start_of(model), "kind": kind}


def start_of(model: nn.Module) -> dict[str, Tensor]:
    """The state with what was trained put back, so that frozen values are what is compared."""
    state = full_model_state(model, ranks="all")
    return {name: state[name] if "base" in name else value for name, value in reference("int8").items()}


def test_what_differs_between_ranks_is_named_down_to_the_inner_tensor() -> None:
    for values, made_of, nowhere in run(differing, 2):
        assert f"different values of {BASE}.scales." in values
        assert f"{BASE}: made of" in made_of
        assert f"nothing initializes them: Linear: {BASE}, layers.1.base.weight" in nowhere


def differing() -> tuple[str, ...]:
    rank = dist.get_rank()
    scaled, other, bare = stack("int8"), stack("int8"), stack("int8", device="meta")
    scaled.layers[0].base.weight.scales.mul_(1 + rank)
    if rank:
        weight = other.layers[0].base.weight
        weight.shift = weight.shift[None]
    texts = []
    for model in (scaled, other, bare):
        with pytest.raises(ParallelismError) as caught:
            parallelize_model(model, config())
        texts.append(str(caught.value))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return tuple(texts)


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


def hold(weight: Tensor, requires_grad: bool = False) -> Callable[[], Stack]:
    """A model whose first quantized weight is another one."""

    def make() -> Stack:
        model = Stack()
        model.layers[0].base.weight = nn.Parameter(weight, requires_grad=requires_grad)  # type: ignore[union-attr]
        return model

    return make


@pytest.fixture
def codecs() -> Iterator[None]:
    """Codecs that a test registers are gone after it."""
    before = dict(known_codecs)
    yield
    known_codecs.clear()
    known_codecs.update(before)


def as_other(values: Tensor) -> Any:
    made = Int8Rows.of(values)
    return Other(made.data8, made.scales, made.shift)


OTHER: dict[str, Any] = {"to_dense": Int8Rows.dense, "from_dense": lambda dense, like: as_other(dense)}
EIGHT = torch.arange(64.0).view(8, 8)


@pytest.mark.promise(46)
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            hold(Int8Rows.of(EIGHT[:7])),
            {},
            r"shape \(7, 8\), cannot be cut among 2 ranks.*it has 7.*data8 has 7",
        ),
        (hold(Int8Rows.of(EIGHT), requires_grad=True), {}, "is trained, but a codec is for frozen ones"),
        (Stack, {"fsdp2": FSDP2Config(reshard_after_forward=2), "world_size": 4}, "cannot be resharded to 2"),
        (hold(as_other(EIGHT)), {"rows": ["data8", "zeros"]}, "has no inner tensors zeros"),
        (
            hold(as_other(EIGHT)),
            {"rows": ["data8"], "unflatten": lambda inner, context, shape: as_other(EIGHT)},
            r"becomes a Other of shape \(8, 8\) when its codec is asked for shape \(4, 8\)",
        ),
        (
            hold(Other(Int8Rows.of(EIGHT), torch.ones(8), torch.ones(()))),
            {"rows": ["data8"]},
            r"is made of other subclasses \(data8\)",
        ),
        (hold(Closed(torch.zeros(8, 8))), {"closed": True}, "lacks fsdp_pre_all_gather"),
    ],
)
def test_what_cannot_work_is_refused_when_planned(
    codecs: None, make: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    if options.pop("closed", False):
        register_tensor_codec(
            Closed,
            rows=["data8"],
            to_dense=lambda tensor: tensor,
            from_dense=lambda dense, like: dense,
            flatten=lambda tensor: ({"data8": tensor.data8}, None),  # type: ignore[attr-defined]
            unflatten=lambda inner, context, shape: Closed(inner["data8"]),
        )
    if rows := options.pop("rows", None):
        unflatten = options.pop("unflatten", None)
        flatten = (lambda tensor: (dict.fromkeys(["data8"], tensor.data8), None)) if unflatten else None
        register_tensor_codec(Other, rows=rows, flatten=flatten, unflatten=unflatten, **OTHER)
    world_size = options.pop("world_size", 2)
    with pytest.raises(
        ParallelismValueError, match=rf"{BASE}, a \w+, .*{message}.*Rule\(\.\.\., shard=False"
    ):
        plan_parallelism(make(), config(**options), world_size=world_size)
    whole = config(rules=(Rule("re:.*base", shard=False),), **options)
    plan_parallelism(make(), whole, world_size=world_size)


@pytest.mark.promise(46)
@pytest.mark.parametrize("plan", [{}, {"layers.0.base": "colwise"}])
def test_tensor_parallelism_is_refused_by_name(plan: dict[str, str]) -> None:
    tp = TPConfig(plan=plan or {"head": "colwise"})
    settings = ParallelismConfig(mesh=MeshConfig(tp=2), fsdp2=FSDP2Config(), tp=tp)
    with pytest.raises(ParallelismValueError, match=f"{BASE}, a Int8Rows, cannot go with tensor"):
        plan_parallelism(Stack(), settings, world_size=4)


def test_foreign_classes_are_refused_by_name() -> None:
    for unknown, theirs in run(foreign, 1):
        assert f"{BASE} is a Other" in unknown
        assert "register_tensor_codec" in unknown
        assert f"{BASE} is a Params4bit of bitsandbytes" in theirs
        assert "NF4Tensor" in theirs


def foreign() -> list[str]:
    theirs = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    texts = []
    for weight in (as_other(EIGHT), theirs(torch.zeros(8, 8))):
        model = Stack()
        model.layers[0].base._parameters["weight"] = weight.requires_grad_(False)  # type: ignore[union-attr]
        with pytest.raises(ParallelismValueError) as caught:
            parallelize_model(model, config())
        texts.append(str(caught.value))
    return texts


def test_sizes_are_those_of_what_is_stored() -> None:
    plan = plan_parallelism(Stack(), config(), world_size=2)
    unit = next(unit for unit in plan.units if unit.name == "layers.0")
    inner = 64 + 8 * 4 + 4
    assert unit.nbytes == inner + 8 * 4 + 2 * (2 * 8 * 4)
    assert plan.structure != plan_parallelism(hold(as_other(EIGHT))(), config(), world_size=2).structure


def test_registration_is_checked(codecs: None) -> None:
    with pytest.raises(ParallelismTypeError, match="needs a subclass of torch.Tensor, not <class 'int'>"):
        register_tensor_codec(int, rows=[], **OTHER)  # type: ignore[type-var]
    with pytest.raises(ParallelismTypeError, match="Parameter"):
        register_tensor_codec(nn.Parameter, rows=[], **OTHER)
    with pytest.raises(ParallelismTypeError, match="Closed has no __tensor_flatten__"):
        register_tensor_codec(Closed, rows=[], **OTHER)
    with pytest.raises(ParallelismValueError, match="give both flatten and unflatten"):
        register_tensor_codec(Other, rows=[], flatten=lambda tensor: ({}, None), **OTHER)
    register_tensor_codec(Other, rows=["data8", "scales"], **OTHER)
    with pytest.raises(ParallelismValueError, match="Other has a codec already; pass replace=True"):
        register_tensor_codec(Other, rows=[], **OTHER)
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
    with pytest.raises(ParallelismValueError, match="from_dense makes a Other of .*where the model has"):
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
def test_qlora_by_peft_trains_as_on_one_device() -> None:
    model = qlora()
    optimizer = adam(model)
    step(model, optimizer, torch.arange(16).view(4, 4))
    expected = full_model_state(model, select="adapters")
    for rank, (adapters, count, classes) in enumerate(run(trained_qlora, 2)):
        assert count == len(expected) == 4
        assert classes == {"NF4Tensor"}
        if rank == 0:
            close(adapters, expected, rtol=1e-4, atol=1e-5)


def qlora() -> Any:
    """A Llama whose projections are NF4, with LoRA on two of them."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(nf4_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()


def trained_qlora() -> tuple[Any, int, set[str]]:
    model = qlora().to("meta") if dist.get_rank() else qlora()
    optimizer = adam(model)
    done = parallelize_model(model, config(bucket_bytes=1 << 16), optimizer)
    assert [unit.name for unit in done.plan.units][1:] == ["base_model.model.model.layers.0"]
    rank = dist.get_rank()
    step(model, optimizer, torch.arange(16).view(4, 4)[2 * rank : 2 * rank + 2])
    held = [p for name, p in model.named_parameters() if "_proj" in name and "lora" not in name]
    state = full_model_state(model, select="adapters", ranks="all")
    return state, len(state), {type(p.to_local()).__name__ for p in held if isinstance(p, DTensor)}
