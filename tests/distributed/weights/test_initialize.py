"""Meta initialization: the same bits on any number of ranks, and as one process makes them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn

from composer_dist.config.rule import Rule
from composer_dist.distributed import init_context, meta_init, parallelize_model
from composer_dist.distributed.weights.initialize import assert_no_meta
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit import huggingface as hf
from tests.kit.compare import fails_alike, same, values
from tests.kit.grids import in_the_default_run
from tests.kit.meshes import config
from tests.kit.toy import Kinds, Toy, built, tokens
from tests.kit.world import on_ranks
from tests.zoo import toy


def on_meta(name: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A model of ours, or of the zoo, on the meta device."""
    with init_context(dtype=dtype):
        return {"Toy": Toy, "Kinds": Kinds}[name]() if name in {"Toy", "Kinds"} else toy.build(name, "meta")


def alone(name: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What one process without sharding makes of it."""
    model = on_meta(name, dtype)
    torch.manual_seed(7)
    meta_init(model)
    assert_no_meta(model)
    return values(model)


MODELS = [
    *((name, None) for name in ("Toy", "Kinds", "llama", "t5", "mamba", "bert", "mixtral")),
    ("Kinds", torch.bfloat16),
    ("llama", torch.bfloat16),
]


@pytest.mark.promise(36)
@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "replicas"),
    in_the_default_run(
        *((name, None, 2, 1) for name in ("t5", "mamba", "bert", "mixtral")),
        *(("Toy", None, 1, 1), ("Toy", None, 4, 2), ("Kinds", None, 4, 1), ("llama", None, 4, 2)),
        *(("Kinds", torch.bfloat16, 2, 1), ("llama", torch.bfloat16, 2, 1)),
        among=[(*one, *mesh) for one in MODELS for mesh in ((1, 1), (2, 1), (4, 1), (4, 2))],
    ),
)
@on_ranks("ranks")
def test_the_same_bits_on_any_number_of_ranks(
    name: str, dtype: torch.dtype | None, ranks: int, replicas: int
) -> None:
    expected, model = alone(name, dtype), on_meta(name, dtype)
    assert dtype is None or dtype in {v.dtype for v in expected.values()}
    torch.manual_seed(7 if dist.get_rank() == 0 else 100)  # rank 0's seed counts
    state = torch.get_rng_state()
    parallelize_model(model, config(replicas=replicas, bucket_bytes=5000))
    assert torch.equal(torch.get_rng_state(), state)
    same(values(model), expected)


@pytest.mark.promise(36)
def test_values_are_distributed_as_the_initializers_say() -> None:
    with init_context():
        model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))
    meta_init(model)
    embed, first, second, norm = (module.weight for module in model)  # type: ignore[attr-defined]
    assert abs(embed.mean()) < 0.02
    assert abs(embed.std() - 1) < 0.02
    for weight in (first, second):  # uniform in +-1/sqrt(64)
        assert weight.abs().max() <= 0.125
        assert abs(weight.std() - 0.25 / 12**0.5) < 0.002
    assert not torch.equal(first, second)
    assert torch.equal(norm, torch.ones(64))
    llama = on_meta("llama")
    meta_init(llama)
    std = llama.config.initializer_range
    weight = llama.lm_head.weight
    assert abs(weight.std() / std - 1) < 0.2
    assert len({tuple(shard.flatten().tolist()) for shard in weight.chunk(4)}) == 4


@pytest.mark.promise(40)
def test_nothing_stays_on_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, device="meta"))
    with pytest.raises(ParallelismRuntimeError, match=r"parameter 0.weight, .*buffer 1.running_mean"):
        assert_no_meta(model)
    meta_init(model)
    assert_no_meta(model)


@pytest.mark.promise(38)
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_partly_meta_models_keep_what_is_real_and_stay_tied(ranks: int) -> None:
    def partly() -> Any:
        model = built()
        model.embed.weight = model.head.weight = nn.Parameter(torch.empty(16, 8, device="meta"))
        for module in (model.layers[1].up, model.layers[1].down):
            module.to("meta")
        return model

    model, single, expected = partly(), partly(), values(built())
    torch.manual_seed(0)
    meta_init(single)
    torch.manual_seed(0)
    parallelize_model(model, config())
    model.eval()(tokens())
    found = values(model)
    same(found, values(single))
    kept = [name for name in expected if name.startswith(("layers.0", "shift", "layers.1.norm.running"))]
    same({name: found[name] for name in kept}, {name: expected[name] for name in kept})
    assert model.head.weight is model.embed.weight
    assert found["embed.weight"].unique().numel() == 128


class Reader(nn.Module):
    """A trained projection that is initialized from a real table: the real one must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0, device="cpu"))
        self.proj = nn.Linear(6, 6, bias=False)

    def reset_parameters(self) -> None:
        self.proj.weight.copy_(self.table.outer(torch.ones(6)))
        self.table.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + self.table


@pytest.mark.promise(38)
@on_ranks(2)
def test_initializers_see_real_values_but_cannot_change_them() -> None:
    with init_context():
        model = Reader()
        model.extra = nn.Parameter(torch.empty(2))

    def init(module: Any) -> None:
        if isinstance(module, Reader):
            nn.init.ones_(module.extra)
        module.reset_parameters()

    parallelize_model(model, config(), param_init_fn=init)
    found = values(model)
    assert torch.equal(found["table"], torch.arange(6.0))
    assert torch.equal(found["proj.weight"], torch.arange(6.0).outer(torch.ones(6)))


@pytest.mark.promise(39)
@pytest.mark.parametrize("how", ["argument", "attribute"])
@on_ranks(2)
def test_param_init_fn_is_used_when_given(how: str) -> None:
    with init_context():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.BatchNorm1d(4))
    called: set[str] = set()

    def init(module: nn.Module) -> None:
        called.add(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3.0)
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    if how == "attribute":
        model.param_init_fn = init
    parallelize_model(model, config(), param_init_fn=init if how == "argument" else None)
    found = values(model)
    constants = {name: found[name].unique().item() for name in ("0.weight", "2.weight", "2.running_var")}
    assert constants == {"0.weight": 3.0, "2.weight": 3.0, "2.running_var": 1.0}
    assert len(called) == 2  # the ReLU holds nothing, and is left alone


class Bare(nn.Module):
    """A module without initializer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("table", torch.empty(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.table


class InitializesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        nn.init.normal_(self.inner.weight, std=0.02)


class InitializesItselfFromMeta(InitializesItself):
    def param_init_fn(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


@pytest.mark.promise(118)
def test_what_a_constructor_initializes_otherwise_is_said() -> None:
    with init_context():
        model = InitializesItself()
    with pytest.warns(
        UserWarning, match=r"^inner\.weight were initialized by more than the reset_parameters"
    ):
        meta_init(model)
    with init_context():
        model = InitializesItselfFromMeta()
    meta_init(model)
    assert float(model.inner.weight.detach().std()) < 0.05


@pytest.mark.promise(36, 87)
@on_ranks(2)
def test_a_module_without_tensors_of_its_own_initializes_those_below_it() -> None:
    with init_context():
        model = nn.Transformer(32, 2, 1, 1, 256, batch_first=True)
    alone = deepcopy(model)
    torch.manual_seed(7)
    meta_init(alone)
    torch.manual_seed(7)
    parallelize_model(model, config())
    same(values(model), values(alone))
    xavier = (6 / (256 + 32)) ** 0.5  # its linear layers alone would use 1 / sqrt(fan_in)
    for layer in (alone.encoder.layers[0], alone.decoder.layers[0]):
        for weight in (layer.linear1.weight.detach(), layer.linear2.weight.detach()):
            assert xavier * 0.99 < float(weight.abs().max()) <= xavier


class NeedsArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def reset_parameters(self, bound: float) -> None:
        nn.init.uniform_(self.inner.weight, -bound, bound)


@pytest.mark.promise(87)
def test_a_container_whose_initializer_needs_arguments_is_passed_by() -> None:
    with init_context():
        model = NeedsArguments()
    meta_init(model)
    assert 0 < float(model.inner.weight.detach().abs().max()) <= 0.5  # as the layer's own


@pytest.mark.promise(39, 87)
@on_ranks(2)
def test_a_tensor_without_initializer_is_refused_by_class() -> None:
    with init_context():
        model = nn.Sequential(nn.Linear(4, 4), Bare())
    before = [id(p) for p in model.parameters()]
    with fails_alike(ParallelismValueError, "Bare: 1.table, 1.weight") as error:
        parallelize_model(model, config())
    assert "Linear" not in str(error.value).split("Give")[0]
    assert "Sequential" not in str(error.value)
    assert [id(p) for p in model.parameters()] == before
    assert type(model) is nn.Sequential
    with pytest.raises(ParallelismValueError):
        meta_init(model)


@pytest.mark.promise(79)
def test_init_context() -> None:
    with init_context(empty=True, dtype=torch.bfloat16):
        with init_context(empty=False, dtype=torch.float64):
            assert torch.get_default_dtype() is torch.float64
        model = nn.Linear(2, 2)
        assert torch.get_default_dtype() is torch.bfloat16
    assert model.weight.is_meta
    assert model.weight.dtype is torch.bfloat16
    with init_context(empty=False, dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    with pytest.raises(KeyError), init_context(dtype=torch.float16):
        raise KeyError
    assert torch.get_default_dtype() is torch.float32
    assert nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.promise(79)
@on_ranks(2)
def test_hugging_face_models_from_the_context_can_be_prepared() -> None:
    model = on_meta("llama", torch.bfloat16)
    parallelize_model(model, config())
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@on_ranks(2)
def test_initializers_that_differ_between_ranks_are_refused() -> None:
    with init_context():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def together(module: nn.Module) -> None:
        """On rank 1, one module's initializer reaches into the other."""
        for other in model if dist.get_rank() else [module]:
            other.reset_parameters()  # type: ignore[operator]

    with fails_alike(ParallelismValueError, "The initializers around"):
        parallelize_model(model, config(), param_init_fn=together)
    assert type(model) is nn.Sequential


@on_ranks(2)
def test_recurrent_weights_that_stay_whole_are_the_ones_it_computes_with() -> None:
    expected, model = alone("Kinds"), on_meta("Kinds")
    torch.manual_seed(7)
    parallelize_model(model, config(rules=[Rule("lstm", shard=False)]))
    model.eval()(torch.ones(2, 4, dtype=torch.long)).sum().backward()
    same(values(model), expected)
    assert all(p.grad is not None for p in model.lstm.parameters())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.promise(118)
@pytest.mark.parametrize("kind", [True, False, "gaussian"])
def test_adapters_are_initialized_as_their_configuration_says(kind: Any) -> None:
    def spread(model: nn.Module) -> list[float]:
        named = model.named_parameters()
        return [float(one.detach().std()) for name, one in named if "lora_" in name and one.ndim == 2]

    options: Any = {"init_lora_weights": kind, "target_modules": ["q_proj", "embed_tokens"], "r": 16}
    torch.manual_seed(0)
    real = spread(hf.lora(hf.llama(), **options))
    with init_context():
        model = hf.lora(hf.llama(), **options)
    meta_init(model)
    assert spread(model) == pytest.approx(real, rel=0.2, abs=0.01)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_need_the_model_below_them_are_not_made_from_meta() -> None:
    with init_context():
        model = hf.lora(hf.llama(), init_lora_weights="gaussian")
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ParallelismValueError, match="init_lora_weights='pissa' of the adapter 'default'"):
        meta_init(model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adalora_is_initialized_from_meta() -> None:
    with init_context():
        model = get_peft_model(hf.llama(), hf.ADAPTERS["adalora"]())
    meta_init(model)
    for name, value in model.named_parameters():
        if "lora_" in name:
            assert float(value.detach().std()) == pytest.approx(0.02 * ("lora_E" not in name), rel=0.5), name
