"""accelerate: an Accelerator that prepares models with `parallelize_model`, on GPUs and on CPUs.

`prepare` replaces none of the models: they are prepared in place, and their optimizers follow them. What
accelerate does for one model per process, its launcher, dataloaders, schedulers, trackers and counting of
microbatches, it does here too. See docs/accelerate.md.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from composer_dist import MeshConfig, distributed
from composer_dist import checkpoint as states
from composer_dist.config.parallelism import Config
from composer_dist.distributed import Preparation, device_mesh_of, process_group, resolve_config
from composer_dist.distributed.training.gradients import Accumulate, check_accumulate
from composer_dist.errors import CheckpointValueError, ParallelismRuntimeError, ParallelismValueError
from composer_dist.integrations.accelerate_rows import one_of_each

CASTS = {"no": None, "bf16": "amp_bf16"}
"""accelerate's `mixed_precision=` to the precision of `parallelize_model`."""
REFUSED = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
    "dynamo_backend",
    "dynamo_plugin",
)
"""Arguments of an Accelerator that ask for another way to be parallel, or to be compiled, than ours."""
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU")
"""What accelerate may be configured for."""
FOLDER = "composer_dist"
"""What holds models and optimizers in a folder of `save_state`."""


class ComposerAccelerator(Accelerator):
    """An `accelerate.Accelerator` for models that `parallelize_model` prepares in place.

    Args:
        parallelism: what `parallelize_model` takes as its config.
        weights: files to fill models from, as for `parallelize_model`.
        options: those of `parallelize_model`, for each model that is prepared.
        accumulate: "sharded" reduces each microbatch's gradients at once; "unsharded" reduces once a step and
            holds whole gradients until then.
        accelerator: the Accelerator's own arguments, but not its plugins for parallelism.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(
        self,
        parallelism: Config = "fsdp",
        *,
        weights: str | os.PathLike[str] | None = None,
        options: dict[str, Any] | None = None,
        accumulate: Accumulate = "sharded",
        **accelerator: Any,
    ) -> None:
        if given := [name for name in REFUSED if accelerator.get(name) is not None]:
            raise ParallelismValueError(
                f"{', '.join(given)}: not for a ComposerAccelerator. Use parallelism= instead, as in "
                "ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig(), compile=True)."
            )
        check_accumulate(accumulate)
        # Without "cpu", accelerate's ranks do not see each other on a machine without accelerators.
        accelerator.setdefault("cpu", not torch.accelerator.is_available())
        super().__init__(**accelerator)
        if self.mixed_precision not in CASTS:
            raise ParallelismValueError(
                f"mixed_precision={self.mixed_precision!r} needs loss scaling or other kernels. "
                f"Choose one of {', '.join(map(repr, CASTS))}."
            )
        kind, dynamo = self.distributed_type.value, self.state.dynamo_plugin.backend.value
        if kind not in KINDS or dynamo != "NO":
            found = kind if kind not in KINDS else f"to compile with {dynamo}"
            raise ParallelismValueError(
                f"accelerate is configured for {found} (by `accelerate config` or ACCELERATE_*). Choose "
                "several GPUs or CPUs there, and nothing else; parallelism= does the rest."
            )
        self.parallelism = parallelism
        self.preparations: list[Preparation] = []
        self._options = {"weights": weights, **(options or {})}
        self._accumulate = accumulate
        self._mesh: DeviceMesh | None = None
        self._saving = False

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all models; made at first use, by all ranks together."""
        if self._mesh is None:
            process_group.init(device=self.device, reuse=True)
            here, there = process_group.world_and_rank(), (self.num_processes, self.process_index)
            if here != there:
                raise ParallelismRuntimeError(
                    f"accelerate counts {there[0]} processes, of which this is number {there[1]}, but the "
                    f"process group has {here[0]}, of which this is rank {here[1]}. Start them with torchrun "
                    "or accelerate launch, and make the Accelerator first."
                )
            wanted = resolve_config(self.parallelism).mesh
            self._mesh = distributed.build_mesh(wanted) if isinstance(wanted, MeshConfig) else wanted
        assert self._mesh is not None
        return self._mesh

    @property
    def _peers(self) -> int:
        """How many ranks share the work on each sample."""
        return self.num_processes // distributed.sampler_kwargs(self.mesh)["num_replicas"]

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, each with the optimizers that hold its parameters, and everything else as usual."""
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        for model in args:
            if isinstance(model, nn.Module):
                held = {id(parameter) for parameter in model.parameters()}
                self._parallelize(model, [one for one in optimizers if held & _ids(one)])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model in place; autocast its forward as the Accelerator's precision says."""
        self._parallelize(model, ())
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """As usual; accelerate would pass the model twice to a forward that the preparation has set."""
        forward = None if keep_fp32_wrapper else vars(model).pop("_original_forward", None)
        if forward is not None:
            del model.forward
            if forward != model.forward:
                model.forward = forward
        return super().unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def _parallelize(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if device_mesh_of(model) is None:
            config = replace(resolve_config(self.parallelism), mesh=self.mesh)
            precision = CASTS[self.mixed_precision]
            done = distributed.parallelize_model(model, config, optimizers, precision, **self._options)
            self.preparations.append(done)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Any:
        """As usual; the state is where the parameters are."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As usual: it steps once for each replica of the data, unless `split_batches`."""
        prepared = super().prepare_scheduler(scheduler)
        if self._peers > 1 and not self.split_batches and not isinstance(prepared, _ReplicaScheduler):
            replicas = self.num_processes // self._peers
            prepared = _ReplicaScheduler(prepared, replicas)
            self._schedulers[-1] = prepared
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """As usual: ranks that share the work on a sample read the same ones."""
        dispatches = self.dispatch_batches
        if dispatches is None:
            dispatches = isinstance(data_loader.dataset, IterableDataset)
        if dispatches and self._peers > 1:
            raise ParallelismValueError(
                "dispatch_batches gives every process other samples, also those that share matrices or "
                "sequences. Pass dataloader_config=DataLoaderConfiguration(dispatch_batches=False)."
            )
        return super().prepare_data_loader(data_loader, *args, **options)

    def _prepare_device_mesh(self) -> Any:
        return self.mesh if self._peers > 1 else super()._prepare_device_mesh()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A microbatch whose gradients wait for the next ones; see `composer_dist.distributed.accumulate`."""
        with distributed.accumulate(model, last=False, how=self._accumulate):
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refused on several ranks: accelerate would warn, and they would wait for each other forever.

        Raises:
            ParallelismValueError: there are several ranks.
        """
        if self.num_processes > 1:
            raise ParallelismValueError(
                "join_uneven_inputs needs torch's DistributedDataParallel. Leave it out: with even_batches, "
                "the default, all ranks have equally many batches."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all meshes together; returns their norm, equal on all ranks."""
        return distributed.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of every gradient."""
        distributed.clip_grad_value(parameters, clip_value)

    def gather(self, tensor: Any) -> Any:
        """As usual, but once from ranks that share the work on the same samples."""
        gathered = super().gather(tensor)
        if self._peers == 1:
            return gathered
        first = one_of_each(self.mesh, self.device, super().gather)

        def pick(everywhere: Tensor) -> Tensor:
            return torch.cat([everywhere.chunk(self.num_processes)[one] for one in first])

        return recursively_apply(pick, gathered)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state on rank 0, and nothing on the others; a collective. See `full_model_state`."""
        return {} if self._saving else states.full_model_state(model)

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **options: Any) -> None:
        """Write the full state's safetensors files on rank 0; a collective."""
        super().save_model(model, save_directory, *args, **options)
        self.wait_for_everyone()

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """As usual, with models and optimizers in `composer_dist/` there: each rank writes what it holds."""

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            states.save_checkpoint(os.path.join(folder, FOLDER), self._contents(optimizers))
            weights.clear()

        with self._ours(self.register_save_state_pre_hook, save) as optimizers:
            result = super().save_state(output_dir, *args, **options)
        self.wait_for_everyone()
        return result

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load what `save_state` has written, on any number of ranks, onto any mesh."""

        def load(models: list[nn.Module], folder: str) -> None:
            path = os.path.join(folder, FOLDER)
            if not os.path.isdir(path):
                raise CheckpointValueError(
                    f"{folder} has no {FOLDER}/, so no ComposerAccelerator has saved it. For the weights of "
                    f"another one, use load_pretrained(model, '{folder}/model.safetensors')."
                )
            states.load_checkpoint(path, self._contents(optimizers))
            models.clear()

        with self._ours(self.register_load_state_pre_hook, load) as optimizers:
            super().load_state(input_dir, *args, **options)

    @contextmanager
    def _ours(self, register: Callable[[Any], Any], hook: Any) -> Iterator[list[Any]]:
        """Inside, the Accelerator leaves models and optimizers to `hook`, which runs after the user's."""
        handle = register(hook)
        optimizers, self._optimizers, self._saving = self._optimizers, [], True
        try:
            yield optimizers
        finally:
            self._optimizers, self._saving = optimizers, False
            handle.remove()

    def _contents(self, optimizers: list[Any]) -> dict[str, Any]:
        models = {f"model_{index}": model for index, model in enumerate(self._models)}
        return models | {f"optimizer_{index}": one.optimizer for index, one in enumerate(optimizers)}


class _ReplicaScheduler(AcceleratedScheduler):
    """Steps for each replica of the data, where several processes are one replica."""

    def __init__(self, prepared: AcceleratedScheduler, replicas: int) -> None:
        options = {"step_with_optimizer": prepared.step_with_optimizer, "split_batches": True}
        super().__init__(prepared.scheduler, prepared.optimizers, **options)
        self._replicas = replicas

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As usual, for each replica."""
        times = self._replicas if self.step_with_optimizer and self.gradient_state.sync_gradients else 1
        for _ in range(times):
            super().step(*args, **kwargs)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
