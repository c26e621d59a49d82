"""A run that is killed and started again ends with the bits of one that was not."""

from pathlib import Path

import pytest

from composer_dist.cli.init import PRESETS
from tests.kit.compare import same
from tests.kit.grids import in_the_default_run
from tests.kit.scripts.recipes import EVERY, trained
from tests.kit.world import WorkerError, World

pytestmark = pytest.mark.promise(106)

RUN = ["trainer.max_duration=5ba", "trainer.eval_interval=2ba", "export=false", "checkpoints.interval=2ba"]
TEXT = ["data.batch_size=2", "data.context=32", "data.held_out=4"]


@pytest.mark.promise(100)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", in_the_default_run("masked_lm", among=EVERY))
def test_killed_runs_resume_to_the_bits_of_whole_ones(name: str, world2: World, tmp_path: Path) -> None:
    if name == "qlora":
        pytest.importorskip("torchao", reason="NF4 is torchao's; it is an extra")
    file = PRESETS / f"{name}.yaml"
    run = [*RUN, *(TEXT if name != "vision" else [])]
    expected, _ = world2(trained, file, *run, f"out={tmp_path}/whole")
    assert (len(expected["weights"]) > 1, expected["began"]) == (True, 0)
    # Written at once: else the end may come before the checkpoint is complete.
    killed = [*run, f"out={tmp_path}/killed", "checkpoints.asynchronous=false"]
    with pytest.raises(WorkerError):
        world2(trained, file, *killed, "callbacks={tests.kit.scripts.recipes.KillAt: {batch: 3}}")
    found, _ = world2(trained, file, *killed)
    assert found["began"] == 2
    same(found["weights"], expected["weights"])


def test_a_finished_run_is_not_begun_anew_in_the_same_folder(world1: World, tmp_path: Path) -> None:
    file = PRESETS / "vision.yaml"
    run = [f"out={tmp_path}", "trainer.max_duration=1ba", "trainer.eval_interval=null"]
    world1(trained, file, *run)
    with pytest.raises(WorkerError, match="has checkpoints of an earlier run; remove it, choose another"):
        world1(trained, file, *run, "resume=false")
