"""What Composer's own FSDP2 tests assert, on two gloo ranks: the same here, or better."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassAccuracy

from composer_dist import ComposerClassifier, FSDP2Config, ParallelismError
from composer_dist.distributed import init_context, parallelize_model
from composer_dist.trainer import State
from composer_dist.trainer.evaluation import fresh_metrics
from tests.kit import models
from tests.kit.compare import close, fails_alike, same, weights
from tests.kit.grids import crossed
from tests.kit.training import quiet
from tests.kit.world import World, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

WIDTH = 10


class Mlp(nn.Module):
    """Composer's SimpleMLP, whose first and last weight are one."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.net = nn.Sequential(first, nn.ReLU(), last)
        last.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def classifier(partly: bool) -> ComposerClassifier:
    """Composer's SimpleWeightTied or PartialWeightTied; each layer is a unit."""
    torch.manual_seed(0)
    layers = nn.Sequential(Mlp(), *([nn.Linear(WIDTH, WIDTH)] if partly else []), nn.Softmax(dim=-1))
    layers._fsdp_wrap = False
    for layer in layers:
        layer._fsdp_wrap = True
    if partly:
        layers.param_init_fn = _init
    return ComposerClassifier(layers, num_classes=WIDTH, train_metrics={}, val_metrics={})


def batches(parts: int, part: int) -> list[Any]:
    """Ten batches of four samples, this part of each."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(4, WIDTH, generator=generator) for _ in range(10)]
    return [(x.chunk(parts)[part], x.argmax(1).chunk(parts)[part]) for x in rows]


def fit(model: Any, config: Any = None) -> Any:
    """Trains for ten batches, split over the ranks where there is a config."""
    trainer, _ = quiet(
        model,
        train_dataloader=batches(dist.get_world_size(), dist.get_rank()) if config else batches(1, 0),
        max_duration="1ep",
        parallelism_config=config,
        device="cpu",
    )
    before = weights(model)
    trainer.fit()
    assert not any(torch.equal(before[name], value) for name, value in weights(model).items())
    return trainer


def initialize(partly: bool, how: str) -> dict[str, Any]:
    with init_context(empty=how == "meta" or (how == "mixed" and dist.get_rank() > 0)):
        model = classifier(partly)
    trainer = fit(model, FSDP2Config())
    net = model.module[0].net
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.shape[0] == 2 * parameter.to_local().shape[0]
    assert net[0].weight is net[2].weight
    assert net[0].weight is trainer.state.optimizers[0].param_groups[0]["params"][0]
    return {"units": [unit.name for unit in trainer.preparation.plan.units], "weights": weights(model)}


@crossed(
    {
        "how": ["real", "meta", "mixed"],
        "partly, units": [(False, ["", "module.0"]), (True, ["", "module.0", "module.1"])],
    }
)
def test_tied_parameters_are_sharded_once_and_stay_tied_through_a_fit(
    world2: World, partly: bool, units: list[str], how: str
) -> None:
    first, second = world2(initialize, partly, how)
    assert first["units"] == units
    same(first["weights"], second["weights"])
    reference = classifier(partly)
    fit(reference)
    if how != "meta":  # initialized otherwise
        close(first["weights"], weights(reference))


@pytest.mark.parametrize("on_meta", ["all", "others"])
@on_ranks(2)
def test_a_classifier_built_on_meta_trains_with_its_default_metrics(on_meta: str) -> None:
    with init_context(empty=on_meta == "all" or dist.get_rank() > 0):
        torch.manual_seed(0)
        model = ComposerClassifier(Mlp(), num_classes=WIDTH)
    metrics = model.get_metrics(is_train=True) | model.get_metrics(is_train=False)
    assert {value.device.type for one in metrics.values() for value in one._defaults.values()} == {"cpu"}
    trained = fit(model, "fsdp").state.train_metrics
    assert list(trained) == ["MulticlassAccuracy"]
    assert trained["MulticlassAccuracy"].compute().isfinite()


@on_ranks(2)
def test_metrics_that_one_rank_made_on_meta_are_refused_on_all() -> None:
    with init_context(empty=dist.get_rank() > 0):
        metric = MulticlassAccuracy(num_classes=WIDTH)
    with fails_alike(ParallelismError, "Rank 1: Metrics were made on the meta device", "from: accuracy."):
        fresh_metrics(State(model=ComposerClassifier(Mlp(), num_classes=WIDTH)), {"accuracy": metric}, ())


def untie(module: nn.Module) -> None:
    """Gives a tied head a weight of its own, as old initializers do."""
    if isinstance(module, nn.Linear) and module.out_features == models.VOCABULARY and module.bias is None:
        module.weight = nn.Parameter(torch.ones_like(module.weight, device="cpu"))
    else:
        module.reset_parameters()  # type: ignore[operator]


@on_ranks(2)
def test_an_initializer_that_breaks_a_tie_is_refused_by_name() -> None:
    with init_context():
        model = models.tied()
    with fails_alike(ParallelismError, "head.weight"):
        parallelize_model(model, FSDP2Config(), param_init_fn=untie)


@on_ranks(2)
def test_an_overflow_on_one_rank_stops_the_step_on_all() -> None:
    """Rank 0's part of a gradient overflows, and no rank steps; the next step counts again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallelize_model(model, FSDP2Config(), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight: Any = model[0].weight
    before = weight.full_tensor().clone()
    for overflows in (True, False):
        scaler.scale(model(torch.ones(2, 2)).sum()).backward()
        if overflows and dist.get_rank() == 0:
            weight.grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight.full_tensor(), before) == overflows
    assert scaler.get_scale() == 2.0


DROPPED = """
activation_checkpointing_reentrant auto_wrap te_checkpoint_wrapper te_shard_fp8_weight backward_prefetch
backward_prefetch_limit data_parallel_shard_degree data_parallel_replicate_degree forward_prefetch
forward_prefetch_limit ignored_modules keep_low_precision_grads limit_all_gathers load_planner process_group
save_planner sharded_ckpt_prefix_dir sync_module_states use_orig_params
"""


def test_keys_of_composer_s_fsdp1_are_kept_translated_or_warned_about() -> None:
    flags = ("activation_checkpointing", "activation_cpu_offload", "verbose")
    kept = {"state_dict_type": "full", "mixed_precision": "PURE"} | dict.fromkeys(flags, True)
    dropped = dict.fromkeys(DROPPED.split()) | {"load_monolith_rank0_only": True}
    with pytest.warns(UserWarning, match="is ignored") as caught:
        config = FSDP2Config.from_compatible_attrs(
            kept | {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": False} | dropped
        )
    assert {key: getattr(config, key) for key in kept} == kept
    assert config.reshard_after_forward is False
    texts = [str(one.message) for one in caught]
    assert len(texts) == len(dropped) == 20
    assert all(sum(f"'{k}: {v}' is ignored" in text for text in texts) == 1 for k, v in dropped.items())
    assert FSDP2Config.from_compatible_attrs({"load_monolith_rank0_only": False}) == FSDP2Config()
