"""Builds the model of a run for preparation: on the meta device, or with values on rank 0 only."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_dist.checkpoint.export.merged import check_mergeable  # not public, like the hosts: for recipes
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import init_context, meta_init, process_group
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from composer_dist.models.adapters import adapter_hosts
from composer_dist.recipe.named import METRICS, find, resolve
from composer_dist.recipe.other_libraries.failures import (
    blaming,
    check_kind,
    check_positions,
    check_vocabulary,
    check_weights,
    from_hub,
    targets,
)
from composer_dist.recipe.other_libraries.nf4 import quantize
from composer_dist.recipe.schema import HubModel, ModuleModel, PreferenceData, Run
from composer_dist.recipe.sources.rows import classes_of
from composer_dist.recipe.tokenizer import tokenizer_named
from composer_dist.structure.families import errors_only, quiet
from composer_dist.wording import listed, near_miss


def peft_class(method: str) -> Any:
    """The configuration class of a method such as "lora"; raises if peft has no such method."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value.lower(): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if not isinstance(method, str):
        raise ParallelismTypeError(f"expected the name of a method of peft, got {method!r}")
    if method not in known:
        text = f"peft has no method {method!r}.{near_miss(method, known)}"
        raise ParallelismValueError(f"{text} Valid methods: {', '.join(sorted(known))}.")
    return known[method]


_AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}


_INDEPENDENT = frozenset(
    {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "bias", "use_rslora"}
    | {"layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "init_lora_weights"}
    | {"modules_to_save", "fan_in_fan_out", "lora_bias"}
)
"""Options of LoRA with which its first values do not depend on the model's weights."""


@dataclass
class Built:
    """A model, and how it gets its values."""

    model: ComposerModel
    parallelism: ParallelismConfig | None = None
    """The run's; not strict where the files lack weights of the model, or have others."""
    weights: Path | None = None
    """A file or an index of which each rank reads its part; None if the model needs none, or rank 0 reads."""


def build_model(
    run: Run,
    tokenizer: Any,
    folder: Path,
    parallelism: ParallelismConfig | None = None,
    *,
    empty: bool = False,
) -> Built:
    """The model of the configuration.

    A new model is on the meta device on every rank: preparation initializes it, identically on any number of
    ranks. So is a pretrained one whose safetensors the ranks can read in parts. Other pretrained models, and
    those with an adapter of their own, have values on rank 0 and are on meta elsewhere.

    Args:
        run: the configuration.
        tokenizer: travels with a Hugging Face model, and sizes a new one's vocabulary.
        folder: the configuration's, for files that it names.
        parallelism: what the model will be prepared with; None if it will not be.
        empty: keep everything on meta, which is enough for a plan.

    Raises:
        ParallelismError: it cannot be built.
    """
    if isinstance(run.model, ModuleModel):
        return Built(_module(run.model, folder), parallelism)
    model = run.model
    valued = model.pretrained is not None or model.adapter is not None  # DoRA and NF4 start from weights
    with quiet():
        config = hub_config(model, tokenizer)
        weights = None if empty else _parts(model, config, parallelism)
        first = valued and not empty and process_group.world_and_rank()[1] == 0
        built, complete = _hub_model(run, model, config, first and weights is None, empty)
        if weights is not None and model.adapter is not None and not complete:  # it may train what is missing
            weights = None
            if first:
                built, complete = _hub_model(run, model, config, True, empty)
        real = first and weights is None
        if weights is not None and parallelism is not None and not complete:
            parallelism = replace(parallelism, strict=False)
        return Built(_composer_model(run, model, built, tokenizer, folder, real), parallelism, weights)


def _parts(model: HubModel, config: Any, parallelism: ParallelismConfig | None) -> Path | None:
    """The file or the index of a pretrained model's safetensors, if each rank can read its part of it."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    if model.pretrained is None or parallelism is None or parallelism.sync != "auto":
        return None
    quantized = model.quantize is not None or getattr(config, "quantization_config", None) is not None
    independent = model.adapter is None or (
        model.adapter.method == "lora"
        and _INDEPENDENT.issuperset(given := model.adapter.model_extra or {})
        and given.get("init_lora_weights", True) in (True, False, "gaussian")
        # A copy of a tied head is found in no file.
        and not ("modules_to_save" in given and getattr(config, "tie_word_embeddings", False))
    )
    if quantized or not independent:
        return None
    with from_hub("model.pretrained", model.pretrained):
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            found = cached_file(model.pretrained, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                return Path(found)
    return None


def _composer_model(
    run: Run, model: HubModel, built: Any, tokenizer: Any, folder: Path, real: bool
) -> ComposerModel:
    if model.adapter is None:
        return HuggingFaceModel(built, tokenizer, **_options(model, built.config, folder))
    if real and model.config is not None:
        _write_base(built, tokenizer, run.out / "base")
    if model.quantize is not None:
        quantize(built)
    with blaming(f"model.adapter (the model's linear layers are {targets(built)})"):
        kind: Any = HuggingFaceModel
        options = _options(model, built.config, folder) | {"peft_config": _peft_config(model)}
        if isinstance(run.data, PreferenceData):
            from composer_dist.models import DPOModel  # which imports torchmetrics: a second or more

            kind, options["beta"], options["preference_loss"] = DPOModel, model.dpo.beta, model.dpo.loss
        made: HuggingFaceModel = kind(built, tokenizer, **options)
    if run.export == "merged":
        check_mergeable(dict(adapter_hosts(made.model)))
    return made


def tokenizer_of(run: Run) -> Any:
    """The tokenizer of a Hugging Face model; None for any other."""
    if not isinstance(run.model, HubModel):
        return None
    if run.model.tokenizer is None and run.model.pretrained is not None:
        hub_config(run.model, None)  # an error about the model itself names model.pretrained
    return tokenizer_named(run.model.tokenizer or run.model.pretrained or "bytes")


def hub_config(model: HubModel, tokenizer: Any) -> Any:
    """The transformers configuration; the tokenizer completes a new one.

    Raises:
        ParallelismValueError: transformers rejects it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if model.pretrained is not None:
        with from_hub("model.pretrained", model.pretrained):
            config = AutoConfig.from_pretrained(model.pretrained, trust_remote_code=False)
        check_weights(model.pretrained)
        return config
    given = dict(model.config or {})
    check_vocabulary(given, tokenizer)
    kind = CONFIG_MAPPING[given.pop("model_type")]
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    defaults = {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}
    if model.kind == "seq2seq_lm":
        defaults["decoder_start_token_id"] = tokenizer.pad_token_id
    try:
        return kind(**{**defaults, **given})
    except Exception as error:  # each configuration has checks and errors of its own
        text = " ".join(str(error).split())
        raise ParallelismValueError(f"{kind.__name__} rejects the configuration: {text}") from error


def _hub_model(run: Run, model: HubModel, config: Any, real: bool, empty: bool) -> tuple[Any, bool]:
    """The model of transformers, and whether the files that it is read from have its weights and no others.

    Args:
        real: with values; else on meta, with the dtypes and the generation settings of the files.
        empty: on meta, without a look at files that are not here.
    """
    import transformers

    auto = getattr(transformers, _AUTO[model.kind])
    check_kind(model, config)
    if model.kind == "sequence_classification" and (labels := classes_of(run.data, model)):
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    elif model.num_labels is not None:
        config.num_labels = model.num_labels
    dtype = getattr(torch, model.dtype) if model.dtype else None
    quantized = getattr(config, "quantization_config", None) is not None
    distant = empty and not Path(model.pretrained or "").is_dir()
    if model.pretrained is not None and (real or not (distant or quantized)):
        return _pretrained(model.pretrained, run, auto, config, dtype, real)
    if model.pretrained is not None and dtype is None:
        dtype = config.dtype  # of the files
    with init_context(dtype=dtype), blaming(f"model: {type(config).__name__} cannot be built"):
        built = auto.from_config(config, dtype=dtype or torch.float32, trust_remote_code=False)
    check_positions(built, getattr(run.data, "context", None))
    if real:
        meta_init(built)
    return built, True


def _pretrained(
    name: str, run: Run, auto: Any, config: Any, dtype: torch.dtype | None, real: bool
) -> tuple[Any, bool]:
    reports = nullcontext() if real else errors_only("transformers")  # rank 0's, or the preparation's
    with from_hub("model.pretrained", name), reports:
        read, found = auto.from_pretrained(
            name,
            config=config,
            dtype=dtype or "auto",
            device_map=None if real else "meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            trust_remote_code=False,
        )
    if hasattr(read, "peft_config"):
        raise ParallelismValueError(
            f"model.pretrained={name} has an adapter of peft next to the model, which "
            "transformers loads too. Move its files elsewhere, or merge it first (merge_and_unload)."
        )
    if not real:
        read.tie_weights()  # transformers unties on meta what the files have twice
    check_positions(read, getattr(run.data, "context", None))
    if misfits := [
        f"{key} is {tuple(there)} in the files and {tuple(here)} in the model"
        for key, there, here in sorted(found["mismatched_keys"])
    ]:
        raise ParallelismValueError(
            f"model.pretrained={name}: {listed(misfits, 3)}. The size of a classifier's head "
            "comes from model.num_labels, or from the labels of the data."
        )
    if len(found["missing_keys"]) == len(read.state_dict()):
        raise ParallelismValueError(
            f"model.pretrained={name}: its files have none of the weights of a {type(read).__name__}."
        )
    return read, not (found["missing_keys"] or found["unexpected_keys"])


def _options(model: HubModel, config: Any, folder: Path) -> dict[str, Any]:
    """Arguments of a `HuggingFaceModel` for its loss and for the metrics that evaluate it."""
    made = []
    for name, given in model.metrics.items():
        arguments = dict(given or {})
        if name == "accuracy":
            arguments = {"num_classes": config.num_labels, "average": "micro"} | arguments
        with blaming(f"model.metrics.{name}"):
            made.append(find("metric", METRICS, name, folder)(**arguments))
    metrics = {"use_logits": True, "eval_metrics": made} if made else {}
    return {"chunked_loss": model.chunked_loss, **metrics}


def _peft_config(model: HubModel) -> Any:
    from peft import TaskType

    assert model.adapter is not None
    tasks = {
        "causal_lm": TaskType.CAUSAL_LM,
        "seq2seq_lm": TaskType.SEQ_2_SEQ_LM,
        "sequence_classification": TaskType.SEQ_CLS,
    }
    arguments = {"task_type": tasks.get(model.kind)} | (model.adapter.model_extra or {})
    return peft_class(model.adapter.method)(**arguments)


def _write_base(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a new model below an adapter, which is useless without it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.config._name_or_path = str(folder)  # what the adapter's configuration will name
    model.name_or_path = str(folder)


def _module(model: ModuleModel, folder: Path) -> ComposerModel:
    kind = resolve(model.name, folder)
    with init_context():
        built = kind(**model.arguments)
    if isinstance(built, ComposerModel):
        return built
    if not isinstance(built, nn.Module):
        raise ParallelismTypeError(
            f"{model.name} must return a torch.nn.Module or a ComposerModel, not a {type(built).__name__}."
        )
    if model.num_classes is None and getattr(built, "num_classes", None) is None:
        raise ParallelismValueError(
            f"{model.name} is a plain module, so its accuracy needs model.num_classes, or a num_classes "
            "attribute of the module."
        )
    with blaming("model.num_classes"):
        return ComposerClassifier(built, num_classes=model.num_classes)
