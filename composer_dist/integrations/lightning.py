"""Lightning: strategies for its Trainer and for Fabric; importing this registers both as "composer_dist".

Lightning starts the processes, makes the process group and chooses the precision; `parallelize_model` does
the rest, in place, so that a LightningModule needs no `configure_model`. See docs/lightning.md.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_dist import MeshConfig, distributed
from composer_dist import checkpoint as states
from composer_dist.config.parallelism import Config, resolve_config
from composer_dist.distributed import (
    Preparation,
    clip_grad_norm,
    clip_grad_value,
    init_context,
    process_group,
)
from composer_dist.distributed.prepared import mesh_of
from composer_dist.errors import CheckpointValueError, ParallelismRuntimeError, ParallelismValueError

CASTS = {"32-true": None, "bf16-mixed": "amp_bf16", "bf16-true": None, "16-true": None}
"""Lightning's `precision=` to that of `parallelize_model`."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that its Trainer calls instead of the forward."""
COPYING = {"EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"}
"""Callbacks that copy the model."""


class _Prepares:
    """What both strategies do beside what Lightning's ModelParallelStrategy does."""

    _required: tuple[Any, ...] = ()
    """Arguments that Lightning's strategy requires."""

    def __init__(self, parallelism: Config = "fsdp", **options: Any) -> None:
        names = ("save_distributed_checkpoint", "process_group_backend", "timeout")
        super().__init__(*self._required, **{name: options.pop(name) for name in names if name in options})
        if "precision" in options:
            raise ParallelismValueError("Pass precision= to the Trainer or to Fabric, not to the strategy.")
        self.parallelism, self._options = parallelism, options
        self.preparation: Preparation | None = None
        self._backward_sync_control = self

    def setup_environment(self: Any) -> None:
        """Make the process group, unless there is one, and the mesh."""
        if self.local_rank < self.num_processes:  # otherwise the check below says why there is no device
            self.accelerator.setup_device(self.root_device)
            self._setup_distributed()
        if (found := process_group.world_and_rank()) != (self.world_size, self.global_rank):
            raise ParallelismRuntimeError(
                f"Lightning counts {self.world_size} processes, of which this is number {self.global_rank}, "
                f"but the process group has {found[0]}, of which this is rank {found[1]}. Pass devices= (the "
                "processes of each host) and num_nodes= (the hosts) as they were started, and let torchrun "
                "or Lightning set LOCAL_RANK."
            )
        if self._device_mesh is None:
            wanted = resolve_config(self.parallelism).mesh
            self._device_mesh = distributed.build_mesh(wanted) if isinstance(wanted, MeshConfig) else wanted

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """As `sampler_kwargs`: ranks that share the work on a sample read the same ones."""
        return dict(distributed.sampler_kwargs(self.device_mesh))

    def _prepare(
        self: Any, model: nn.Module, optimizers: Sequence[Optimizer], plugin: Any, steps: Sequence[str]
    ) -> None:
        """Prepare a model, unless it is: by its user, or in an earlier run of this process."""
        if (mesh := mesh_of(model)) is not None:
            both = self.device_mesh, mesh.device_mesh
            here, there = (dict(zip(one.mesh_dim_names or (), one.shape, strict=False)) for one in both)
            if here == there:
                return
            raise ParallelismValueError(
                f"The model is prepared already, on a mesh of {there}, and this strategy has one of {here}. "
                "Pass the same parallelism, or call unparallelize_model(model) first."
            )
        config = resolve_config(self.parallelism)
        methods = (*config.forward_methods, *(one for one in steps if hasattr(type(model), one)))
        config = replace(config, mesh=self.device_mesh, forward_methods=tuple(dict.fromkeys(methods)))
        options = {"precision": _cast_of(plugin), **self._options}
        self.preparation = distributed.parallelize_model(model, config, optimizers, **options)


def _cast_of(plugin: Any) -> str | None:
    """The precision of `parallelize_model` under one of Lightning's plugins."""
    if plugin.precision not in CASTS:
        raise ParallelismValueError(
            f"The strategy composer_dist does not support precision={plugin.precision!r}: it has no loss "
            f"scaling, and casts once. Choose one of {', '.join(map(repr, CASTS))}."
        )
    return CASTS[plugin.precision]


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


class ComposerDistStrategy(_Prepares, ModelParallelStrategy):
    """Trains a LightningModule that `parallelize_model` prepares in place.

    Args:
        parallelism: what `parallelize_model` takes as its config; an `FSDP2Config` by default.
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
            _cast_of(plugin)
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
        with distributed.accumulate(self.model, last=False):
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
                    # The ranks of a host share this memory.
                    return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
                given = {} if weights_only is None else {"weights_only": weights_only}  # 2.5 has none
                return self.checkpoint_io.load_checkpoint(checkpoint_path, **given)
        module = self.lightning_module
        options = {"strict": module.strict_loading, "allow_pickle": weights_only is False}
        rest = states.load_checkpoint(checkpoint_path, {"state_dict": self.model}, **options)
        count = rest.pop("optimizers", None)
        if count is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._check_number(count)
            options["verify"] = False
            states.load_checkpoint(checkpoint_path, self._optimizers_by_key(), model=self.model, **options)
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


class ComposerDistFabricStrategy(_Prepares, FabricModelParallelStrategy):
    """Prepares the modules that Fabric sets up; the arguments are those of `ComposerDistStrategy`.

    `fabric.save` writes a directory, or a file for which rank 0 gathers everything; `fabric.load` reads both.
    """

    strategy_name = "composer_dist"
    _required = (lambda module, mesh: module,)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a module in place."""
        self._prepare(module, (), self.precision, STEPS)
        return module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *rest: Any) -> Any:
        """Prepare a module in place, with its optimizers."""
        self._prepare(module, optimizers, self.precision, STEPS)
        return super().setup_module_and_optimizers(module, optimizers, *rest)

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models that are built inside have no memory if `empty_init`; see `init_context`."""
        with init_context(empty=bool(empty_init)), self.precision.module_init_context():
            yield

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """If `enabled`, a microbatch whose gradients wait for the next ones; see `accumulate`."""
        return distributed.accumulate(module, last=not enabled)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, *args: Any, **options: Any
    ) -> Tensor:
        """Scale all gradients together; the arguments are those of `fabric.clip_gradients`."""
        raises = options.pop("error_if_nonfinite", True)
        norm = clip_grad_norm(list(self.precision.main_params(optimizer)), *args, **options)
        if raises and not norm.isfinite():
            raise ParallelismRuntimeError(
                f"The norm of the gradients is {norm.item()}; see error_if_nonfinite."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Limit every element of every gradient."""
        clip_grad_value(list(self.precision.main_params(optimizer)), clip_val)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """As `composer_dist.checkpoint.save_checkpoint`."""
        states.save_checkpoint(path, state, filter=filter, sharded=self._save_distributed_checkpoint)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `composer_dist.checkpoint.load_checkpoint`, which also reads Fabric's own files."""
        return states.load_checkpoint(path, state or None, strict=strict, allow_pickle=weights_only is False)


StrategyRegistry.register("composer_dist", ComposerDistStrategy, override=True)
STRATEGY_REGISTRY.register("composer_dist", ComposerDistFabricStrategy, override=True)
