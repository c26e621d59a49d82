"""The Trainer on several ranks gives what it gives on one with the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from composer_dist.distributed.mesh import sampler_kwargs
from composer_dist.distributed.prepare import parallelize_composer_model
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.trainer import Callback, Logger, State
from tests.trainer.models import (
    classifier,
    joined,
    loader,
    points,
    quiet,
    same,
    tagged,
    tagger,
    weights,
)

World = Callable[..., list[Any]]
Result = tuple[list[float], dict[str, Tensor]]

BATCHES = 4
PER_BATCH = 6


def batches(parts: list[int], index: int) -> list[Any]:
    """Part `index` of each batch, where `parts` are the parts' sizes."""
    samples = tagged(BATCHES * PER_BATCH)
    first = sum(parts[:index])
    starts = [batch * PER_BATCH + first for batch in range(BATCHES)]
    return [joined(samples[start : start + parts[index]]) for start in starts]


def train(parts: list[int], config: Any = None, **options: Any) -> Result:
    """Losses and final weights of a run on this rank's parts of the batches."""
    model = tagger()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    rank = dist.get_rank() if dist.is_initialized() else 0
    trainer, log = quiet(
        model,
        optimizers=optimizer,
        train_dataloader=batches(parts, rank),
        max_duration="1ep",
        parallelism_config=config,
        device="cpu",
        **options,
    )
    trainer.fit()
    assert (trainer.preparation is not None) == (config is not None)
    assert all(isinstance(p, DTensor) for p in model.parameters()) == (config is not None)
    return log.values("loss/train/total"), weights(model)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ([3, 3], {}),
        ([4, 2], {}),
        ([3, 3], {"device_train_microbatch_size": 1}),
        ([5, 1], {"device_train_microbatch_size": 2}),
        ([4, 2], {"device_train_microbatch_size": 1, "gradient_clipping": 0.05}),
    ],
)
def test_p98_fsdp2_trains_as_one_process_on_the_whole_batch(
    world2: World, parts: list[int], options: dict[str, Any]
) -> None:
    clipping = {key: options[key] for key in options if key == "gradient_clipping"}
    losses, expected = train([PER_BATCH], **clipping)
    for found, parameters in world2(train, parts, "fsdp", **options):
        assert found == pytest.approx(losses, rel=1e-5)
        same(parameters, expected)


def test_p98_hsdp_trains_as_one_process_on_the_whole_batch(world4: World) -> None:
    losses, expected = train([PER_BATCH])
    config = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "fsdp2": {}}
    for found, parameters in world4(train, [1, 1, 3, 1], config, device_train_microbatch_size=1):
        assert found == pytest.approx(losses, rel=1e-5)
        same(parameters, expected)


def clipped_norms(parts: list[int], config: Any = None) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    trainer, log = quiet(
        tagger(),
        train_dataloader=batches(parts, rank),
        max_duration="1ep",
        gradient_clipping=0.01,
        parallelism_config=config,
        device="cpu",
    )
    trainer.fit()
    return log.values("l2_norm/grad/global")


def test_p32_the_norm_that_is_clipped_is_the_whole_models(world2: World) -> None:
    expected = clipped_norms([PER_BATCH])
    assert min(expected) > 0.01
    for found in world2(clipped_norms, [4, 2], "fsdp"):
        assert found == pytest.approx(expected, rel=1e-6)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(microbatch_size: int | None) -> Counter[str]:
    """What one batch of 3 samples sends."""
    trainer, _ = quiet(
        tagger(),
        train_dataloader=batches([3, 3], dist.get_rank()),
        device_train_microbatch_size=microbatch_size,
        parallelism_config="fsdp",
    )
    trainer.fit(duration="1ba")
    with Collectives() as counted:
        trainer.fit(duration="1ba")
    return counted.counts


def test_p33_gradients_are_reduced_once_per_batch(world2: World) -> None:
    whole, cut = world2(collectives, None)[0], world2(collectives, 1)[0]
    assert cut["_reduce_scatter_base_"] == whole["_reduce_scatter_base_"] > 0
    assert cut["_allgather_base_"] > whole["_allgather_base_"] > 0
    assert cut["allreduce_"] == whole["allreduce_"] == 2  # what the ranks have, and the loss


def in_pieces(config: Any = None) -> Result:
    """The same run as `train`, cut into pieces, with an evaluation in between."""
    model = tagger()
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = batches([3, 3] if config else [PER_BATCH], rank)
    trainer, log = quiet(
        model,
        optimizers=SGD(model.parameters(), lr=0.5, momentum=0.9),
        train_dataloader=mine,
        parallelism_config=config,
        device="cpu",
    )
    for duration in ("1ba", "2ba", "1ep"):
        trainer.fit(duration=duration)
        trainer.eval(mine)
    assert trainer.state.timestamp.epoch == 1
    return log.values("loss/train/total"), weights(model)


def test_p98_fit_goes_on_where_it_ended_with_evaluations_in_between(world2: World) -> None:
    losses, expected = train([PER_BATCH])
    for found, parameters in [in_pieces(), *world2(in_pieces, "fsdp")]:
        assert found == pytest.approx(losses, rel=1e-5)
        same(parameters, expected)


def uneven(
    mine: list[list[int]], config: Any = None
) -> tuple[list[float], dict[str, float], list[float], dict[str, Tensor], int]:
    """Trains and evaluates on batches of the given points."""
    model = classifier()
    data = points()
    batches = [data[indices] for indices in mine]
    trainer, log = quiet(
        model,
        train_dataloader=batches,
        max_duration="1ep",
        parallelism_config=config,
        device="cpu",
    )
    if config:
        with pytest.warns(UserWarning, match="train dataloader of rank 1 ended after 1 batches"):
            trainer.fit()
        with pytest.warns(UserWarning, match="eval dataloader of rank 1 ended after 1 batches"):
            results = trainer.eval(batches)
    else:
        trainer.fit()
        results = trainer.eval(batches)
    accuracies = log.values("metrics/train/MulticlassAccuracy")
    losses = log.values("loss/train/total")
    return losses, results, accuracies, weights(model), trainer.state.timestamp.sample


def uneven_on_two_ranks() -> Any:
    return uneven([[[0, 1, 2], [3, 4], [5, 6]], [[7, 8]]][dist.get_rank()], "fsdp")


def test_p98_a_rank_with_fewer_batches_takes_part_until_all_have_ended(world2: World) -> None:
    losses, results, accuracies, expected, samples = uneven([[0, 1, 2, 7, 8], [3, 4], [5, 6]])
    assert samples == 9
    for found in world2(uneven_on_two_ranks):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(results, rel=1e-5)
        assert found[2] == pytest.approx(accuracies)
        same(found[3], expected)
        assert found[4] == samples


def predictions() -> list[Tensor]:
    data = points()
    mine = [[[0, 1], [2], [3]], [[4, 5, 6]]][dist.get_rank()]
    trainer, _ = quiet(classifier(), parallelism_config="fsdp")
    with pytest.warns(UserWarning, match="predict dataloader of rank 1"):
        return trainer.predict([data[indices] for indices in mine])


def test_p98_predict_gives_each_rank_its_own_batches(world2: World) -> None:
    model, data = classifier(), points()
    first, second = world2(predictions)
    assert [len(batch) for batch in first] == [2, 1, 1]
    assert [len(batch) for batch in second] == [3]
    expected = model(data[:7]).detach()
    torch.testing.assert_close(torch.cat(first + second), expected)


def an_empty_dataloader() -> str:
    mine = [batches([3, 3], 0), []][dist.get_rank()]
    trainer, _ = quiet(tagger(), train_dataloader=mine, parallelism_config="fsdp")
    with pytest.raises(ParallelismValueError) as caught:
        trainer.fit(duration="1ep")
    return str(caught.value)


def test_p98_a_rank_without_any_batch_is_named_everywhere(world2: World) -> None:
    texts = world2(an_empty_dataloader)
    assert texts[0] == texts[1]
    assert "train dataloader is empty on rank 1" in texts[0]


class Failing:
    """Fails at the second batch."""

    def __iter__(self) -> Any:
        yield batches([3, 3], 1)[0]
        raise OSError("the disk is gone")


def a_failing_dataloader() -> str:
    mine = [batches([3, 3], 0), Failing()][dist.get_rank()]
    trainer, _ = quiet(tagger(), train_dataloader=mine, parallelism_config="fsdp")
    with pytest.raises(ParallelismRuntimeError) as caught:
        trainer.fit(duration="1ep")
    return str(caught.value)


def test_a_failing_dataloader_raises_on_all_ranks(world2: World) -> None:
    texts = world2(a_failing_dataloader)
    assert texts[0] == texts[1]
    assert "Rank 1: OSError: the disk is gone" in texts[0]


class StopAfter(Callback):
    """Asks on rank 1 to stop."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.rank == 1 and state.timestamp.batch == self.batch:
            state.stop_training()


def stopped_and_continued() -> tuple[int, list[float]]:
    trainer, log = quiet(
        tagger(),
        train_dataloader=batches([3, 3], dist.get_rank()),
        max_duration="1ep",
        parallelism_config="fsdp",
        callbacks=StopAfter(2),
    )
    trainer.fit()
    stopped_at = trainer.state.timestamp.batch
    trainer.fit()
    return stopped_at, log.values("loss/train/total")


def uninterrupted() -> list[float]:
    trainer, log = quiet(
        tagger(),
        train_dataloader=batches([3, 3], dist.get_rank()),
        max_duration="1ep",
        parallelism_config="fsdp",
    )
    trainer.fit()
    return log.values("loss/train/total")


def test_one_rank_stops_all_and_no_batch_is_lost(world2: World) -> None:
    expected = world2(uninterrupted)[0]
    assert world2(stopped_and_continued) == [(2, expected)] * 2


def samplers() -> None:
    model, data = classifier(), points()
    trainer, _ = quiet(model, parallelism_config="fsdp")
    assert trainer.preparation is not None
    with pytest.raises(ParallelismValueError, match="All 2 data-parallel ranks .* same samples"):
        trainer.fit(duration="1ba", train_dataloader=loader())
    other = DistributedSampler(data, num_replicas=4, rank=dist.get_rank())
    with pytest.raises(ParallelismValueError, match="DistributedSampler is for num_replicas=4"):
        trainer.fit(duration="1ba", train_dataloader=DataLoader(data, 2, sampler=other))
    right = DistributedSampler(data, **sampler_kwargs(trainer.preparation.mesh))
    trainer.fit(duration="1ba", train_dataloader=DataLoader(data, 2, sampler=right))
    assert trainer.state.timestamp.sample == 4
    lenient, _ = quiet(classifier(), parallelism_config="fsdp", check_sampler=False)
    lenient.fit(duration="1ba", train_dataloader=loader())


def test_p03_samplers_that_do_not_fit_the_mesh_are_refused(world2: World) -> None:
    world2(samplers)


def no_config() -> None:
    with pytest.raises(ParallelismValueError, match="2 ranks, but neither a parallelism_config"):
        quiet(classifier())


def test_several_ranks_need_a_config_or_a_prepared_model(world2: World) -> None:
    world2(no_config)


def prepared_before() -> Result:
    model = tagger()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    parallelize_composer_model(model, optimizer, "fsdp")
    trainer, log = quiet(
        model,
        optimizers=optimizer,
        train_dataloader=batches([3, 3], dist.get_rank()),
        max_duration="1ep",
    )
    trainer.fit()
    return log.values("loss/train/total"), weights(model)


def test_a_model_that_is_prepared_already_is_trained_as_it_is(world2: World) -> None:
    losses, expected = train([PER_BATCH])
    for found, parameters in world2(prepared_before):
        assert found == pytest.approx(losses, rel=1e-5)
        same(parameters, expected)


def seeds() -> tuple[dict[str, Tensor], float]:
    with torch.device("meta"):
        model = tagger()
    torch.manual_seed(100 + dist.get_rank())
    quiet(model, parallelism_config="fsdp", seed=7)
    return weights(model), torch.rand(()).item()


def test_a_seed_initialises_alike_and_then_differs_by_rank(world2: World) -> None:
    (first, one), (second, other) = world2(seeds)
    for name in first:
        assert torch.equal(first[name], second[name])
    again = world2(seeds)
    assert one != other
    assert [number for _, number in again] == [one, other]


def with_a_bar() -> None:
    trainer, _ = quiet(
        tagger(),
        train_dataloader=batches([3, 3], dist.get_rank()),
        parallelism_config="fsdp",
        progress_bar=True,
    )
    trainer.fit(duration="1ep")


def test_only_rank_0_shows_progress(world2: World, capfd: pytest.CaptureFixture[str]) -> None:
    world2(with_a_bar)
    shown = capfd.readouterr().out.splitlines()
    assert [line.split(" ")[:2] for line in shown] == [["[rank", "0]"]] * len(shown)
    assert "train 100%  epoch 1/1  batch 4/4" in shown[-1]
