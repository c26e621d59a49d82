"""One batch: weights, microbatches, clipping, losses of several parts."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchmetrics import SumMetric

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import Callback, GradientClipping, State
from composer_dist.trainer.step import total_loss
from tests.kit.compare import close, weights
from tests.kit.measure import Collectives, by_messages
from tests.kit.training import (
    IGNORED,
    At,
    Result,
    Tagger,
    fitted,
    fitted_on_parts,
    joined,
    my_rank,
    quiet,
    result_of,
    same_training,
    seen_at,
    sgd,
    tagged,
    tagger,
)
from tests.kit.world import World


def gradients(state: State) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}


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
    found, callback = seen_at("after_train_batch", gradients)
    options = {"device_train_microbatch_size": size, "callbacks": callback}
    _, log = fitted_on_parts([], train_dataloader=[batch], **options)
    close(found[0], expected)
    assert log.values("loss/train/total") == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.promise(99)
@pytest.mark.parametrize("size", [7, 4, 1])
def test_labels_that_a_callback_masks_count_alike_in_any_number_of_microbatches(size: int) -> None:
    """The loss is the mean over the labels that are left."""

    def mask(state: State) -> None:
        state.batch["labels"][1] = IGNORED

    batch = joined(tagged(7))
    terms = int((batch["labels"] != IGNORED).sum())
    options = {"device_train_microbatch_size": size, "callbacks": At(after_dataloader=mask)}
    _, log = fitted_on_parts([], train_dataloader=[batch], **options)
    left = int((batch["labels"] != IGNORED).sum())
    assert left < terms
    assert log.values("loss/train/total") == [pytest.approx(reference(batch)[0], rel=1e-6)]


@pytest.mark.promise(98)
@pytest.mark.parametrize("event", ["batch_start", "before_train_batch", "before_forward", "before_loss"])
def test_an_evaluation_in_a_callback_keeps_the_batch_of_another(event: str) -> None:
    other, done = joined(tagged(7, seed=2)), []

    def exchange(state: State) -> None:
        state.batch = other

    def evaluate(state: State) -> None:
        done.append(trainer.eval([joined(tagged(3, seed=3))], label="probe"))

    callbacks = [At(after_dataloader=exchange), At(**{event: evaluate})]
    trainer, log = quiet(
        tagger(), train_dataloader=[joined(tagged(7))], max_duration="1ep", callbacks=callbacks
    )
    trainer.fit()
    assert len(done) == 1
    assert log.values("loss/train/total") == [pytest.approx(reference(other)[0], rel=1e-6)]


class Masks(Callback):
    """Masks a sentence at `event`, by a method of the class or of the object."""

    def __init__(self, event: str = "") -> None:
        if event:
            setattr(self, event, self.mask)

    def mask(self, state: State, logger: Any) -> None:
        state.batch["labels"][1] = IGNORED


@pytest.mark.promise(99)
def test_a_callback_may_have_its_methods_on_the_object() -> None:
    batch = joined(tagged(7))
    options = {"device_train_microbatch_size": 4, "callbacks": Masks("after_dataloader")}
    _, log = fitted_on_parts([], train_dataloader=[batch], **options)
    assert log.values("loss/train/total") == [pytest.approx(reference(batch)[0], rel=1e-6)]


@pytest.mark.promise(99)
def test_labels_that_are_masked_after_the_weighing_are_refused() -> None:
    options = {"device_train_microbatch_size": 4, "callbacks": Masks("before_forward")}
    with pytest.raises(ParallelismValueError, match="at before_forward, .* Change batches at before_train"):
        fitted_on_parts([], train_dataloader=[joined(tagged(7))], **options)


class CountsTokens(Tagger):
    """Has a metric that does not use labels."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"tokens": SumMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(batch["input_ids"])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return outputs


@pytest.mark.promise(99)
@pytest.mark.parametrize("size", [None, 2, 1])
def test_microbatches_without_labels_count_in_metrics(size: int | None) -> None:
    batch = joined(tagged(7))
    batch["labels"][2:4] = IGNORED
    options = {"train_dataloader": [batch], "device_train_microbatch_size": size}
    _, log = fitted_on_parts([], None, CountsTokens(), **options)
    assert log.values("metrics/train/tokens") == [batch["input_ids"].sum().item()]


def shortened(parts: list[int], config: Any = None, keep: int = 3) -> Result:
    """An epoch of one batch, of which a callback leaves the first `keep` of all sentences."""
    start = sum(parts[: my_rank()])

    def cut(state: State) -> None:
        mine = max(min(keep - start, parts[my_rank()]), 1)
        state.batch = {name: value[:mine] for name, value in state.batch.items()}
        if start >= keep:
            state.batch["labels"][:] = IGNORED

    torch.manual_seed(0)
    batch = joined(tagged(sum(parts))[start : start + parts[my_rank()]])
    callbacks = At(batch_start=cut) if my_rank() == len(parts) - 1 or start + parts[my_rank()] > keep else ()
    return result_of(*fitted_on_parts([], config, train_dataloader=[batch], callbacks=callbacks))


@pytest.mark.promise(99)
def test_batches_that_callbacks_of_some_ranks_shorten_are_measured_again(world2: World) -> None:
    expected = shortened([5])
    for config in ("fsdp", "ddp"):
        for found in world2(shortened, [2, 3], config):
            same_training(found, expected)


class MaskedMean(Tagger):
    """The mean of the labeled tokens' losses as many write it: over none of them, its gradients are nan."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        labels = batch["labels"].flatten()
        mask = labels != IGNORED
        each = functional.cross_entropy(outputs.flatten(0, 1), labels.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum()


def masked_mean(parts: list[int], config: Any = None, microbatch_size: int | None = None) -> Result:
    """An epoch of one batch, whose sentences 0 and 3 have no labels."""
    torch.manual_seed(0)
    start = sum(parts[: my_rank()])
    batch = joined(tagged(sum(parts))[start : start + parts[my_rank()]])
    options = {"train_dataloader": [batch], "device_train_microbatch_size": microbatch_size}
    return result_of(*fitted_on_parts([], config, MaskedMean(), **options))


@pytest.mark.promise(99)
def test_microbatches_and_ranks_without_labels_add_nothing(world2: World) -> None:
    expected = masked_mean([5])
    same_training(masked_mean([5], microbatch_size=1), expected)
    for config in ("fsdp", "ddp"):
        for found in world2(masked_mean, [1, 4], config, 1):
            same_training(found, expected)


@pytest.mark.parametrize("event", ["after_dataloader", "batch_start", "before_train_batch"])
def test_the_model_trains_on_the_batch_that_a_callback_puts_in_its_place(event: str) -> None:
    other = joined(tagged(7, seed=2))
    found, note = seen_at("after_train_batch", lambda state: state.batch)

    def exchange(state: State) -> None:
        state.batch = other

    options = {"device_train_microbatch_size": 4, "callbacks": [At(**{event: exchange}), note]}
    _, log = fitted_on_parts([], train_dataloader=[joined(tagged(7))], **options)
    assert log.values("loss/train/total") == [pytest.approx(reference(other)[0], rel=1e-6)]
    assert found == [other]


def test_gradients_start_from_zero_at_every_batch() -> None:
    found, callback = seen_at("after_train_batch", gradients)
    options = {"optimizers": partial(sgd, lr=1e-30), "callbacks": callback}
    fitted_on_parts([], train_dataloader=[joined(tagged(7))] * 2, **options)
    close(found[1], found[0])


def clipped(clipping: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The log of one clipped step of size 1, the step, and the gradients before they were clipped."""
    batch = joined(tagged(7))
    options = {"gradient_clipping": clipping, "optimizers": partial(sgd, lr=1.0)}
    trainer, log = fitted_on_parts([], train_dataloader=[batch], **options)
    after = weights(trainer.state.model)
    step = {name: value - after[name] for name, value in weights(tagger()).items()}
    return log, step, reference(batch)[1]


@pytest.mark.promise(32)
def test_norm_clipping_scales_the_step_and_logs_the_norm() -> None:
    log, step, gradients = clipped(0.01)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert log.values("l2_norm/grad/global") == [pytest.approx(norm.item(), rel=1e-6)]
    close(step, {name: gradient * 0.01 / norm for name, gradient in gradients.items()})


@pytest.mark.promise(32)
def test_values_are_clipped_before_the_norm() -> None:
    log, step, gradients = clipped(GradientClipping(value=0.01, norm=100.0, norm_type=1))
    clamped = {name: gradient.clamp(-0.01, 0.01) for name, gradient in gradients.items()}
    size = sum(gradient.abs().sum().item() for gradient in clamped.values())
    assert log.values("norm/grad/global") == [pytest.approx(size, rel=1e-5)]
    close(step, clamped)


def test_a_batch_without_any_label_is_refused() -> None:
    batch = joined(tagged(2))
    batch["labels"].fill_(-100)
    with pytest.raises(ParallelismValueError, match="loss of batch 1 has no terms on any rank"):
        fitted_on_parts([], train_dataloader=[batch])


class TwoLosses(Tagger):
    """Half of the loss under each of two names."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        half = super().loss(outputs, batch) / 2
        return {"one": half, "other": half}


def test_losses_of_several_parts_are_summed() -> None:
    batch = joined(tagged(7))
    torch.manual_seed(0)
    _, log = fitted(TwoLosses(), train_dataloader=[batch])
    assert log.values("loss/train/total") == [pytest.approx(reference(batch)[0])]
    one = torch.tensor(1.5)
    assert total_loss([one, one.reshape(1)]).item() == 3.0
    for wrong in (1.5, torch.ones(2), [], {"a": None}):
        with pytest.raises(ParallelismTypeError, match="loss must be a scalar tensor"):
            total_loss(wrong)


def test_training_metrics_are_those_of_the_batch() -> None:
    def accuracy(state: State) -> float:
        return (state.outputs.argmax(1) == state.batch[1]).float().mean().item()

    found, callback = seen_at("after_forward", accuracy)
    _, log = fitted(callbacks=callback)
    assert log.values("metrics/train/MulticlassAccuracy") == pytest.approx(found)


def noted(read: Callable[[State], Any], *events: str, **options: Any) -> list[tuple[str, Any]]:
    """What `read` gives of the state at these events of one batch of 4 samples."""
    notes: list[tuple[str, Any]] = []
    seen = At(**{event: lambda state, at=event: notes.append((at, read(state))) for event in events})
    fitted(callbacks=seen, max_duration="1ba", **options)
    return notes


def test_the_state_shows_microbatches_and_then_the_batch() -> None:
    events = "batch_start", "after_loss", "after_train_batch"
    sizes = noted(lambda state: len(state.batch[0]), *events, device_train_microbatch_size=3)
    assert sizes == [("batch_start", 4), ("after_loss", 2), ("after_loss", 2), ("after_train_batch", 4)]


def test_outputs_are_let_go_before_backward() -> None:
    held = noted(lambda state: state.outputs is not None, "before_backward", "after_backward")
    assert held == [("before_backward", True), ("after_backward", False)]


def clipped_norms(parts: list[int], config: Any = None) -> list[float]:
    _, log = fitted_on_parts(parts, config, gradient_clipping=0.01)
    return log.values("l2_norm/grad/global")


@pytest.mark.promise(32)
def test_the_norm_that_is_clipped_is_the_whole_models(world2: World) -> None:
    expected = clipped_norms([6])
    assert min(expected) > 0.01
    for found in world2(clipped_norms, [4, 2], "fsdp"):
        assert found == pytest.approx(expected, rel=1e-6)


def collectives(microbatch_size: int | None, how: str = "sharded") -> Counter[str]:
    """What one batch of 3 samples sends."""
    options = {"device_train_microbatch_size": microbatch_size, "accumulate": how, "max_duration": "1ba"}
    trainer, _ = fitted_on_parts([3, 3], "fsdp", **options)
    with by_messages(), Collectives() as counted:
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


def gathered(batches: int) -> tuple[int, list[bool | int], float]:
    """By an evaluation: how often, which units are resharded after forward, and the loss."""
    trainer, _ = fitted_on_parts([3, 3], "fsdp", max_duration="1ba")
    batch = next(iter(trainer.state.train_dataloader))
    with by_messages(), Collectives() as counted:
        results = trainer.eval([batch] * batches)
    units = [one for one in trainer.preparation.plan.units if one.parameters]
    assert all(isinstance(one, DTensor) for one in trainer.state.model.parameters())
    trainer.fit(duration="1ba")
    [loss] = [value for name, value in results.items() if name.endswith("total")]
    return counted.counts["_allgather_base_"], [one.reshard_after_forward for one in units], loss


@pytest.mark.promise(98)
def test_what_ends_the_forward_is_gathered_once_for_an_evaluation(world2: World) -> None:
    [(one, reshards, loss), *_], [(three, _, mean), *_] = world2(gathered, 1), world2(gathered, 3)
    assert one == len(reshards)
    assert three == 3 * one - 2 * reshards.count(False) < 3 * one
    assert mean == pytest.approx(loss, rel=1e-6)


def test_a_number_is_a_norm_and_what_clips_nothing_or_everything_is_refused() -> None:
    assert GradientClipping.of(1) == GradientClipping(norm=1)
    clipping = GradientClipping(value=0.5)
    assert GradientClipping.of(clipping) is clipping
    assert GradientClipping.of(None) is None
    GradientClipping(norm=1.0, norm_type=math.inf)
    with pytest.raises(ParallelismValueError, match="needs a norm or a value"):
        GradientClipping()
    for name in ("norm", "value", "norm_type"):
        with pytest.raises(ParallelismValueError, match=f"{name} must be positive, not -1"):
            GradientClipping(**{"norm": 1.0, name: -1})
    with pytest.raises(ParallelismValueError, match="norm must be positive, not 0"):
        GradientClipping.of(0)
