"""What users of transformers' trainers ask for; and, of theirs, the names that must not move."""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.distributed.tensor import DTensor

from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.integrations.transformers_arguments import read_parallelism
from tests.kit.hf_trainer import made, mixed
from tests.kit.huggingface import llama
from tests.kit.worker import forget_accelerate
from tests.kit.world import World

TP: dict[str, Any] = {"mesh": {"tp": 2}, "tp": {}}
pytestmark = pytest.mark.promise(120)
RANKS: dict[str, Any] = {"setup": "environment", "timeout": 120}


def refused(folder: str, **options: Any) -> str:
    with pytest.raises(ParallelismValueError) as error:
        made(folder, **options)
    return str(error.value)


def unread(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """A loss that is refused before it is called."""
    raise AssertionError


def refusals(folder: str) -> list[str]:
    given = {"bf16": True, "auto_find_batch_size": True, "torch_compile": True, "bf16_full_eval": True}
    found = [refused(folder, config="fsdp", trainer={"precision": "amp_bf16"}, **given)]
    trainer = made(folder, {"activation_checkpointing": True}, activation_checkpointing=True)
    with pytest.raises(ParallelismValueError) as error:
        trainer.train()
    trainer = made(folder, TP, average_tokens_across_devices=False, train_sampling_strategy="batch_rebalance")
    with pytest.raises(ParallelismValueError) as other:
        trainer.train()
    assert not any(isinstance(one, DTensor) for one in trainer.model.parameters())
    trainer = made(folder, "fsdp", optim="adafactor")
    with pytest.raises(ParallelismValueError) as unable:
        trainer.train()
    own = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    trainer = made(folder, {"mesh": {"cp": 2}}, trainer={"compute_loss_func": unread}, **own)
    with pytest.raises(ParallelismValueError) as parts:
        trainer.train()
    return [*found, *(str(one.value) for one in (error, other, unable, parts))]


def test_what_two_would_do_is_refused_by_name_on_every_rank(world2: World, tmp_path: Path) -> None:
    first, second = world2(refusals, str(tmp_path), **RANKS)
    assert first == second
    names = ("bf16=False", "auto_find_batch_size", "torch_compile", "bf16_full_eval")
    assert all(name in first[0] for name in names), first[0]
    assert "activation_checkpointing" in first[1]
    assert "average_tokens_across_devices" in first[2]
    assert "batch_rebalance" in first[2]
    assert "Adafactor cannot step on sharded parameters" in first[3]
    for name in ("label_smoothing_factor", "compute_loss_func", "neftune_noise_alpha"):
        assert name in first[4]


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"is_deepspeed_enabled": True}, "leave out args.deepspeed"),
        ({"is_fsdp_enabled": True}, "leave it out"),
        ({"is_distributed_loading_by_transformers": True}, "load it without"),
        ({"parallelism": None}, "parallelism=FSDP2Config()"),
        ({"n_gpu": 2}, "torchrun"),
        ({"fp16": True}, "use bf16"),
        ({"accumulate": "both"}, "'sharded' or 'unsharded', not 'both'"),
        ({"parallelism_config": "theirs"}, "describe the mesh in parallelism="),
    ],
)
def test_every_conflict_has_a_remedy(asked: dict[str, Any], remedy: str) -> None:
    from composer_dist.integrations.transformers_arguments import conflicts

    flags = (
        "is_deepspeed_enabled is_fsdp_enabled is_distributed_loading_by_transformers auto_find_batch_size "
    )
    flags += "fsdp fp16 bf16 fp16_full_eval bf16_full_eval torch_compile precision parallelism_config"
    nothing = dict.fromkeys(flags.split()) | {"n_gpu": 1, "parallelism": "fsdp", "accumulate": "sharded"}

    def found(**given: Any) -> list[str]:
        one = SimpleNamespace(**(nothing | given))
        one.args = one
        return [*conflicts(one)]

    assert found() == []
    [fault] = found(**asked)
    assert remedy in fault


def parsed(folder: str, *words: str) -> Any:
    """The parallelism of a trainer whose arguments come from the command line or a file."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    from composer_dist.integrations.transformers import ParallelArguments

    cls = dataclass(type("Arguments", (ParallelArguments, TrainingArguments), {}))
    parser = HfArgumentParser(cls)
    fixed = {"output_dir": folder, "use_cpu": True, "report_to": "none"}
    if words[0].endswith(".yaml"):
        [args] = parser.parse_yaml_file(words[0])
    else:
        line = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
        [args] = parser.parse_args_into_dataclasses([*line, *words])
    forget_accelerate()
    trainer = mixed(Trainer)(model=llama(), args=args)
    return trainer.parallelism, trainer.weights, trainer.precision


def test_arguments_and_files_give_the_parallelism(tmp_path: Path) -> None:
    wanted = {"mesh": {"tp": 2}, "tp": {}}
    (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(wanted))
    folder = str(tmp_path)
    assert parsed(folder, "--parallelism", "fsdp", "--precision", "amp_bf16") == ("fsdp", None, "amp_bf16")
    assert parsed(folder, "--parallelism", json.dumps(wanted), "--weights", "w") == (wanted, "w", None)
    assert parsed(folder, "--parallelism", str(tmp_path / "mesh.yaml"))[0] == wanted
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        yaml.safe_dump({"output_dir": folder, "use_cpu": True, "report_to": "none", "parallelism": wanted})
    )
    assert parsed(folder, str(run_file))[0] == wanted


def test_transformers_has_what_the_mixin_overrides() -> None:
    from transformers import Trainer

    from composer_dist.integrations.transformers import ComposerDistMixin
    from composer_dist.integrations.transformers_arguments import OVERRIDDEN
    from composer_dist.integrations.transformers_loss import ChunkedLossMixin

    members = vars(ChunkedLossMixin) | vars(ComposerDistMixin)
    own = {name: value for name, value in members.items() if inspect.isfunction(value)}
    assert sorted(OVERRIDDEN) == sorted(name for name in {*own} - {"__init__"} if hasattr(Trainer, name))
    for name in OVERRIDDEN:
        expected = inspect.signature(getattr(Trainer, name)).parameters
        assert [*inspect.signature(own[name]).parameters] == [*expected], f"Trainer.{name}"


def test_a_transformers_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    from composer_dist.integrations.transformers_arguments import check_version

    check_version()
    monkeypatch.delattr(Trainer, "_sync_replicated_trainable_parameters")
    with pytest.raises(ParallelismRuntimeError, match=r"no Trainer\._sync_replicated_trainable_parameters"):
        check_version()


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("__init__", "self._move_model_to_device(model, args.device)"),
        ("_prepare_for_training", "if self.is_distributed_loading_by_transformers:"),
        ("_prepare_for_training", "self.accelerator.prepare_model(model, device_placement=False, eval"),
        ("_prepare_for_training", "self._sync_replicated_trainable_parameters(model)"),
        ("_prepare_for_training", "self._load_optimizer_and_scheduler(resume_from_checkpoint)"),
        ("_run_epoch", "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)"),
        ("_run_epoch", "self._clip_grad_norm(model)"),
        ("_run_epoch", "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)"),
        ("_save_checkpoint", "self.save_model(output_dir, _internal_call=True)"),
        ("_save_checkpoint", "self._save_optimizer_and_scheduler(output_dir)"),
        ("_save_checkpoint", "self._save_rng_state(output_dir)"),
        ("_get_dataloader", "self.accelerator.prepare(DataLoader("),
        ("_get_num_items_in_batch", "self.get_tp_size() * self.get_cp_size()"),
        ("compute_loss", "self.accelerator.num_processes // self.get_tp_size()"),
        ("evaluation_loop", "self.gather_function("),
        ("train", "self._load_from_checkpoint(resume_from_checkpoint)"),
        ("save_model", "self._save(output_dir)"),
        ("_finalize_training", "self._load_best_model()"),
    ],
)
def test_transformers_calls_what_the_mixin_overrides(method: str, text: str) -> None:
    from transformers import Trainer

    assert text in inspect.getsource(getattr(Trainer, method)), f"Trainer.{method} has no {text}"


def test_accelerate_has_what_the_mixin_uses() -> None:
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState

    for shard in (BatchSamplerShard, IterableDatasetShard):
        assert {"num_processes", "process_index"} <= {*inspect.signature(shard).parameters}
    assert "self.optimizer = optimizer" in inspect.getsource(AcceleratedOptimizer.__init__)
    assert {"end_of_dataloader", "remainder", "sync_gradients"} <= {*dir(GradientState())}


def test_trl_has_what_the_mixin_uses() -> None:
    trl = pytest.importorskip("trl", reason="TRL is an extra")
    assert "self.ref_model = " in inspect.getsource(trl.DPOTrainer.__init__)
    assert "self.reward_funcs = " in inspect.getsource(trl.GRPOTrainer.__init__)
    loss = inspect.getsource(trl.SFTTrainer.compute_loss)
    assert ("self.get_tp_size()" in loss) == ("// self._tp_size" in loss)  # TRL 1.0 has neither
    for trainer in (trl.SFTTrainer, trl.DPOTrainer):
        assert "super().training_step(" in inspect.getsource(trainer.training_step)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("fsdp2: {")
    wrong = {tmp_path / "none.yaml": "No such file", tmp_path / "bad.yaml": "expected", "{fsdp2: [": "line 1"}
    for wanted, why in wrong.items():
        with pytest.raises(ParallelismValueError, match=f"parallelism='.*' cannot be read: .*{why}"):
            read_parallelism(wanted)
