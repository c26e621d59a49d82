"""Lightning's Fabric: its strategy, and what the strategy of Lightning's Trainer shares with it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composer_dist import MeshConfig, distributed
from composer_dist import checkpoint as states
from composer_dist.config.parallelism import Config
from composer_dist.distributed import (
    Preparation,
    clip_grad_norm,
    clip_grad_value,
    device_mesh_of,
    init_context,
    process_group,
    resolve_config,
)
from composer_dist.distributed.training.gradients import Accumulate, check_accumulate
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

CASTS = {"32-true": None, "bf16-mixed": "amp_bf16", "bf16-true": None, "16-true": None}
"""Lightning's `precision=` to that of `parallelize_model`."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that its Trainer calls instead of the forward."""


class Prepares:
    """What both strategies do beside what Lightning's ModelParallelStrategy does."""

    _required: tuple[Any, ...] = ()
    """Arguments that Lightning's strategy requires."""

    def __init__(
        self, parallelism: Config = "fsdp", *, accumulate: Accumulate = "sharded", **options: Any
    ) -> None:
        check_accumulate(accumulate)
        names = ("save_distributed_checkpoint", "process_group_backend", "timeout")
        super().__init__(*self._required, **{name: options.pop(name) for name in names if name in options})
        if "precision" in options:
            raise ParallelismValueError("Pass precision= to the Trainer or to Fabric, not to the strategy.")
        self.parallelism, self._accumulate, self._options = parallelism, accumulate, options
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
        if (mesh := device_mesh_of(model)) is not None:
            here, there = _sizes(self.device_mesh), _sizes(mesh)
            if here == there:
                return
            raise ParallelismValueError(
                f"The model is prepared already, on a mesh of {there}, and this strategy has one of {here}. "
                "Pass the same parallelism, or call unparallelize_model(model) first."
            )
        config = resolve_config(self.parallelism)
        methods = (*config.forward_methods, *(one for one in steps if hasattr(type(model), one)))
        config = replace(config, mesh=self.device_mesh, forward_methods=tuple(dict.fromkeys(methods)))
        options = {"precision": cast_of(plugin), **self._options}
        self.preparation = distributed.parallelize_model(model, config, optimizers, **options)


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    return {name: size for name, size in zip(names, mesh.shape, strict=False) if size > 1}


def cast_of(plugin: Any) -> str | None:
    """The precision of `parallelize_model` under one of Lightning's plugins."""
    if plugin.precision not in CASTS:
        raise ParallelismValueError(
            f"The strategy composer_dist does not support precision={plugin.precision!r}: it has no loss "
            f"scaling, and casts once. Choose one of {', '.join(map(repr, CASTS))}."
        )
    return CASTS[plugin.precision]


class ComposerDistFabricStrategy(Prepares, ModelParallelStrategy):
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
        return distributed.accumulate(module, last=not enabled, how=self._accumulate)

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


STRATEGY_REGISTRY.register("composer_dist", ComposerDistFabricStrategy, override=True)
