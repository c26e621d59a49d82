"""What the keys of other libraries' configurations are called here, and where misplaced keys belong.

From transformers' TrainingArguments, Lightning's Trainer, Composer's and LLM Foundry's YAML, accelerate,
DeepSpeed and the Fine-Tuning Scheduler.
"""

from collections.abc import Mapping
from functools import cache

from composer_dist.recipe.outline import names_of
from composer_dist.recipe.schema import Run

_BATCH = "data.batch_size: samples in a step across all ranks"
_MICROBATCH = (
    "trainer.device_train_microbatch_size: samples in one forward of a rank (data.batch_size: in a step)"
)
_PRECISION = "trainer.precision: fp32, amp_bf16, amp_fp16 or amp_fp8"
_LENGTH = "trainer.max_duration, such as '3ep', '1000ba' or '2h'"
_WARMUP = "scheduler.t_warmup, such as '100ba' or '0.1dur', of scheduler.name: cosine, linear or constant"
_OUT = "out: the folder of the run"
_EVALUATION = "trainer.eval_interval, such as '1ep' or '100ba'"
_SAVING = "checkpoints.interval, such as '1ep' or '100ba'"
_LOGGING = "the interval of a logger, such as loggers.file.interval or loggers.console.interval"
_RANKS = "the command line's: composer-dist train ... -n 2, or torchrun"
_RESUME = "resume: true resumes this run; resume: {load_path: ...} starts from another checkpoint"
_CLIPPING = "trainer.gradient_clipping: a norm, or {norm: ..., value: ...}"

_NAMES: dict[str, tuple[str, ...]] = {
    "optimizer.lr": ("learning_rate", "lr", "base_lr", "max_lr", "peak_lr"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.betas: [0.9, 0.999]": ("betas", "adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optimizer.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "optimizer.name": ("optim", "optimizers", "optimizer_name", "optimizer_type"),
    "optimizer.foreach or optimizer.fused": ("optim_args", "optimizer_kwargs"),
    "scheduler.name: cosine, linear, constant or one_cycle": (
        "lr_scheduler_type",
        "lr_scheduler",
        "schedulers",
        "lr_scheduler_kwargs",
        "scheduler_type",
    ),
    _WARMUP: (
        "warmup_steps", "warmup_ratio", "t_warmup", "num_warmup_steps",
        "warmup", "warmup_epochs", "warmup_iters",
    ),
    _LENGTH: (
        "num_train_epochs", "max_epochs", "num_epochs", "epochs", "n_epochs", "max_steps", "num_steps",
        "max_train_steps", "train_steps", "max_iters", "max_time", "min_epochs", "min_steps", "max_tokens",
        "steps", "fast_dev_run", "overfit_batches",
    ),
    _BATCH: (
        "per_device_train_batch_size", "train_batch_size", "global_train_batch_size", "batch_size",
        "device_train_batch_size", "per_gpu_train_batch_size", "global_batch_size",
    ),
    "data.batch_size, which evaluation uses too": (
        "per_device_eval_batch_size", "eval_batch_size", "device_eval_batch_size", "val_batch_size",
    ),
    _MICROBATCH: (
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "microbatch_size",
        "micro_batch_size", "train_micro_batch_size_per_gpu", "auto_find_batch_size",
    ),
    _PRECISION: (
        "bf16", "fp16", "fp8", "amp", "mixed_precision",
        "half_precision_backend", "tf32", "precision_config",
    ),
    "model.dtype": ("torch_dtype", "dtype"),
    _CLIPPING: (
        "max_grad_norm", "gradient_clip_val", "gradient_clip_algorithm", "clip_grad_norm",
        "clip_grad", "grad_clip",
    ),
    _OUT: (
        "output_dir", "save_folder", "default_root_dir", "logdir", "log_dir", "logging_dir", "run_name",
        "run_dir", "experiment_name", "overwrite_output_dir", "save_overwrite",
    ),
    _LOGGING: ("logging_steps", "log_every_n_steps", "log_interval", "console_log_interval", "log_every"),
    "loggers: {console: {}}": ("log_to_console", "report_to", "logger"),
    "trainer.progress_bar": ("enable_progress_bar", "disable_tqdm"),
    _SAVING: (
        "save_steps", "save_interval", "save_strategy", "checkpoint_interval",
        "every_n_train_steps", "save_every",
    ),
    "checkpoints.keep": ("save_total_limit", "save_num_checkpoints_to_keep"),
    "checkpoints.save_top_k, with checkpoints.monitor": ("save_top_k",),
    "checkpoints.monitor": ("load_best_model_at_end", "metric_for_best_model"),
    "trainer.train_subset_num_batches": ("limit_train_batches", "train_subset_num_batches"),
    "trainer.eval_subset_num_batches": ("limit_val_batches", "eval_subset_num_batches"),
    "checkpoints: null saves nothing": ("enable_checkpointing",),
    _EVALUATION: (
        "eval_steps", "eval_strategy", "evaluation_strategy", "val_check_interval", "check_val_every_n_epoch",
        "eval_every", "eval_iters",
    ),
    "data.held_out: samples to evaluate on": (
        "validation_split", "val_size", "test_size",
        "val_set_size", "do_eval",
    ),
    _RESUME: ("resume_from_checkpoint", "ckpt_path", "load_path", "autoresume", "load_weights_only"),
    "data.workers": ("dataloader_num_workers", "num_workers"),
    "data.context: tokens in a sample": (
        "max_seq_length", "max_seq_len", "block_size", "seq_len", "seq_length", "model_max_length",
        "sequence_len", "cutoff_len",
    ),
    "data.source": ("dataset", "dataset_name", "train_file", "train_dataset", "dataset_path", "datasets"),
    "parallelism: {activation_checkpointing: true}": (
        "gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing_kwargs", "ac_mode",
    ),
    "parallelism: {compile: true}": (
        "torch_compile", "compile_config", "torch_compile_mode", "torch_compile_backend",
    ),
    "parallelism: a strategy such as fsdp, hsdp, tp or ddp, or the fields of a ParallelismConfig": (
        "fsdp", "fsdp_config", "fsdp2_config", "strategy", "deepspeed", "ddp", "parallelism_config",
    ),
    _RANKS: (
        "devices", "num_nodes", "num_processes", "nproc_per_node", "world_size",
        "gpus", "n_gpu", "num_machines",
    ),
    "trainer.device": ("accelerator",),
    "trainer.device: cpu": ("use_cpu", "no_cuda"),
    "checkpoints.filename": ("save_filename",),
    "checkpoints.latest": ("save_latest_filename",),
    "checkpoints.asynchronous": ("save_checkpoint_async",),
    "parallelism: {mesh: {dp_shard: ..., dp_replicate: ..., tp: ..., cp: ...}}": (
        "tp_size", "cp_size", "dp_size", "tensor_parallel_degree", "data_parallel_shard_degree",
    ),
    "parallelism: {ddp: {...}}: composer-dist keys parallelism.ddp": (
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph", "ddp_broadcast_buffers",
    ),
    "parallelism: {fsdp2: {...}}: composer-dist keys parallelism.fsdp2": (
        "fsdp_sharding_strategy", "fsdp_offload_params", "zero_optimization",
    ),
    "parallelism: {ddp: {sync_batch_norm: true}}": ("sync_batchnorm", "sync_bn"),
    "not a key: the trained model is in `out`, and huggingface_hub can upload it": (
        "push_to_hub", "push_to_hub_model_id", "hub_model_id", "hub_strategy", "hub_token",
        "hub_private_repo", "hub_revision", "hub_always_push",
    ),
    "callbacks: a mapping of names to arguments": ("algorithms",),
    "checkpoints.weights_only: true, or final": ("save_weights_only", "save_only_model"),
    "data.packing, for data of kind chat; texts are cut without padding": ("packing", "sample_packing"),
    "data.loss_on": ("assistant_only_loss", "completion_only_loss", "train_on_inputs"),
    "model.num_labels": ("num_labels",),
    "not a key: the model computes its loss": ("label_smoothing_factor", "label_smoothing"),
    "automatic: batches are pinned where there is an accelerator": ("dataloader_pin_memory", "pin_memory"),
    "not a key: of the options of torch's DataLoader there is data.workers": (
        "dataloader_prefetch_factor", "dataloader_persistent_workers", "prefetch_factor",
        "persistent_workers",
    ),
    "automatic: each device has its backend, such as gloo or nccl": ("ddp_backend", "process_group_backend"),
    "not a key: torch's timeouts hold": ("ddp_timeout", "dist_timeout"),
    "callbacks: {profiler: {}}": ("profiler",),
    "scheduler.alpha_f: the last learning rate as a share of optimizer.lr": (
        "min_lr", "min_lr_ratio", "eta_min",
    ),
    "loggers.wandb.project": ("wandb_project",),
    "a key of model.config": ("model_type", "n_layer"),
    "trainer.deterministic": ("deterministic_mode", "full_determinism"),
    "seed": ("data_seed", "seed_everything", "global_seed"),
    "model.pretrained": (
        "model_name_or_path", "model_name", "pretrained_model_name_or_path", "base_model", "checkpoint",
    ),
    "model.pretrained for a model, out for a run": ("name",),
    "model.tokenizer": ("tokenizer_name", "tokenizer_name_or_path"),
    "model.adapter, such as {method: lora, r: 8}": (
        "peft_config", "lora", "peft", "lora_r", "lora_alpha", "lora_rank", "lora_dropout",
        "lora_target_modules",
        "target_modules", "use_peft", "use_lora",
    ),
    "model.quantize: nf4": ("load_in_4bit", "quantization_config", "load_in_8bit"),
    "callbacks.early_stopping": (
        "early_stopping_patience", "early_stopping",
    ),
    "callbacks.early_stopping.mode: min or max": ("greater_is_better",),
    "phases.schedule": ("ft_schedule", "finetuning_schedule", "schedule"),
    "phases.frozen_batch_norm": ("frozen_bn_track_running_stats",),
    "phases.apply_lambdas": ("apply_lambdas_new_pgs",),
    "the lr of each phase in phases.schedule": ("base_max_lr",),
    "the last phase of phases.schedule": ("max_depth",),
    "until of each phase in phases.schedule: '2ep', or {metric: loss/eval/total, patience: 2}": (
        "max_transition_epoch", "epoch_transitions_only",
    ),
    "phases.write_to: a file for the schedule": ("gen_ft_sched_only",),
}  # fmt: skip
KEYS: Mapping[str, str] = {name: here for here, names in _NAMES.items() for name in names}
"""A key of another library to what it is called here."""


def hint(name: str, section: str) -> str:
    """The sentence about a key that a section does not have, with a space before it; "" if nothing is known.

    Args:
        name: the key.
        section: the section in which it was written; empty for the top.
    """
    if here := KEYS.get(name.lower().replace("-", "_")):
        return f" Here it is {here}."
    if section and name in Run.model_fields:
        return f" It belongs at the top of the file: {name}."
    found = next((one for one, names in _sections().items() if one != section and name in names), None)
    return f" It belongs in {found}: write {found}.{name}." if found else ""


@cache
def _sections() -> dict[str, set[str]]:
    """The keys of the sections in which one could belong."""
    kinds: dict[str, tuple[str, ...]] = {
        "trainer": ("Trainer",),
        "data": ("TextData", "LabeledData", "FunctionData"),
        "model": ("HubModel", "ModuleModel"),
        "checkpoints": ("CheckpointSaver",),
        "phases": ("FineTuningPhases",),
        "resume": ("Resume",),
        "parallelism": ("ParallelismConfig",),
    }
    return {section: names_of(*some) for section, some in kinds.items()}
