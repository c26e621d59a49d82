"""The Trainer on several ranks gives what it gives on one with the whole batch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import init_context
from composer_dist.distributed.prepare import parallelize_composer_model
from composer_dist.errors import ParallelismValueError
from tests.kit.training import (
    BATCHES,
    IGNORED,
    PER_BATCH,
    Result,
    Tagger,
    batches,
    fitted_on_parts,
    momentum,
    on_parts,
    on_sentences,
    quiet,
    result_of,
    same_training,
    sgd,
    tagger,
)
from tests.kit.world import World

DDP = {"ddp": {}}


def train(parts: list[int], config: Any = None, **options: Any) -> Result:
    """A run on this rank's parts of the batches."""
    trainer, log = fitted_on_parts(parts, config, optimizers=momentum, **options)
    assert (trainer.preparation is not None) == (config is not None)
    sharded = config == "fsdp" or "fsdp2" in (config or "")
    assert all(isinstance(p, DTensor) for p in trainer.state.model.parameters()) == sharded
    trainer.close()
    return result_of(trainer, log)


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("config", "parts", "size", "clipping"),
    [
        ("fsdp", [3, 3], None, None),
        ("fsdp", [4, 2], None, None),
        ("fsdp", [3, 3], 1, None),
        ("fsdp", [5, 1], 2, None),
        ("fsdp", [4, 2], 1, 0.05),
        (DDP, [4, 2], None, None),
        (DDP, [5, 1], 2, 0.05),
    ],
)
def test_two_ranks_train_as_one_process_on_the_whole_batch(
    world2: World, config: Any, parts: list[int], size: int | None, clipping: float | None
) -> None:
    expected = train([PER_BATCH], gradient_clipping=clipping)
    options = {"device_train_microbatch_size": size, "gradient_clipping": clipping}
    for found in world2(train, parts, config, **options):
        same_training(found, expected)


@pytest.mark.promise(98)
def test_hsdp_trains_as_one_process_on_the_whole_batch(world4: World) -> None:
    config = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "fsdp2": {}}
    for found in world4(train, [1, 1, 3, 1], config, device_train_microbatch_size=1):
        same_training(found, train([PER_BATCH]))


def in_pieces(config: Any = None) -> Result:
    """The same run as `train`, cut into pieces, with an evaluation in between."""
    parts = [3, 3] if config else [PER_BATCH]
    trainer, log = on_parts(parts, config, optimizers=momentum, max_duration=None)
    for duration in ("1ba", "2ba", "1ep"):
        trainer.fit(duration=duration)
        trainer.eval(trainer.state.train_dataloader)
    assert trainer.state.timestamp.epoch == 1
    return result_of(trainer, log)


@pytest.mark.promise(98)
def test_fit_continues_where_it_ended_with_evaluations_in_between(world2: World) -> None:
    for found in [in_pieces(), *world2(in_pieces, "fsdp"), *world2(in_pieces, DDP)]:
        same_training(found, train([PER_BATCH]))


def prepared_before(config: Any) -> Result:
    model = tagger()
    optimizer = momentum(model)
    with pytest.raises(ParallelismValueError, match="2 ranks, but neither a parallelism_config"):
        quiet(model, optimizers=optimizer)
    parallelize_composer_model(model, optimizer, config)
    return result_of(*fitted_on_parts([3, 3], None, model, optimizers=optimizer, device=None))


def test_several_ranks_need_a_config_or_a_prepared_model_which_is_trained_as_it_is(world2: World) -> None:
    for found in [*world2(prepared_before, "fsdp"), *world2(prepared_before, DDP)]:
        same_training(found, train([PER_BATCH]))


def from_files(config: Any, path: str) -> Result:
    with init_context():
        model = Tagger()
    with pytest.raises(ParallelismValueError, match="weights= needs a parallelism_config"):
        quiet(tagger(), weights=path)
    return train([3, 3], config, model=model, weights=path)


@pytest.mark.promise(142)
def test_the_weights_may_come_from_files(world2: World, tmp_path: Path) -> None:
    save_file(tagger().state_dict(), tmp_path / "model.safetensors")
    for found in world2(from_files, "fsdp", str(tmp_path)):
        same_training(found, train([PER_BATCH]))


def trained_llama(parts: list[int], config: Any = None, size: int | None = None, peers: int = 1) -> Result:
    options = {"optimizers": partial(sgd, lr=0.5), "gradient_clipping": 1.0}
    trainer, log = on_sentences(parts, config, peers, device_train_microbatch_size=size, **options)
    assert trainer.state.timestamp.token == 3 * sum(parts) * 8
    return result_of(trainer, log)


@pytest.mark.promise(99)
def test_a_language_models_gradients_are_weighted_by_tokens(world2: World) -> None:
    for found in world2(trained_llama, [5, 2], "fsdp", 2):
        same_training(found, trained_llama([7]))


def tagger_on_parts_of_sentences(config: Any = None) -> Result:
    """Sentences one position longer, so that two ranks can share them; their labels are not equally many."""
    data = [
        {"input_ids": pad(one["input_ids"], (0, 1)), "labels": pad(one["labels"], (0, 1), value=IGNORED)}
        for one in batches([PER_BATCH], 0)
    ]
    options = {"train_dataloader": data, "device_train_microbatch_size": 4, "optimizers": momentum}
    return result_of(*fitted_on_parts([], config, **options))


def both_on_parts_of_sentences() -> list[Result]:
    config = {"mesh": {"cp": 2}}
    return [trained_llama([7], config, 4, peers=2), tagger_on_parts_of_sentences(config)]


def test_context_parallelism_trains_as_one_process(world2: World) -> None:
    """A loss that the model computes, weighted by the whole's labels, and one that the Trainer weighs."""
    expected = [trained_llama([7]), tagger_on_parts_of_sentences()]
    for results in world2(both_on_parts_of_sentences):
        for found, whole in zip(results, expected, strict=True):
            same_training(found, whole)


@pytest.mark.slow
def test_context_parallelism_beside_data_parallelism_trains_as_one_process(world4: World) -> None:
    for found in world4(trained_llama, [5, 2], {"mesh": {"cp": 2}}, 2, peers=2):
        same_training(found, trained_llama([7]))


def on_a_mesh_of_the_users(alias: bool) -> tuple[tuple[int, ...], Result]:
    mesh = init_device_mesh("cpu", (2, 2))
    config = FSDP2Config(device_mesh=mesh) if alias else ParallelismConfig(mesh=mesh)
    trainer, log = fitted_on_parts([2, 1, 2, 1], config, optimizers=momentum, device=None)
    assert trainer.preparation is not None
    return tuple(trainer.preparation.mesh.shape), result_of(trainer, log)


@pytest.mark.promise(89)
@pytest.mark.parametrize("alias", [True, False])
def test_a_mesh_of_the_users_stays_what_it_is(world4: World, alias: bool) -> None:
    for shape, found in world4(on_a_mesh_of_the_users, alias):
        assert shape == (2, 2)
        same_training(found, train([PER_BATCH]))


def with_evaluations(reshard: bool | int) -> tuple[list[float], list[float]]:
    config = {"fsdp2": {"reshard_after_forward": reshard}}
    options = {"device_train_microbatch_size": 1, "gradient_clipping": 0.1, "eval_interval": "1ba"}
    _, log = fitted_on_parts([3, 3], config, eval_dataloader=batches([3, 3], dist.get_rank()), **options)
    return log.values("loss/train/total"), log.values("loss/eval/total")


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [False, 2])
def test_evaluations_leave_training_as_it_is_however_units_reshard(world2: World, reshard: Any) -> None:
    expected = world2(with_evaluations, True)[0]
    assert len(expected[1]) == BATCHES
    for found in world2(with_evaluations, reshard):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)


def in_bf16() -> Result:
    model, dtypes = tagger(), set()
    model.body.head.register_forward_pre_hook(lambda module, args: dtypes.add(module.weight.dtype))
    options = {"precision": "amp_bf16", "optimizers": momentum}
    result = result_of(*fitted_on_parts([3, 3], "fsdp", model, **options))
    assert dtypes == {torch.bfloat16}
    return result


def test_bf16_on_two_ranks_is_near_bf16_on_one(world2: World) -> None:
    losses, _ = train([PER_BATCH], precision="amp_bf16")
    for found, parameters in world2(in_bf16):
        assert found == pytest.approx(losses, rel=0.1)
        assert {value.dtype for value in parameters.values()} == {torch.float32}
