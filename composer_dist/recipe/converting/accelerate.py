"""accelerate's configuration files, and the arguments of transformers that make a model parallel."""

from typing import Any

from composer_dist.recipe.converting.foreign import Foreign
from composer_dist.recipe.converting.sharding import STRATEGIES, accelerates_fsdp, put_strategy

ACCELERATE = frozenset({"distributed_type", "compute_environment", "dynamo_config", "num_processes"})
"""Keys by which a file is recognized as accelerate's."""
TRANSFORMERS = frozenset(
    {"fsdp", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"}
    | {"per_device_train_batch_size", "output_dir", "gradient_accumulation_steps", "num_train_epochs"}
    | {"version", "transformer_layer_cls_to_wrap", "auto_wrap_policy", "cpu_ram_efficient_loading", "xla"}
    | {"min_num_params", "fsdp_transformer_layer_cls_to_wrap", "fsdp_auto_wrap_policy"}
)
"""Keys by which a file is recognized as transformers': its arguments, or its fsdp_config."""
PRECISIONS = {"no": None, "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
_LAUNCHER = "the command line's: composer-dist train ... -n N on one machine, torchrun on several"
_HERE = {
    "compute_environment": "has no counterpart, and none is needed",
    "debug": "has no counterpart; parallelism: {check_order: true} checks that ranks gather the same units",
    "num_processes": "the command line's: composer-dist train ... -n N, or torchrun",
    "num_machines": _LAUNCHER, "machine_rank": _LAUNCHER, "main_process_ip": _LAUNCHER,
    "main_process_port": _LAUNCHER, "main_training_function": _LAUNCHER, "rdzv_backend": _LAUNCHER,
    "same_network": _LAUNCHER, "mpirun_config": _LAUNCHER,
    "gpu_ids": "an environment variable: CUDA_VISIBLE_DEVICES",
    "enable_cpu_affinity": "has no counterpart: use numactl",
    "downcast_bf16": "has no counterpart: this library does not run on XLA",
}  # fmt: skip
OTHERS = {
    "DEEPSPEED": "parallelism: fsdp is ZeRO-3, and {fsdp2: {reshard_after_forward: false}} is ZeRO-2",
    "MEGATRON_LM": "parallelism: {mesh: {tp: 8}, tp: {}} cuts matrices, with parallelism: fsdp between hosts",
    "XLA": "this library does not run on XLA",
}
_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}


def convert_accelerate(foreign: Foreign) -> None:
    """What the keys of accelerate's files become.

    Raises:
        ConfigurationError: it asks for DeepSpeed, Megatron or XLA, or for a value that accelerate lacks.
    """
    kind = str(foreign.take("distributed_type", default="NO")).upper().rpartition(".")[2]
    if kind in OTHERS:
        raise foreign.wrong(f"{kind} cannot be converted: {OTHERS[kind]}", "distributed_type")
    if kind == "FSDP":
        accelerates_fsdp(foreign, "fsdp_config", version=1)
    elif kind.startswith("MULTI_"):
        foreign.put("ddp", "parallelism", "distributed_type")
    elif kind == "NO":
        foreign.put(None, "parallelism", "distributed_type")
    else:
        raise foreign.wrong(f"{kind} is not one of NO, FSDP, MULTI_GPU, MULTI_CPU", "distributed_type")
    if kind != "FSDP":
        foreign.drop("distributed_type is not FSDP, so these had no effect", "fsdp_config")
    if foreign.take("use_cpu", default=False):
        foreign.put("cpu", "trainer.device", "use_cpu")
    precision = str(foreign.take("mixed_precision", default="no")).lower()
    if precision not in PRECISIONS:
        raise foreign.wrong(f"{precision} is not one of {', '.join(PRECISIONS)}", "mixed_precision")
    if (ours := PRECISIONS[precision]) is not None:
        foreign.put(ours, "trainer.precision", "mixed_precision")
        if kind == "FSDP" and isinstance(foreign.ours["parallelism"], dict):
            foreign.put("PURE", "parallelism.fsdp2.mixed_precision", "mixed_precision")
    _mesh(foreign)
    _compile(foreign)
    for key, text in _HERE.items():
        foreign.drop(text, key)


def _mesh(foreign: Foreign) -> None:
    """The sizes of accelerate's ParallelismConfig."""
    path = "parallelism_config"
    for theirs in ("dp_replicate", "dp_shard", "tp", "cp"):
        key = f"{path}_{theirs}_size"
        size = foreign.take(path, key, default=1)
        if size == 1:
            continue
        if not isinstance(foreign.ours["parallelism"], dict):
            foreign.ours["parallelism"] = {}
        foreign.put(size, f"parallelism.mesh.{theirs}", path, key)
        if theirs == "tp":
            foreign.put({}, "parallelism.tp", path, key)
    if foreign.get("parallelism_config") and isinstance(foreign.ours["parallelism"], dict):
        mesh = foreign.ours["parallelism"].get("mesh", {})
        if mesh and "dp_shard" not in mesh:
            mesh["dp_shard"] = 1  # as in accelerate, where a size that is not given is 1


def _compile(foreign: Foreign) -> None:
    """torch.compile of the model, which is that of its blocks here."""
    path = "dynamo_config"
    options: dict[str, Any] = {}
    if (backend := foreign.take(path, "dynamo_backend")) not in (None, "NO", "no"):
        options["backend"] = str(backend).lower()
        if (mode := foreign.take(path, "dynamo_mode", default="default")) != "default":
            options["mode"] = mode
        for theirs, ours in (("dynamo_use_fullgraph", "fullgraph"), ("dynamo_use_dynamic", "dynamic")):
            if foreign.take(path, theirs, default=False):
                options[ours] = True
        if not isinstance(foreign.ours["parallelism"], dict):
            foreign.ours["parallelism"] = {"strategy": foreign.ours["parallelism"] or "fsdp"}
        foreign.put(options, "parallelism.compile", path, "dynamo_backend")
    foreign.take(path, "dynamo_use_regional_compilation")


def convert_transformers(foreign: Foreign) -> None:
    """What transformers' arguments, or its fsdp_config alone, become.

    Raises:
        ConfigurationError: a value that transformers does not have either.
    """
    whole = {"fsdp", "fsdp_config", *_DDP, "output_dir", "per_device_train_batch_size", "bf16"}
    if not whole.intersection(foreign.values):
        accelerates_fsdp(foreign, version=2)
        return
    options = foreign.take("fsdp")
    words = options.split() if isinstance(options, str) else options if isinstance(options, list) else []
    foreign.drop(OTHERS["DEEPSPEED"], "deepspeed", undecided=True)
    if options:
        if not isinstance(foreign.get("fsdp_config", default={}), dict):
            file = foreign.get("fsdp_config")
            raise foreign.wrong(f"{file} is another file; convert that one", "fsdp_config")
        accelerates_fsdp(foreign, "fsdp_config", version=2)
        for word in words:
            _legacy(foreign, str(word))
    else:
        foreign.drop("fsdp is not set, so these had no effect", "fsdp_config")
        _replicas(foreign)
    for theirs, ours in (("bf16", "amp_bf16"), ("fp16", "amp_fp16")):
        if foreign.take(theirs, default=False):
            foreign.put(ours, "trainer.precision", theirs)
            if isinstance(foreign.ours["parallelism"], dict) and "fsdp2" in foreign.ours["parallelism"]:
                foreign.put("PURE", "parallelism.fsdp2.mixed_precision", theirs)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if foreign.take(key, default=False):
            if not isinstance(foreign.ours["parallelism"], dict):
                foreign.ours["parallelism"] = {"strategy": foreign.ours["parallelism"]}
            foreign.put("composable", "parallelism.activation_checkpointing", key)
    foreign.move("seed", "seed")


def _legacy(foreign: Foreign, word: str) -> None:
    """One of the words of `fsdp="full_shard auto_wrap"`."""
    strategies = [one.lower() for one in STRATEGIES]
    if foreign.ours["parallelism"] == "ddp":
        return  # no_shard: nothing else has an effect
    if word in strategies:
        put_strategy(foreign, word, "fsdp")
    elif word == "offload":
        foreign.put(True, "parallelism.fsdp2.cpu_offload", "fsdp")
    elif word not in ("auto_wrap", "True", "true"):
        raise foreign.wrong(f"{word!r} is not one of {', '.join(strategies)}, offload, auto_wrap", "fsdp")


def _replicas(foreign: Foreign) -> None:
    """The arguments of DDP."""
    given = {ours: foreign.take(theirs) for theirs, ours in _DDP.items()}
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        foreign.put(given, "parallelism.ddp", next(key for key in _DDP if foreign.get(key) is not None))
    else:
        foreign.put("ddp", "parallelism")
