"""One batch: weights, microbatches, clipping, losses of several parts."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import GradientClipping
from composer_dist.trainer.step import total_loss
from tests.kit.compare import close, weights
from tests.kit.measure import Collectives
from tests.kit.training import (
    IGNORED,
    PER_BATCH,
    At,
    Tagger,
    classifier,
    joined,
    loader,
    on_parts,
    quiet,
    sgd,
    tagged,
    tagger,
)
from tests.kit.world import World


class Gradients(At):
    """Keeps each batch's gradients, before they are clipped."""

    def __init__(self) -> None:
        super().__init__(after_train_batch=self.keep)
        self.kept: list[dict[str, Tensor]] = []

    def keep(self, state: Any) -> None:
        self.kept.append({name: p.grad.clone() for name, p in state.model.named_parameters()})


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
    options = {"device_train_microbatch_size": size, "callbacks": seen}
    trainer, log = on_parts([], train_dataloader=[batch], **options)
    trainer.fit()
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

    def accuracy(state: Any) -> None:
        seen.append((state.outputs.argmax(1) == state.batch[1]).float().mean().item())

    trainer, log = quiet(model, train_dataloader=batches, callbacks=At(after_forward=accuracy))
    trainer.fit(duration="1ep")
    assert log.values("metrics/train/MulticlassAccuracy") == pytest.approx(seen)


def test_the_state_shows_microbatches_and_then_the_batch() -> None:
    sizes: list[int] = []

    def size(state: Any) -> None:
        sizes.append(len(state.batch[0]))

    seen = At(batch_start=size, after_loss=size, after_train_batch=size)
    trainer, _ = quiet(
        classifier(), train_dataloader=loader(), device_train_microbatch_size=3, callbacks=seen
    )
    trainer.fit(duration="1ba")
    assert sizes == [4, 2, 2, 4]


def test_outputs_are_let_go_before_backward() -> None:
    held: list[bool] = []

    def note(state: Any) -> None:
        held.append(state.outputs is not None)

    seen = At(before_backward=note, after_backward=note)
    trainer, _ = quiet(classifier(), train_dataloader=loader(), callbacks=seen)
    trainer.fit(duration="1ba")
    assert held == [True, False]


def clipped_norms(parts: list[int], config: Any = None) -> list[float]:
    trainer, log = on_parts(parts, config, gradient_clipping=0.01)
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
    options = {"device_train_microbatch_size": microbatch_size, "accumulate": how}
    trainer, _ = on_parts([3, 3], "fsdp", **options)
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


def test_a_number_is_a_norm() -> None:
    assert GradientClipping.of(1) == GradientClipping(norm=1)
    clipping = GradientClipping(value=0.5)
    assert GradientClipping.of(clipping) is clipping
    assert GradientClipping.of(None) is None
    GradientClipping(norm=1.0, norm_type=math.inf)


def test_what_clips_nothing_or_everything_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="needs a norm or a value"):
        GradientClipping()
    for name in ("norm", "value", "norm_type"):
        with pytest.raises(ParallelismValueError, match=f"{name} must be positive, not -1"):
            GradientClipping(**{"norm": 1.0, name: -1})
    with pytest.raises(ParallelismValueError, match="norm must be positive, not 0"):
        GradientClipping.of(0)
