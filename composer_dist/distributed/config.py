"""What a user asks for: frozen dataclasses, never changed by the library.

From Python they are built by name; from YAML or a dictionary by `from_dict`, which refuses unknown
keys. `resolve_config` turns everything that `parallelize_model` accepts into one `ParallelismConfig`.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.ddp_config import DDPConfig as DDPConfig
from composer_dist.distributed.from_dict import FromDict
from composer_dist.distributed.from_dict import near_miss as near_miss
from composer_dist.distributed.mesh_config import MeshConfig as MeshConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import kind_in_words

ActivationCheckpointing = bool | str | tuple[str, Mapping[str, Any] | None] | list[Any] | None
Compile = bool | Mapping[str, Any] | None
Sync = Literal["auto", "rank0", "verify"]

MIB = 1 << 20

_ALL_RANKS = MeshConfig()


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(FromDict):
    """Fully sharded data parallelism, with Composer's field names."""

    device_mesh: DeviceMesh | None = None
    """Composer's name for a `ParallelismConfig.mesh` of your own; None builds it from `MeshConfig`."""
    reshard_after_forward: bool | int = True
    """Free the gathered parameters after forward (True), keep them (False), or keep a smaller shard
    over this many ranks (an int that divides the shard dimension)."""
    activation_checkpointing: bool = False
    """Composer's name for `ParallelismConfig.activation_checkpointing="composable"`."""
    activation_cpu_offload: bool = False
    """Keep saved activations in host memory between forward and backward."""
    cpu_offload: bool | Literal["pinned", "pageable"] = False
    """Keep shards, gradients and optimizer state in host memory; True pins it where there is an
    accelerator, "pinned" insists."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """Which form the Trainer saves."""
    load_monolith_rank0_only: bool = False
    """A single-file checkpoint is read by rank 0 alone and delivered from there."""
    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """"DEFAULT", "PURE", "FULL" or a mapping of dtypes: see `composer_dist.precision`."""
    verbose: bool = False
    """Print the plan and the preparation's report on rank 0."""

    def __post_init__(self) -> None:
        _require("cpu_offload", self.cpu_offload, (False, True, "pinned", "pageable"))
        _require("state_dict_type", self.state_dict_type, ("sharded", "full"))
        for name in (
            "activation_checkpointing",
            "activation_cpu_offload",
            "load_monolith_rank0_only",
            "verbose",
        ):
            _require(name, getattr(self, name), (False, True))
        if not isinstance(self.reshard_after_forward, int):
            raise ParallelismTypeError(
                "reshard_after_forward must be True, False or a number of ranks, not "
                f"{self.reshard_after_forward!r}."
            )
        if self.load_monolith_rank0_only and self.state_dict_type != "full":
            raise ParallelismValueError('load_monolith_rank0_only=True requires state_dict_type="full".')

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> Self:
        """Build the configuration from a dictionary of Composer's, for FSDP1 or FSDP2.

        Keys that have no meaning here are dropped, each with one warning. FSDP1's
        `sharding_strategy` becomes `reshard_after_forward`.
        """
        rest = dict(attrs)
        strategy = str(rest.get("sharding_strategy", "")).upper()
        if strategy in {"FULL_SHARD", "SHARD_GRAD_OP"} and "reshard_after_forward" not in rest:
            del rest["sharding_strategy"]
            rest["reshard_after_forward"] = strategy == "FULL_SHARD"
        known = {field.name for field in dataclasses.fields(cls)}
        for key in sorted(rest.keys() - known):
            text = f"FSDP2Config has no {key!r}; '{key}: {rest.pop(key)}' is ignored.{near_miss(key, known)}"
            warnings.warn(text, UserWarning, stacklevel=2)
        return cls.from_dict(rest)


@dataclass(frozen=True, kw_only=True)
class TPConfig(FromDict):
    """Tensor parallelism: how matrices are cut among the ranks of the mesh's "tp" dimension."""

    plan: Literal["auto"] | Mapping[str, Any] = "auto"
    """"auto" takes a Hugging Face model's own plan, or infers one from the structure; else module name (or
    "re:...") to style: a name of `composer_dist.distributed.tp_styles`, or a style object of torch's.
    `Rule(tp=...)` comes before either."""
    sequence_parallel: bool = False
    """Cut the sequence too, between attention and feed-forward: less memory for activations. Lengths must
    be multiples of tp."""
    loss_parallel: bool = False
    """Leave the logits cut over the vocabulary, for `parallel_cross_entropy`, which Hugging Face's causal
    language models are given."""
    head_attributes: tuple[str, ...] = ()
    """Attributes to divide by tp in modules whose projections are cut, beside the known names of head
    counts and widths. A module may list its own in `tensor_parallel_attributes`."""

    def __post_init__(self) -> None:
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ParallelismTypeError(
                f"TPConfig.plan is 'auto' or a mapping of module name to style, not {self.plan!r}."
            )
        for match in self.plan if isinstance(self.plan, Mapping) else ():
            _check_match(match, "TPConfig.plan's")
        object.__setattr__(self, "head_attributes", _names("head_attributes", self.head_attributes))
        for name in ("sequence_parallel", "loss_parallel"):
            _require(name, getattr(self, name), (False, True))


Match = Any  # str | re.Pattern | type[nn.Module] | Callable[[str, nn.Module], bool] | list of these


@dataclass(frozen=True)
class Rule(FromDict):
    """What is to happen to the modules that `match` selects.

    A field that is None is left to other rules, the policy, the attributes or the configuration. Where
    several rules select a module they merge field by field, the later one winning. A ModuleList or
    ModuleDict stands for its children (see `ParallelismConfig.containers`).
    """

    match: Match
    """An exact module name, "re:..." or a compiled pattern (both fullmatch), a module type or "type:..."
    (the name of a class or base class, for YAML), a callable `(name, module) -> bool`, or a list of these,
    each of which must match. "" is the root."""
    shard: bool | None = None
    """True makes each match a unit; False leaves all parameters below it replicated, gradients
    averaged, but for those of units that somebody has chosen further down."""
    reshard_after_forward: bool | int | None = None
    """As in `FSDP2Config`, for these units. This and the next two are refused where no match is a unit."""
    mixed_precision: str | Mapping[str, Any] | None = None
    """As in `FSDP2Config`, for these units."""
    offload: bool | None = None
    """Whether these units' shards, gradients and optimizer state live in host memory."""
    act_ckpt: ActivationCheckpointing = None
    """As `ParallelismConfig.activation_checkpointing`, for these modules; False leaves them out."""
    tp: Any = None
    """Tensor-parallel style."""
    optional: bool = False
    """No error where nothing matches."""
    skippable: Literal["replicate", "root"] | None = None
    """Some ranks may skip these modules in a step (an image tower, for a batch without images), so nothing
    in them is a unit: "replicate" leaves their parameters whole on every rank, gradients averaged; "root"
    gives them to the unit around, which gathers them at every step."""
    compile: bool | Mapping[str, Any] | None = None
    """As `ParallelismConfig.compile`, for these modules; False leaves them out."""

    def __post_init__(self) -> None:
        _check_match(self.match)
        _require("skippable", self.skippable, (None, "replicate", "root"))
        for name in ("shard", "offload", "optional"):
            _require(name, getattr(self, name), (None, False, True))
        if not isinstance(self.reshard_after_forward, (int, type(None))):
            raise ParallelismTypeError(
                "A rule's reshard_after_forward is True, False or a number of ranks, not "
                f"{self.reshard_after_forward!r}."
            )


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig(FromDict):
    """Everything about how a model is made parallel; the one home of what several modes need."""

    mesh: MeshConfig | DeviceMesh = _ALL_RANKS
    """The sizes of the mesh, or a mesh of your own: see `composer_dist.distributed.mesh.roles`."""
    fsdp2: FSDP2Config | None = None
    """None means the defaults."""
    tp: TPConfig | None = None
    ddp: DDPConfig | None = None
    """Replicate whole models by DDP, on every rank where `mesh` is left at its default."""
    rules: Sequence[Rule] = ()
    """Exceptions, module by module. Rules that choose units leave the root out unless one selects ""."""
    containers: Literal["expand", "skip"] = "expand"
    """A selected ModuleList or ModuleDict stands for its children, or for nothing."""
    activation_checkpointing: ActivationCheckpointing = None
    """"composable" (recompute all; renames nothing; also True), "selective" (recompute what is cheap),
    "wrapped", "offload", "memory_budget", or (mode, options): "every" (n), "save" (operations), "offload",
    ...; see docs/parallelism.md."""
    sync: Sync = "auto"
    """Whose weights count: "auto" delivers rank 0's where other ranks are on meta and otherwise
    verifies that all are equal; "rank0" always takes rank 0's; "verify" only compares."""
    forward_methods: Sequence[str] = ()
    """Methods besides `forward` ("training_step") in which the units that have them gather too."""
    compile: bool | Mapping[str, Any] = False
    """Compile the model's blocks, each by itself: True, or options of torch.compile ("backend", "mode",
    "dynamic", "fullgraph", "options")."""
    check_order: bool | Literal["auto"] = "auto"
    """Before each collective of a unit, compare that all ranks are at the same one, so that a module which
    some ranks skip is an error and not a hang. "auto" does so on CPU meshes; with an accelerator it costs
    overlap, and is for finding a hang."""
    strict: bool = True
    """False turns errors about options without effect into warnings."""
    transport: Literal["auto", "memory", "hosts", "messages"] = "auto"
    """How weights travel: "memory" reads them from the source's memory, which ranks of one host can;
    "hosts" sends them to one rank of each other host, whose memory the rest of it reads; "messages"
    sends them to every rank. Each of these insists; "auto" takes the first that works."""
    bucket_bytes: int = 256 * MIB
    """Most bytes that travel, or lie in a staging buffer, at one time."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As for the other configurations; the key "strategy" names one from which the others differ."""
        rest = dict(values)
        name = rest.pop("strategy", None)
        given = super().from_dict(rest)
        if name is None:
            return given
        return dataclasses.replace(resolve_config(name), **{key: getattr(given, key) for key in rest})  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if isinstance(self.rules, Rule) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ParallelismTypeError("rules must be a sequence of Rule.")
        object.__setattr__(self, "rules", tuple(self.rules))  # the caller's list may change
        object.__setattr__(self, "forward_methods", _names("forward_methods", self.forward_methods))
        fsdp2 = self.fsdp2
        aliased = fsdp2 is not None and (fsdp2.activation_checkpointing or fsdp2.activation_cpu_offload)
        if aliased and self.activation_checkpointing is not None:
            raise ParallelismValueError(
                "activation_checkpointing is set twice, in ParallelismConfig and (by Composer's alias) in "
                "FSDP2Config; keep one."
            )
        _require("check_order", self.check_order, ("auto", True, False))
        _require("sync", self.sync, ("auto", "rank0", "verify"))
        _require("transport", self.transport, ("auto", "memory", "hosts", "messages"))
        _require("containers", self.containers, ("expand", "skip"))
        _require("strict", self.strict, (False, True))
        if not isinstance(self.mesh, (MeshConfig, DeviceMesh)):
            raise ParallelismTypeError(f"mesh is a MeshConfig or a DeviceMesh, not {self.mesh!r}.")
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ParallelismValueError(f"bucket_bytes is a positive number, not {self.bucket_bytes!r}.")


def resolve_config(
    config: FSDP2Config | DDPConfig | ParallelismConfig | Mapping[str, Any] | str,
) -> ParallelismConfig:
    """One `ParallelismConfig` from whatever the caller has: itself, a part, a dictionary, a name."""
    match config:
        case ParallelismConfig(ddp=DDPConfig(), mesh=MeshConfig() as mesh) if (
            mesh.sizes() == MeshConfig().sizes()
        ):
            return dataclasses.replace(config, mesh=dataclasses.replace(mesh, dp_replicate=-1, dp_shard=1))
        case ParallelismConfig():
            return config
        case FSDP2Config():
            return ParallelismConfig(fsdp2=config)
        case DDPConfig():
            return ParallelismConfig(mesh=MeshConfig(dp_replicate=-1, dp_shard=1), ddp=config)
        case Mapping():
            return resolve_config(ParallelismConfig.from_dict(config))
        case str():
            from composer_dist.distributed.strategies import strategy_named

            return strategy_named(config)
    raise ParallelismTypeError(
        "config must be an FSDP2Config, DDPConfig, ParallelismConfig, ParallelPlan, a dictionary or "
        f"the name of a strategy, not {kind_in_words(config)}."
    )


def _check_match(match: Match, whose: str = "Rule") -> None:
    """Refuse what no module can match by."""
    if isinstance(match, str) and match.startswith("re:"):
        try:
            re.compile(match[3:])
        except re.error as error:
            raise ParallelismValueError(f"{whose} {match!r} is no regular expression: {error}.") from None
    elif isinstance(match, (list, tuple)) and match:
        for part in match:
            _check_match(part)
    elif not (isinstance(match, (str, re.Pattern)) or callable(match)):
        raise ParallelismTypeError(
            "A rule matches by a module name, 're:...', 'type:...', a compiled pattern, a module type, a "
            f"callable (name, module) -> bool, or a list of these, not by {match!r}."
        )


def _names(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """A sequence of strings as a tuple."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ParallelismTypeError(f"{field} must be a sequence of names, not {names!r}.")
    return tuple(names)


def _require(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ParallelismValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")
