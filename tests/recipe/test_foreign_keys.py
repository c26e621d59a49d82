"""Keys of other libraries' configurations are told what they are called here."""

from pathlib import Path

import pytest

from composer_dist.cli.init import PRESETS
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.problems import ConfigurationError
from composer_dist.recipe.read import read_configuration
from composer_dist.trainer import load_schedule

pytestmark = pytest.mark.promise(109)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("learning_rate", "Here it is optimizer.lr"),
        ("lr", "Here it is optimizer.lr"),
        ("trainer.lr", "Here it is optimizer.lr"),
        ("optimizer.learning_rate", "Here it is optimizer.lr"),
        ("num_train_epochs", "Here it is trainer.max_duration, such as '3ep'"),
        ("trainer.max_epochs", "Here it is trainer.max_duration"),
        ("max_steps", "Here it is trainer.max_duration"),
        ("gradient_accumulation_steps", "Here it is trainer.device_train_microbatch_size"),
        ("trainer.accumulate_grad_batches", "Here it is trainer.device_train_microbatch_size"),
        ("per_device_train_batch_size", "Here it is data.batch_size"),
        ("bf16", "Here it is trainer.precision"),
        ("mixed-precision", "Here it is trainer.precision"),
        ("max_grad_norm", "Here it is trainer.gradient_clipping"),
        ("warmup_steps", "Here it is scheduler.t_warmup"),
        ("output_dir", "Here it is out"),
        ("logdir", "Here it is out"),
        ("loggers.file.logdir", "Here it is out"),
        ("save_steps", "Here it is checkpoints.interval"),
        ("trainer.save_interval", "Here it is checkpoints.interval"),
        ("eval_steps", "Here it is trainer.eval_interval"),
        ("resume_from_checkpoint", "Here it is resume: true"),
        ("dataloader_num_workers", "Here it is data.workers"),
        ("max_seq_length", "Here it is data.context"),
        ("gradient_checkpointing", "Here it is parallelism: {activation_checkpointing: true}"),
        ("devices", "composer-dist train ... -n 2"),
        ("model_name_or_path", "Here it is model.pretrained"),
        ("model.name", "Here it is model.pretrained"),
        ("use_cpu", "Here it is trainer.device: cpu"),
        ("trainer.limit_train_batches", "Here it is trainer.train_subset_num_batches"),
        ("ddp_find_unused_parameters", "Here it is parallelism: {ddp: "),
        ("metric_for_best_model", "Here it is checkpoints.monitor"),
        ("save_filename", "Here it is checkpoints.filename"),
        ("lora_rank", "Here it is model.adapter"),
        ("tp_size", "Here it is parallelism: {mesh: "),
        ("phases.ft_schedule", "Here it is phases.schedule"),
        ("trainer.num_labels", "Here it is model.num_labels"),
        ("push_to_hub", "Here it is not a key: the trained model is in `out`"),
        ("trainer.hub_model_id", "Here it is not a key: the trained model is in `out`"),
        ("trainer.label_smoothing_factor", "Here it is not a key: the model computes its loss"),
        ("dataloader_pin_memory", "Here it is automatic: batches are pinned"),
        ("data.persistent_workers", "Here it is not a key: of the options of torch's DataLoader"),
        ("ddp_backend", "Here it is automatic: each device has its backend"),
        ("ddp_timeout", "Here it is not a key: torch's timeouts hold"),
        ("trainer.profiler", "Here it is callbacks: {profiler: {}}"),
        ("trainer.sync_batchnorm", "Here it is parallelism: {ddp: {sync_batch_norm: true}}"),
        ("algorithms", "Here it is callbacks: a mapping of names to arguments"),
        ("checkpoints.save_weights_only", "Here it is checkpoints.weights_only"),
        ("data.packing", "Here it is data.packing, for data of kind chat"),
        ("scheduler.min_lr", "Here it is scheduler.alpha_f"),
        ("precision", "It belongs in trainer: write trainer.precision"),
        ("trainer.callbacks", "It belongs at the top of the file: callbacks"),
        ("data.classes", "unknown key 'classes'. Valid keys: batch_size, "),
        ("trainer.gradient_cliping", "Did you mean 'gradient_clipping'?"),
    ],
)
def test_a_key_of_another_library(key: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(PRESETS / "lora.yaml", [f"{key}=1"])
    assert f"{key}: unknown key '{key.rpartition('.')[2]}'. " in str(caught.value)
    assert said in str(caught.value)


def test_a_schedule_of_the_fine_tuning_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "schedule.yaml"
    file.write_text("0: {params: [head], max_transition_epoch: 3}\n1: {params: rest, new_optimizer: {}}\n")
    with pytest.raises(ParallelismValueError) as caught:
        load_schedule(file)
    assert "unknown key 'max_transition_epoch'. Here it is until, such as '2ep'" in str(caught.value)
    assert "unknown key 'new_optimizer'. One optimizer trains all phases." in str(caught.value)
    in_a_run = ["phases={schedule: {0: {params: head, patience: 3}, 1: {params: rest, new_optimizer: {}}}}"]
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(PRESETS / "vision.yaml", in_a_run)
    assert "phases.schedule.0.patience: unknown key 'patience'. It belongs in until: {metric:" in str(
        caught.value
    )
    assert "unknown key 'new_optimizer'. One optimizer trains all phases" in str(caught.value)


def test_arguments_of_the_users_own_functions_are_the_users() -> None:
    with pytest.raises(ConfigurationError, match="model.arguments.lr: unknown key 'lr'. Valid keys: width"):
        read_configuration(PRESETS / "vision.yaml", ["model.arguments.lr=1"])
