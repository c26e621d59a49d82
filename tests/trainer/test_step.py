"""One batch: weights, microbatches, clipping, losses of several parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import Callback, Event, GradientClipping
from composer_dist.trainer.step import total_loss
from tests.kit.compare import close, weights
from tests.kit.measure import Collectives
from tests.kit.training import (
    IGNORED,
    PER_BATCH,
    Tagger,
    batches,
    classifier,
    joined,
    loader,
    quiet,
    sgd,
    tagged,
    tagger,
)
from tests.kit.world import World


class Gradients(Callback):
    """Keeps each batch's gradients, before they are clipped."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def after_train_batch(self, state: Any, logger: Any) -> None:
        named = state.model.named_parameters()
        self.kept.append({name: p.grad.clone() for name, p in named})


def reference(batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one whole batch, by hand."""
    model = tagger()
    loss = model.loss(model(batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.promise(99)
@pytest.mark.parametrize("size", [None, 1, 2, 4, 7, 100])
def test_microbatches_give_the_whole_batchs_gradients(size: int | None) -> None:
    batch = joined(tagged(7))
    loss, expected = reference(batch)
    seen = Gradients()
    trainer, log = quiet(
        tagger(),
        train_dataloader=[batch],
        device_train_microbatch_size=size,
        callbacks=seen,
        device="cpu",
    )
    trainer.fit(duration="1ba")
    close(seen.kept[0], expected)
    assert log.values("loss/train/total") == [pytest.approx(loss, rel=1e-6)]


def test_gradients_start_from_zero_at_every_batch() -> None:
    batch = joined(tagged(7))
    seen = Gradients()
    model = tagger()
    trainer, _ = quiet(model, optimizers=sgd(model, lr=0.0), train_dataloader=[batch] * 2, callbacks=seen)
    trainer.fit(duration="1ep")
    close(seen.kept[1], seen.kept[0])


@pytest.mark.promise(32)
def test_norm_clipping_scales_the_step_and_logs_the_norm() -> None:
    batch = joined(tagged(7))
    _, gradients = reference(batch)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    before, model = weights(tagger()), tagger()
    trainer, log = quiet(
        model, train_dataloader=[batch], gradient_clipping=0.01, optimizers=sgd(model, lr=1.0)
    )
    trainer.fit(duration="1ba")
    assert log.values("l2_norm/grad/global") == [pytest.approx(norm.item(), rel=1e-6)]
    close(weights(model), {k: before[k] - gradients[k] * 0.01 / norm for k in before})


@pytest.mark.promise(32)
def test_values_are_clipped_before_the_norm() -> None:
    batch = joined(tagged(7))
    _, gradients = reference(batch)
    before, model = weights(tagger()), tagger()
    clamped = {name: gradient.clamp(-0.01, 0.01) for name, gradient in gradients.items()}
    trainer, log = quiet(
        model,
        train_dataloader=[batch],
        gradient_clipping=GradientClipping(value=0.01, norm=100.0, norm_type=1),
        optimizers=sgd(model, lr=1.0),
    )
    trainer.fit(duration="1ba")
    size = sum(gradient.abs().sum().item() for gradient in clamped.values())
    assert log.values("norm/grad/global") == [pytest.approx(size, rel=1e-5)]
    close(weights(model), {name: before[name] - clamped[name] for name in before})


def test_a_batch_without_any_label_is_refused() -> None:
    batch = joined(tagged(2))
    batch["labels"].fill_(IGNORED)
    trainer, _ = quiet(tagger(), train_dataloader=[batch])
    with pytest.raises(ParallelismValueError, match="loss of batch 0 has no terms on any rank"):
        trainer.fit(duration="1ba")


class TwoLosses(Tagger):
    """Half of the loss under each of two names."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        half = super().loss(outputs, batch) / 2
        return {"one": half, "other": half}


def test_losses_of_several_parts_are_summed() -> None:
    batch = joined(tagged(7))
    torch.manual_seed(0)
    model = TwoLosses()
    trainer, log = quiet(model, train_dataloader=[batch])
    trainer.fit(duration="1ba")
    assert log.values("loss/train/total") == [pytest.approx(reference(batch)[0])]
    one = torch.tensor(1.5)
    assert total_loss([one, one.reshape(1)]).item() == 3.0
    for wrong in (1.5, torch.ones(2), [], {"a": None}):
        with pytest.raises(ParallelismTypeError, match="loss must be a scalar tensor"):
            total_loss(wrong)


def test_training_metrics_are_those_of_the_batch() -> None:
    model = classifier()
    batches = list(loader())
    seen: list[float] = []

    class Accuracy(Callback):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event is Event.AFTER_FORWARD:
                hits = state.outputs.argmax(1) == state.batch[1]
                seen.append(hits.float().mean().item())

    trainer, log = quiet(model, train_dataloader=batches, callbacks=Accuracy())
    trainer.fit(duration="1ep")
    assert log.values("metrics/train/MulticlassAccuracy") == pytest.approx(seen)


def test_the_state_shows_microbatches_and_then_the_batch() -> None:
    sizes: list[tuple[str, int]] = []

    class Sizes(Callback):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event in (Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH):
                sizes.append((event.value, len(state.batch[0])))

    trainer, _ = quiet(
        classifier(),
        train_dataloader=loader(),
        device_train_microbatch_size=3,
        callbacks=Sizes(),
    )
    trainer.fit(duration="1ba")
    assert sizes == [("batch_start", 4), ("after_loss", 2), ("after_loss", 2), ("after_train_batch", 4)]


def test_outputs_are_let_go_before_backward() -> None:
    held: list[tuple[str, bool]] = []

    class Held(Callback):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD):
                held.append((event.value, state.outputs is not None))

    trainer, _ = quiet(classifier(), train_dataloader=loader(), callbacks=Held())
    trainer.fit(duration="1ba")
    assert held == [("before_backward", True), ("after_backward", False)]


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


@pytest.mark.promise(32)
def test_the_norm_that_is_clipped_is_the_whole_models(world2: World) -> None:
    expected = clipped_norms([PER_BATCH])
    assert min(expected) > 0.01
    for found in world2(clipped_norms, [4, 2], "fsdp"):
        assert found == pytest.approx(expected, rel=1e-6)


def collectives(microbatch_size: int | None, how: str = "sharded") -> Counter[str]:
    """What one batch of 3 samples sends."""
    trainer, _ = quiet(
        tagger(),
        train_dataloader=batches([3, 3], dist.get_rank()),
        device_train_microbatch_size=microbatch_size,
        accumulate=how,
        parallelism_config="fsdp",
    )
    trainer.fit(duration="1ba")
    with Collectives() as counted:
        trainer.fit(duration="1ba")
    return counted.counts


@pytest.mark.promise(99)
def test_gradients_are_reduced_once_per_microbatch_or_per_batch(world2: World) -> None:
    whole, cut = world2(collectives, None)[0], world2(collectives, 1)[0]
    once = world2(collectives, 1, "unsharded")[0]
    assert once["_reduce_scatter_base_"] == whole["_reduce_scatter_base_"] > 0
    assert cut["_reduce_scatter_base_"] == 3 * whole["_reduce_scatter_base_"]
    assert cut["_allgather_base_"] > whole["_allgather_base_"] > 0
    assert cut["allreduce_"] == whole["allreduce_"] == 2  # what the ranks have, and the loss
