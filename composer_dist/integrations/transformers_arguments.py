"""What a user of transformers' Trainer asks for: where it is given, and what excludes what."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import transformers
import yaml

from composer_dist.distributed import ParallelPlan
from composer_dist.distributed.training.gradients import Accumulate
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

OVERRIDDEN = (
    *("_clip_grad_norm", "_defer_fsdp_gradient_reduction", "_get_dataloader", "_get_grad_norm"),
    *("_inner_training_loop", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    *("_move_model_to_device", "_save", "_save_optimizer_and_scheduler", "_save_rng_state"),
    *("_sync_replicated_trainable_parameters", "_track_num_input_tokens", "compute_loss", "evaluation_loop"),
    *("floating_point_ops", "get_cp_size", "get_tp_size", "prediction_step", "train", "training_step"),
)
"""The methods of transformers' Trainer that ComposerDistMixin overrides; most are private."""

_log = logging.getLogger("composer_dist")


@dataclass
class ParallelArguments:
    """Fields to add to `TrainingArguments` or TRL's configurations, for the command line and YAML.

    ```python
    @dataclass
    class Arguments(ParallelArguments, SFTConfig): ...
    ```
    """

    parallelism: dict | str | None = field(  # type: ignore[type-arg]  # the form that transformers' parser reads
        default=None,
        metadata={
            "help": "How the model is made parallel: keys of ParallelismConfig, a strategy, or a file."
        },
    )
    weights: str | None = field(
        default=None, metadata={"help": "Safetensors or a checkpoint that fill the prepared model."}
    )
    precision: str | None = field(
        default=None, metadata={"help": "The dtype of the computation, such as amp_bf16; then bf16 is false."}
    )
    chunked_loss: bool = field(
        default=True,
        metadata={"help": "Compute the model's loss without all logits, where nobody reads them."},
    )
    accumulate: str = field(
        default="sharded",
        metadata={"help": "unsharded reduces gradients once a step, and holds whole ones until then."},
    )


def read_parallelism(wanted: Any) -> Any:
    """A configuration from a YAML or JSON file, or from JSON on the command line; others unchanged.

    Raises:
        ParallelismValueError: it cannot be read.
    """
    try:
        if isinstance(wanted, str) and wanted.lstrip().startswith("{"):
            return yaml.safe_load(wanted)
        if isinstance(wanted, (str, PathLike)) and Path(wanted).suffix in (".yaml", ".yml", ".json"):
            return yaml.safe_load(Path(wanted).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ParallelismValueError(f"parallelism={str(wanted)!r} cannot be read: {why}.") from error
    return wanted


def conflicts(trainer: Any) -> Iterator[str]:
    """What the trainer's arguments ask for that the preparation does, or that it excludes."""
    args, precision = trainer.args, trainer.precision
    if trainer.parallelism is None:
        yield "no parallelism is given; pass parallelism=FSDP2Config(), or set it in args."
    if trainer.accumulate not in get_args(Accumulate):
        yield f"accumulate must be 'sharded' or 'unsharded', not {trainer.accumulate!r}."
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed shards the model too; leave out args.deepspeed, or the mixin."
    if trainer.is_fsdp_enabled or args.fsdp:
        yield "args.fsdp, or accelerate's configuration, shards the model too; leave it out."
    if args.parallelism_config is not None:
        yield "args.parallelism_config is accelerate's; describe the mesh in parallelism= instead."
    if trainer.is_distributed_loading_by_transformers:
        yield "from_pretrained(distributed_config=...) has sharded the model; load it without."
    if args.n_gpu > 1:
        yield f"this process has {args.n_gpu} GPUs, which is DataParallel; start one for each with torchrun."
    if args.auto_find_batch_size:
        yield "args.auto_find_batch_size retries on single ranks; set per_device_train_batch_size."
    if args.torch_compile:
        yield "args.torch_compile compiles around the units; use ParallelismConfig(compile=True)."
    if args.fp16:
        yield "args.fp16 scales the loss of each rank separately; use bf16, or precision='amp_bf16'."
    if args.bf16 and precision is not None:
        yield f"args.bf16 and precision={str(precision)!r} both cast; set bf16=False, or leave out precision."
    if args.fp16_full_eval or args.bf16_full_eval:
        yield "args.fp16_full_eval and args.bf16_full_eval cast the sharded model; leave them out."


def conflicts_with_plan(trainer: Any, plan: ParallelPlan) -> Iterator[str]:
    """What the trainer's arguments ask for that this plan does, or that it excludes."""
    args = trainer.args
    if plan.checkpointing and args.activation_checkpointing:
        yield (
            "args.activation_checkpointing (gradient_checkpointing in TRL, True by default there) and the "
            "parallelism both recompute activations; keep one."
        )
    if plan.mesh["tp"] * plan.mesh["cp"] == 1:
        return
    if hasattr(trainer, "reward_funcs"):
        yield "each rank samples its own completions, which ranks of tp and cp would have to share; use dp."
    if args.train_sampling_strategy == "batch_rebalance":
        yield "args.train_sampling_strategy='batch_rebalance' gives every rank other rows; not with tp or cp."
    if not args.average_tokens_across_devices:
        yield "args.average_tokens_across_devices must be True with tp or cp."
    if args.eval_use_gather_object:
        yield "args.eval_use_gather_object would repeat rows with tp or cp; leave it out."
    if plan.mesh["cp"] > 1:
        yield from _conflicts_with_parts(trainer)


def _conflicts_with_parts(trainer: Any) -> Iterator[str]:
    """What computes something else from a part of each sequence, which is what a rank of cp has."""
    if trainer.args.label_smoothing_factor:
        yield "args.label_smoothing_factor would compare a part's logits with other labels; not with cp."
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func would see a part of the logits and labels; use the model's own loss with cp."
    if trainer.args.neftune_noise_alpha is not None:
        yield "args.neftune_noise_alpha would add the noise of shorter sequences; not with cp."
    losses = (cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    of_trl = [cls.__name__ for cls in losses if cls.__module__.startswith("trl.")]
    if theirs := [name for name in of_trl if name != "SFTTrainer"]:
        yield f"the loss of {theirs[0]} compares whole sequences, of which ranks of cp have parts; use cp=1."


def newest_complete(folder: str | None) -> str | bool:
    """The newest checkpoint with `trainer_state.json`, which is written last; True if there is none."""
    found = Path(folder or ".").glob("checkpoint-*")
    numbered = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]
    for path in sorted(numbered, key=lambda path: -int(path.name.split("-")[1])):
        if (path / "trainer_state.json").exists():
            return str(path)
        _log.warning("Skipping %s: it is not complete.", path)
    return True


def weights_in(checkpoint: str, model: Any) -> list[Path]:
    """The folders with a checkpoint's weights: itself, and those of adapters that are not named "default"."""
    named = [Path(checkpoint, name) for name in getattr(model, "peft_config", ()) if name != "default"]
    inside = [folder for folder in named if any(folder.glob("adapter_model.*"))]
    alone = inside and not any(Path(checkpoint).glob("adapter_model.*"))
    return inside if alone else [Path(checkpoint), *inside]


def check_version() -> None:
    """Raise a ParallelismRuntimeError where transformers lacks what the mixin overrides."""
    if missing := [name for name in OVERRIDDEN if not hasattr(transformers.Trainer, name)]:
        raise ParallelismRuntimeError(
            f"transformers {transformers.__version__} has no Trainer.{', no Trainer.'.join(missing)}, which "
            "ComposerDistMixin overrides. Use transformers 5.23, with which it was tested."
        )
