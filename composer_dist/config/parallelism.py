"""The configuration that all modes share, and named strategies.

`resolve_config` turns whatever `parallelize_model` accepts (a configuration, a part of one, a dictionary,
the name of a strategy) into a `ParallelismConfig` without aliases. A strategy defines how the ranks share
the work, not how they are started: Lightning's "ddp_spawn", "ddp_fork" and "ddp_notebook" mean "ddp".
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.config.base import ActivationCheckpointing, FromDict, names_of, require
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig, launched_per_host
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import kind_in_words, unknown_strategy

Sync = Literal["auto", "rank0", "verify"]
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig(FromDict):
    """How a model is made parallel."""

    mesh: MeshConfig | DeviceMesh | None = None
    """The sizes of the mesh, or your own mesh: see `composer_dist.distributed.mesh.dimensions.roles`.
    None uses all ranks to shard the model, or with `ddp` to replicate it."""
    fsdp2: FSDP2Config | None = None
    """None means the defaults."""
    tp: TPConfig | None = None
    ddp: DDPConfig | None = None
    """Replicate the whole model with DDP, on every rank if `mesh` has no sizes."""
    rules: Sequence[Rule] = ()
    """Exceptions, module by module. Rules that choose units leave the root out unless one selects ""."""
    containers: Literal["expand", "skip"] = "expand"
    """A rule that selects a ModuleList or ModuleDict selects its children instead, or nothing."""
    activation_checkpointing: ActivationCheckpointing = None
    """"composable" (recompute all, rename nothing, also True), "selective" (recompute what is cheap),
    "wrapped", "offload", "memory_budget", or one of these with options, as in ("composable", {"every": 2});
    see docs/parallelism.md."""
    sync: Sync = "auto"
    """Whose weights count: "auto" delivers rank 0's where other ranks are on meta and otherwise
    verifies that all are equal; "rank0" always takes rank 0's; "verify" only compares."""
    forward_methods: Sequence[str] = ()
    """Methods besides `forward` ("training_step") in which the units that have them gather too."""
    compile: bool | Mapping[str, Any] = False
    """Compile the model's blocks separately, or all of a model without repeated blocks: True, or options
    of torch.compile ("backend", "mode", "dynamic", "fullgraph", "options")."""
    check_order: bool | Literal["auto"] = "auto"
    """Before each collective of a unit, check that all ranks run the same one, so that a module which
    some ranks skip raises an error instead of hanging. "auto" does so on CPU meshes. With an accelerator it
    costs overlap; use it there to find a hang. Those in memory that CPUs share are always checked."""
    strict: bool = True
    """False turns errors about options without effect into warnings."""
    transport: Literal["auto", "memory", "messages"] = "auto"
    """How weights are delivered: "memory" lets every rank read them from the source's memory, which works
    on one host; "messages" sends them to every rank; "auto" reads memory if all ranks can, else sends
    messages, as it does with less than a megabyte."""
    bucket_bytes: int = 256 * MIB
    """The most bytes to send, or to hold in a staging buffer, at one time."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As for the other configurations; the key "strategy" names one that the other keys change."""
        rest = dict(values)
        name = rest.pop("strategy", None)
        given = super().from_dict(rest)
        if name is None:
            return given
        return dataclasses.replace(strategy_named(name), **{key: getattr(given, key) for key in rest})  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Iterable) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ParallelismTypeError("rules must be a sequence of Rule.")
        object.__setattr__(self, "rules", tuple(self.rules))  # the caller's list may change
        object.__setattr__(self, "forward_methods", names_of("forward_methods", self.forward_methods))
        if self.activation_checkpointing is not None and self.fsdp2 and self.fsdp2.activations is not None:
            raise ParallelismValueError(
                "activation_checkpointing is set twice, in ParallelismConfig and (by Composer's alias) in "
                "FSDP2Config; keep one."
            )
        require("check_order", self.check_order, ("auto", True, False))
        require("sync", self.sync, ("auto", "rank0", "verify"))
        require("transport", self.transport, ("auto", "memory", "messages"))
        require("containers", self.containers, ("expand", "skip"))
        require("strict", self.strict, (False, True))
        if not isinstance(self.mesh, (MeshConfig, DeviceMesh, type(None))):
            raise ParallelismTypeError(f"mesh must be a MeshConfig or a DeviceMesh, not {self.mesh!r}.")
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ParallelismValueError(f"bucket_bytes must be a positive number, not {self.bucket_bytes!r}.")


Config = FSDP2Config | DDPConfig | ParallelismConfig | Mapping[str, Any] | str


def resolve_config(config: Config) -> ParallelismConfig:
    """One `ParallelismConfig` from a configuration, a part of one, a dictionary or a strategy's name.

    Composer's aliases in `FSDP2Config` are moved to the fields that they stand for, and `mesh` is set.

    Raises:
        ParallelismTypeError: `config` is of another type.
        ParallelismValueError: the strategy does not exist, or there are two meshes.
    """
    match config:
        case str():
            config = strategy_named(config)
        case Mapping():
            config = ParallelismConfig.from_dict(config)
        case FSDP2Config():
            config = ParallelismConfig(fsdp2=config)
        case DDPConfig():
            config = ParallelismConfig(ddp=config)
    if not isinstance(config, ParallelismConfig):
        raise ParallelismTypeError(
            "config must be an FSDP2Config, DDPConfig, ParallelismConfig, ParallelPlan, a dictionary or "
            f"the name of a strategy, not {kind_in_words(config)}."
        )
    if (fsdp2 := config.fsdp2) is not None:
        if fsdp2.device_mesh is not None and config.mesh not in (None, fsdp2.device_mesh):
            raise ParallelismValueError(
                "The mesh is given twice, in FSDP2Config.device_mesh and ParallelismConfig.mesh; keep one."
            )
        config = dataclasses.replace(
            config,
            mesh=fsdp2.device_mesh or config.mesh,
            fsdp2=fsdp2.without_aliases(),
            activation_checkpointing=fsdp2.activations or config.activation_checkpointing,
        )
    mesh = config.mesh or MeshConfig()
    device = mesh.device_type
    if config.ddp is not None and (
        config.mesh is None or (device and mesh == MeshConfig(device_type=device))
    ):
        mesh = MeshConfig(dp_replicate=-1, dp_shard=1, device_type=device)
    return dataclasses.replace(config, mesh=mesh)


def register_strategy(name: str, config: Any, *, replace: bool = False) -> None:
    """Register a name for a configuration, to use wherever one is accepted; the same on every rank.

    Args:
        name: a new name.
        config: whatever `parallelize_model` accepts as a configuration, or a function without arguments
            that returns it, called at each use.
        replace: replace an existing name.

    Raises:
        ParallelismValueError: the name exists, and `replace` is not set.
        ParallelismError: `config` is not a configuration; see `resolve_config`.
    """
    if name in _strategies and not replace:
        raise ParallelismValueError(f"There is a strategy {name!r} already; pass replace=True to replace it.")
    settled = None if callable(config) else resolve_config(config)
    _strategies[name] = config if settled is None else lambda: settled


def strategy_named(name: str) -> ParallelismConfig:
    """The configuration that is registered under `name`.

    Raises:
        ParallelismValueError: there is none; lists the names that exist.
    """
    if not isinstance(name, str):
        raise ParallelismTypeError(f"strategy must be the name of one, not {name!r}.")
    if name not in _strategies:
        raise ParallelismValueError(unknown_strategy(name, _strategies))
    try:
        return resolve_config(_strategies[name]())
    except RecursionError:
        raise ParallelismValueError(f"The strategy {name!r} refers to itself; register another.") from None


def _hsdp() -> ParallelismConfig:
    mesh = MeshConfig(dp_replicate=-1, dp_shard=launched_per_host())
    return ParallelismConfig(mesh=mesh, fsdp2=FSDP2Config())


def _ddp() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
        yield name, DDPConfig
        for unused in (True, False):
            full = f"{name}_find_unused_parameters_{str(unused).lower()}"
            yield full, partial(DDPConfig, find_unused_parameters=unused)


_strategies: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: ParallelismConfig(fsdp2=FSDP2Config()),
    "hsdp": _hsdp,  # replicas across hosts, shards within one
    "tp": lambda: ParallelismConfig(mesh=MeshConfig.auto(), tp=TPConfig()),
    **dict(_ddp()),
}
STRATEGIES = tuple(sorted(_strategies))
"""The names that exist without `register_strategy`."""
