"""transformers' Trainer, and the trainers of TRL that inherit from it, on models of `parallelize_model`.

transformers has a way for models that it has sharded itself while loading them: accelerate then leaves the
model alone, and every rank takes part in saving. The mixin takes that way, and overrides the methods that
depend on how the model is distributed.
"""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_NAMES

from composer_dist import checkpoint as states
from composer_dist.config.parallelism import Config
from composer_dist.distributed import (
    ParallelPlan,
    Preparation,
    accumulate,
    clip_grad_norm,
    context_parallel,
    parallelize_model,
    plan_parallelism,
)
from composer_dist.distributed.training.gradients import Accumulate
from composer_dist.errors import Faults, ParallelismError
from composer_dist.integrations.accelerate_rows import gather_once, rows_that_count, share_rows, with_rows
from composer_dist.integrations.transformers_arguments import (
    ParallelArguments,
    check_version,
    conflicts,
    conflicts_with_plan,
    newest_complete,
    read_parallelism,
    weights_in,
)
from composer_dist.integrations.transformers_loss import ChunkedLossMixin, base_model
from composer_dist.models.adapters import frozen_base
from composer_dist.precision import Precision
from composer_dist.structure.families import is_a

__all__ = ["ComposerDistMixin", "ParallelArguments"]

FOLDER = "composer_dist"
"""Inside of `checkpoint-N/`: what resuming needs of the model, the optimizer and the scheduler."""


class ComposerDistMixin(ChunkedLossMixin):
    """Trains with `parallelize_model` in transformers' Trainer, or in one that inherits from it.

    ```python
    class SFT(ComposerDistMixin, SFTTrainer): ...


    trainer = SFT(model=model, args=args, train_dataset=samples, parallelism=FSDP2Config())
    ```

    The model is prepared when it is first needed: in `train`, `evaluate`, `predict` and `save_model`, which
    every rank calls. Each argument may be an attribute of `args` instead; see `ParallelArguments`.

    Args:
        *given: as for the trainer.
        parallelism: whatever `parallelize_model` takes, or the path of a YAML or JSON file with its keys.
        weights: what fills the prepared model, for one that was built under `init_context`.
        precision: the dtype of the computation; not together with the trainer's own `bf16`.
        chunked_loss: compute the model's loss without all logits; see `HuggingFaceModel`.
        accumulate: "unsharded" reduces gradients once a step, not in each microbatch, and holds whole ones.
        **named: as for the trainer.

    Raises:
        ParallelismValueError: `args` ask for what this excludes; all such arguments are named.
        ParallelismRuntimeError: this version of transformers has no method that is overridden here.
    """

    preparation: Preparation | None = None
    """The account of what was done to the model; None until it is prepared."""
    _whole_batches = True
    """False where a rank has its part of each sequence only: inside of `context_parallel`."""
    _gather: Callable[..., Any]
    if TYPE_CHECKING:  # never None after the constructor, or once they are used
        model: Any
        label_smoother: Any
        optimizer: Any
        lr_scheduler: Any

    def __init__(
        self,
        *given: Any,
        parallelism: Config | ParallelPlan | None = None,
        weights: str | os.PathLike[str] | None = None,
        precision: str | Precision | None = None,
        chunked_loss: bool | int | None = None,
        accumulate: Accumulate | None = None,
        **named: Any,
    ) -> None:
        check_version()
        super().__init__(*given, **named)

        def wanted(name: str, value: Any, default: Any = None) -> Any:
            return getattr(self.args, name, default) if value is None else value

        self.parallelism = read_parallelism(wanted("parallelism", parallelism))
        self.weights = wanted("weights", weights)
        self.precision = wanted("precision", precision)
        self.chunked_loss = wanted("chunked_loss", chunked_loss, True)
        self.accumulate = wanted("accumulate", accumulate, "sharded")
        with Faults(f"{type(self).__name__}: ") as faults:
            faults += conflicts(self)
        self.is_distributed_loading_by_transformers = True

    def parallelize(self) -> Preparation:
        """Prepare the model and its optimizer, and a reference model, unless that is done; on every rank."""
        if self.preparation is not None and self.preparation.model is self.model:
            return self.preparation
        config, plan = self.parallelism, self._plan()
        if self.label_smoother is not None and type(self.model).__name__ in CAUSAL_NAMES.values():
            # FSDP2 renames the class, by which the Trainer decides whether labels are shifted.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        if self.optimizer is None and self.train_dataset is not None:
            made = self.create_optimizer()
            if plan is not None and (plan.mesh["tp"] > 1 or (plan.units and plan.plain)):
                for group in made.param_groups:  # no kernel takes shards of several kinds
                    group.update({"fused": None} if group.get("fused") else {})
        self.preparation = parallelize_model(
            self.model, plan or config, self._optimizer(), self.precision, weights=self.weights
        )
        plan = self.preparation.plan
        self._tp_size = plan.mesh["tp"]  # by which TRL divides its count of tokens
        if isinstance(reference := getattr(self, "ref_model", None), nn.Module) and not plan.replication:
            parallelize_model(reference, config, precision=self.precision)
        base = base_model(self.model)
        if hasattr(base, "generate"):
            base._is_fsdp_managed_module = bool(plan.units)  # its ranks then wait for the slowest
        return self.preparation

    def _plan(self) -> ParallelPlan | None:
        """The plan, or None where it fails, because `parallelize_model` raises the error on every rank."""
        plan = self.parallelism
        if not isinstance(plan, ParallelPlan):
            try:
                plan = plan_parallelism(self.model, plan, precision=self.precision)
            except ParallelismError:
                return None
        with Faults(f"{type(self).__name__}: ") as faults:
            faults += conflicts_with_plan(self, plan)
        return plan

    def _optimizer(self) -> Optimizer | None:
        optimizer: Optimizer | None = self.optimizer
        return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer

    # What accelerate and the Trainer would do to the model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the preparation moves what each rank holds."""

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: the preparation averages gradients of parameters that stay whole."""

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return nullcontext()  # `training_step` does it

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        self.parallelize()
        return super()._inner_training_loop(
            batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward; the last of a step's microbatches reduces the gradients."""
        last = self.accelerator.sync_gradients
        with accumulate(model, last, self.accumulate), context_parallel(model, inputs) as part:
            self._whole_batches = part is inputs
            try:
                return super().training_step(model, part, num_items_in_batch)
            finally:
                self._whole_batches = True

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return clip_grad_norm(model, math.inf) if grad_norm is None else grad_norm

    # Data: ranks of tp and cp share their rows

    def get_tp_size(self) -> int:
        """How many ranks compute the same loss."""
        sizes = self.preparation.plan.mesh if self.preparation else {"tp": 1, "cp": 1}
        return sizes["tp"] * (sizes["cp"] if self._whole_batches else 1)

    def get_cp_size(self) -> int:
        """How many ranks compute parts of the same loss."""
        return self.preparation.plan.mesh["cp"] if self.preparation and not self._whole_batches else 1

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        mesh = self.parallelize().mesh
        loader = super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )
        share_rows(
            loader, mesh, self.accelerator, f"The {description.lower()} set, a {type(dataset).__name__},"
        )
        return loader

    @property
    def gather_function(self) -> Callable[..., Any]:
        """Gathers results of evaluation, each row once."""
        return self._gather if self.get_tp_size() == 1 else self._gather_once

    @gather_function.setter
    def gather_function(self, function: Callable[..., Any]) -> None:
        self._gather = function

    def _gather_once(self, values: Any) -> Any:
        return gather_once(values, self.parallelize().mesh, self.accelerator)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's part of what the Trainer counts and adds up over the ranks."""
        return super().floating_point_ops(inputs) // self.get_tp_size()

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As the Trainer's, on the prepared model."""
        self.parallelize()
        return super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As the Trainer's; copies of rows that fill the last batch do not count in its loss."""
        mesh, size = self.parallelize().mesh, self.args.eval_batch_size
        counting, rows, weight = rows_that_count(inputs, mesh, self.accelerator, size)
        part = with_rows(inputs, rows, counting or rows)
        if self._by_token(prediction_loss_only) and not counting and "labels" in part:
            part = {**part, "labels": torch.full_like(part["labels"], -100)}
        loss, *results = super().prediction_step(model, part, prediction_loss_only, ignore_keys)
        if loss is not None and weight is not None:
            # The Trainer copies each rank's loss as if its batch were full, so all have the mean.
            if not self._by_token(prediction_loss_only):  # the first loss may have told
                loss = loss * weight if counting else torch.zeros_like(loss)
            loss = self.accelerator.reduce(loss, "mean")
        return loss, *(with_rows(one, counting, rows) for one in results)

    def _by_token(self, only_loss: bool) -> bool:
        """Whether an evaluation's loss is of all ranks' tokens, and not the mean of this rank's."""
        generates = getattr(self.args, "predict_with_generate", False) and not only_loss
        reads = self.model_accepts_loss_kwargs and self._reads_count is not False
        counts: bool = reads or self.compute_loss_func is not None
        return counts and self.args.average_tokens_across_devices and not generates

    # Checkpoints and exports, which all ranks write and read

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """As the Trainer's; `resume_from_checkpoint=True` passes over a checkpoint that is not complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(self.args.output_dir)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.parallelize()
        folder = str(output_dir or self.args.output_dir)
        if not is_a(self.model, "PeftModel", "PreTrainedModel"):
            return super()._save(folder, states.full_model_state(self.model))
        states.export_pretrained(self.model, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, Path(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        left_out = frozen_base(self.model)
        state = {"model": self.model, "optimizer": self._optimizer(), "scheduler": self.lr_scheduler}
        filters = {"model": lambda name, value: not left_out(name)}
        states.save_checkpoint(Path(output_dir, FOLDER), state, filter=filters)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json, which follows, completes the checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.parallelize()
        saved, left_out = Path(resume_from_checkpoint, FOLDER), frozen_base(self.model)
        if not saved.is_dir():
            for folder in weights_in(resume_from_checkpoint, self.model):
                states.load_pretrained(self.model, folder)
            return
        states.load_checkpoint(
            saved, {"model": self.model}, ignore=lambda name: left_out(name.removeprefix("model."))
        )

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        saved, file = Path(checkpoint, FOLDER), Path(checkpoint, "optimizer.pt")
        if saved.is_dir():  # `_load_from_checkpoint` has verified it
            state = {"optimizer": self._optimizer(), "scheduler": self.lr_scheduler}
            states.load_checkpoint(saved, state, model=self.model, verify=False)
        elif file.exists():  # of a Trainer without the mixin
            states.load_checkpoint(file, self._optimizer(), model=self.model)
            self.lr_scheduler.load_state_dict(torch.load(file.with_name("scheduler.pt"), weights_only=True))
