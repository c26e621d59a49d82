"""Features of the Trainer that meet: each does what it does alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from composer_dist.models import ComposerModel
from composer_dist.trainer import EMA, CheckpointSaver, FineTuningPhases, NoImprovement, Phase, State
from tests.kit.compare import close, same, weights
from tests.kit.grids import slow
from tests.kit.training import (
    PER_BATCH,
    At,
    Result,
    Scores,
    batches,
    fitted_on_parts,
    language_model,
    momentum,
    on_parts,
    recovers,
    result_of,
    same_training,
    sentences,
    short_of_memory,
    tagger,
)
from tests.kit.world import World

# Dynamo looks whether a non-leaf tensor has a gradient, and hides torch's warning by a filter of its own.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    """A layer within a module: what is repeated of this kind is a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def in_blocks() -> ComposerModel:
    """A tagger whose layers are blocks."""
    model = tagger()
    model.body.layers = nn.ModuleList(map(Block, model.body.layers))
    return model


COMPILED = {"compile": {"backend": "aot_eager", "fullgraph": True}}
PHASES = [Phase("body.head", until="1ba"), Phase("body.layers.1", until="1ba"), Phase("rest")]
FITS = 2


def parts(config: Any) -> list[Any]:
    """This rank's part of the batches."""
    if not config or "cp" in config.get("mesh", {}):
        return batches([PER_BATCH], 0)
    return batches([4, 2], dist.get_rank())


def trained(config: Any, model: ComposerModel | None = None, **options: Any) -> Result:
    """One epoch, of four batches."""
    if "compile" in (config or {}):
        torch._dynamo.reset()  # another test's compilations of the same code
        counters.clear()
    options = {"optimizers": momentum, "train_dataloader": parts(config)} | options
    trainer, log = fitted_on_parts([], config, in_blocks() if model is None else model, **options)
    trainer.close()
    return result_of(trainer, log)


def in_phases(config: Any) -> tuple[Result, int]:
    return trained(config, callbacks=FineTuningPhases(PHASES)), counters["stats"]["unique_graphs"]


@compiles
@pytest.mark.parametrize("config", [COMPILED | {"fsdp2": {}}, slow(COMPILED | {"ddp": {}})])
def test_phases_thaw_compiled_blocks(world2: World, config: Any) -> None:
    expected, _ = in_phases(None)
    for found, graphs in world2(in_phases, config):
        same_training(found, expected)
        assert 2 <= graphs <= 4  # frozen and thawed, with an input that has a gradient and without


def whole(ema: EMA) -> dict[str, Tensor]:
    return weights(nn.ParameterDict({n.replace(".", "/"): nn.Parameter(p) for n, p in ema.averages.items()}))


def averaged(config: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The averages before and after each batch.

    The second batch is the best; after the fourth the second phase begins, from there.
    """
    until = NoImprovement(metric="metrics/eval/score", mode="max", patience=2)
    ema = EMA("2ba")
    before: list[dict[str, Tensor]] = []
    after: list[dict[str, Tensor]] = []
    trained(
        config,
        train_dataloader=parts(config) * 2,
        eval_dataloader=parts(config)[:1],
        eval_interval="1ba",
        callbacks=[
            Scores(1, 3, 2, 2, 1, 1, 1, 1, 1),
            ema,
            FineTuningPhases([Phase("body.head", until=until), Phase("rest")]),
            At(
                before_train_batch=lambda state: before.append(whole(ema)),
                batch_end=lambda state: after.append(whole(ema)),
            ),
        ],
    )
    return before, after


def test_averages_return_to_the_best_with_the_weights(world2: World) -> None:
    expected, _ = averaged(None)
    for before, after in [averaged(None), *world2(averaged, {"fsdp2": {}})]:
        close(before[4], after[1])
        assert set(after[3]) == {"body/head/weight", "body/head/bias"}
        assert len(after[4]) == 7  # the others' begin with what they were at their first batch
        for one, other in zip(before, expected, strict=True):
            close(one, other)


def given_and_found(config: Any, make: Any, place: str, **options: Any) -> tuple[Any, Any, int]:
    """A run that is given the size, one that finds it, and what the second one has compiled."""
    results = []
    for size in (FITS, "auto"):
        model = make()
        if size == "auto" and dist.get_rank() == 1:
            short_of_memory(model, place, FITS)
        results.append(trained(config, model, device_train_microbatch_size=size, **options))
    return results[0], results[1], counters["stats"]["unique_graphs"]


@recovers
@compiles
def test_auto_finds_the_size_of_compiled_blocks_and_they_are_compiled_then(world2: World) -> None:
    config = COMPILED | {"fsdp2": {}}
    for given, found, graphs in world2(given_and_found, config, in_blocks, "body.layers.1 forward"):
        same_training(found, given)
        assert graphs > 0


@recovers
def test_auto_finds_the_size_under_context_parallelism(world2: World) -> None:
    config, place = {"mesh": {"cp": 2}}, "model.model.layers.1 forward"
    data = [sentences(5)] * 4
    for given, found, _ in world2(given_and_found, config, language_model, place, train_dataloader=data):
        same_training(found, given)


def evaluated_within_a_batch(config: Any, event: str, positions: int) -> tuple[Result, list[float], Tensor]:
    """A run in which a callback evaluates and predicts in each batch, on sentences of this length."""
    data = [{key: value[:, :positions] for key, value in sentences(4).items()}]
    losses: list[float] = []
    outputs: list[Any] = []

    def evaluate(state: State) -> None:
        losses.append(trainer.eval(data)["loss/eval/total"])
        outputs.extend(trainer.predict(data))

    options = {"train_dataloader": [sentences(5)] * 2, "callbacks": At(**{event: evaluate})}
    trainer, log = on_parts([], config, language_model(), **options)
    trainer.fit()
    return result_of(trainer, log), losses, torch.cat([one["logits"] for one in outputs])


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("event", "positions"), [("before_forward", 8), ("after_forward", 4), slow("before_backward", 8)]
)
def test_evaluations_in_a_callback_have_whole_sequences(world2: World, event: str, positions: int) -> None:
    """Of the length of training, and of that of a rank's part in training."""
    expected, losses, logits = evaluated_within_a_batch(None, event, positions)
    for found in world2(evaluated_within_a_batch, {"mesh": {"cp": 2}}, event, positions):
        same_training(found[0], expected)
        assert found[1] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found[2], logits, rtol=1e-4, atol=1e-5)


def resumed(folder: Any) -> None:
    """Averages of phases that have begun come back from a checkpoint, and those that have not begin later."""

    def run(duration: str, **options: Any) -> dict[str, Tensor]:
        model, ema = tagger(), EMA("2ba")
        saver = CheckpointSaver(folder, "1ba", asynchronous=False)
        options |= {"optimizers": momentum, "callbacks": [ema, FineTuningPhases(PHASES), saver]}
        trainer, _ = on_parts([4, 2], "fsdp", model, **options)
        trainer.fit(duration=duration)
        trainer.close()
        return whole(ema) | weights(model)

    first = run("1ba")
    assert len(first) == 7 + 2
    found = run("3ba", resume=True)
    folder = folder.with_name("whole")
    same(found, run("4ba"))


def test_averages_in_phases_resume_bit_for_bit(world2: World, tmp_path: Any) -> None:
    world2(resumed, tmp_path / "run")
