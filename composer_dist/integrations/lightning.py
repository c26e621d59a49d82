"""Lightning: strategies for its Trainer and for Fabric; importing this registers both as "composer_dist".

Lightning starts the processes, makes the process group and chooses the precision; `parallelize_model` does
the rest, in place, so that a LightningModule needs no `configure_model`. See docs/lightning.md.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from composer_dist import checkpoint as states
from composer_dist import distributed
from composer_dist.checkpoint.load import load_contents
from composer_dist.distributed import clip_grad_norm, clip_grad_value, init_context, process_group
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.integrations.lightning_fabric import STEPS, ComposerDistFabricStrategy, Prepares, cast_of

__all__ = ["ComposerDistFabricStrategy", "ComposerDistStrategy"]

COPYING = {"EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"}
"""Callbacks that copy the model."""


class _Clips:
    """Clips the gradients of all meshes together; a part of a precision plugin."""

    main_params: Any

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale all gradients, so that their norm is at most `clip_val`."""
        clip_grad_norm(list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Limit every element of every gradient."""
        clip_grad_value(list(self.main_params(optimizer)), clip_val)


KINDS = (LightningPrecision, MixedPrecision, HalfPrecision)
CLIPPING = {kind: type(kind.__name__, (_Clips, kind), {}) for kind in KINDS}
"""The precision plugins that Lightning makes, and what we use instead; one of another class is the user's."""


class ComposerDistStrategy(Prepares, ModelParallelStrategy):
    """Trains a LightningModule that `parallelize_model` prepares in place.

    Args:
        parallelism: what `parallelize_model` takes as its config; an `FSDP2Config` by default.
        accumulate: "sharded" reduces each microbatch's gradients at once; "unsharded" reduces once a step and
            holds whole gradients until then.
        options: Lightning's `save_distributed_checkpoint` (True: directories, to which each rank writes what
            it holds; False: files as all strategies of Lightning write and read them, gathered on rank 0),
            `process_group_backend` and `timeout`; and arguments of `parallelize_model`, such as `weights`.
    """

    strategy_name = "composer_dist"
    lightning_restore_optimizer = True

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin, with our clipping."""
        return self._precision_plugin or CLIPPING[LightningPrecision]()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            cast_of(plugin)
        if (kind := CLIPPING.get(type(plugin))) is not None:
            given, plugin = plugin, object.__new__(kind)
            vars(plugin).update(vars(given))
        self._precision_plugin = plugin

    def setup(self: Any, trainer: Any) -> None:
        """Prepare the module, and the optimizers that it makes before."""
        if self._layer_sync is not None:
            raise ParallelismValueError(
                "Trainer(sync_batchnorm=True): pass DDPConfig(sync_batch_norm=True) to the strategy instead."
            )
        if distributed.submesh(self.device_mesh, "cp") is not None:
            raise ParallelismValueError(
                "The strategy composer_dist has no context parallelism (cp): Lightning does not tell which "
                "tensors of a batch have a sequence. Use Fabric or composer_dist.Trainer."
            )
        if copying := {type(one).__name__ for one in trainer.callbacks} & COPYING:
            raise ParallelismValueError(
                f"{copying.pop()} copies the model, and a prepared one cannot be copied. Leave it out."
            )
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        steps = STEPS if self.lightning_module.automatic_optimization else STEPS[1:]
        self._prepare(self.model, self.optimizers, self.precision_plugin, steps)
        self.setup_precision_plugin()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models that are built inside have no memory if `empty_init`; see `init_context`."""
        with init_context(empty=bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A microbatch whose gradients wait for the next ones: see `accumulate`."""
        with distributed.accumulate(self.model, last=False, how=self._accumulate):
            yield

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step in which all ranks take part; Lightning gives some ranks a batch more than others."""
        self._last = args, kwargs
        process_group.any_rank(True)
        return super().predict_step(*args, **kwargs)

    def on_predict_end(self) -> None:
        """Repeat the last step while other ranks have more: a sharded model needs all of them."""
        while process_group.any_rank(False):
            super().predict_step(*self._last[0], **self._last[1])
        del self._last

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Shards by name; or the whole state on rank 0, and nothing on the others."""
        if not self._save_distributed_checkpoint:
            return states.full_model_state(self.model)
        self._shards = dict(self.model.state_dict())
        return dict(self._shards)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """For a file, as torch's optimizers have it, on rank 0; a directory gets the optimizer itself."""
        if self._save_distributed_checkpoint:
            return {}
        full = states.full_optimizer_state(self.model, getattr(optimizer, "optimizer", optimizer))
        return _numbered(full) if full else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory as this library's `save_checkpoint`, or a file as Lightning."""
        if not self._save_distributed_checkpoint:
            with process_group.together("saving the checkpoint"):
                if self.is_global_zero:
                    self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise ParallelismValueError("Leave storage_options out; fsspec has a configuration for them.")
        given = checkpoint.pop("state_dict")
        if changed := [name for name, value in given.items() if value is not self._shards.get(name)]:
            raise CheckpointValueError(
                f"on_save_checkpoint has changed state_dict[{changed[0]!r}]. Directories get the model's "
                "values: remove names only, or use save_distributed_checkpoint=False."
            )
        state: dict[str, Any] = {"state_dict": self.model}
        if "optimizer_states" in checkpoint:
            checkpoint["optimizers"] = len(checkpoint.pop("optimizer_states"))
            state |= self._optimizers_by_key()
        filters = {"state_dict": lambda name, _: name in given}
        states.save_checkpoint(filepath, state | checkpoint, filter=filters)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file as Lightning does; load a directory's model, and for a fit its optimizers, in place."""
        file_system, path = url_to_fs(checkpoint_path)
        if not self.broadcast(file_system.isdir(path)):
            with process_group.together("reading the checkpoint"):
                if os.path.isfile(path) and type(self.checkpoint_io) is TorchCheckpointIO:
                    # The ranks of a host share this memory. The user says whether pickles may run.
                    return torch.load(  # nosec B614
                        path, map_location="cpu", mmap=True, weights_only=weights_only
                    )
                given = {} if weights_only is None else {"weights_only": weights_only}  # 2.5 has none
                return self.checkpoint_io.load_checkpoint(checkpoint_path, **given)
        module = self.lightning_module
        options = {"strict": module.strict_loading, "allow_pickle": weights_only is False}
        rest = states.load_checkpoint(checkpoint_path, {"state_dict": self.model}, **options)
        count = rest.pop("optimizers", None)
        if count is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._check_number(count)
            options["verify"] = False
            load_contents(checkpoint_path, self._optimizers_by_key(), (), self.model, **options)
            rest["optimizer_states"] = []
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank takes its part of a file's state."""
        if "state_dict" in checkpoint:
            states.load_full_model_state(self.model, checkpoint["state_dict"], strict=strict, source="all")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of a file's states."""
        if saved := checkpoint["optimizer_states"]:
            self._check_number(len(saved))
            for optimizer, state in zip(self.optimizers, saved, strict=True):
                states.load_full_optimizer_state(self.model, optimizer, state)

    def _optimizers_by_key(self) -> dict[str, Optimizer]:
        return {f"optimizer_{index}": optimizer for index, optimizer in enumerate(self.optimizers)}

    def _check_number(self, saved: int) -> None:
        if saved != len(self.optimizers):
            here = f"configure_optimizers returns {len(self.optimizers)}: return the same ones"
            raise CheckpointValueError(f"The checkpoint has {saved} optimizers, and {here}.")


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's full state as its `state_dict()` in one process: by numbers instead of names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [group | {"params": [numbers[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: one for name, one in state["state"].items()}, "param_groups": groups}


StrategyRegistry.register("composer_dist", ComposerDistStrategy, override=True)
