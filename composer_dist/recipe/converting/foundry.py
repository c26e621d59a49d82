"""LLM Foundry's model, tokenizer and dataloaders."""

import json
from pathlib import Path
from typing import Any

from composer_dist.recipe.converting.foreign import Foreign

_KINDS = {"hf_causal_lm": "causal_lm", "hf_t5": "seq2seq_lm"}
_ATTENTION = "has no counterpart: transformers chooses the attention of the torch and GPU at hand"
_MODEL = {
    "init_device": "automatic: a new model is built on meta, a pretrained one is read slice by slice",
    "use_auth_token": "automatic: huggingface_hub reads HF_TOKEN, or what `hf auth login` stored",
    "use_flash_attention_2": _ATTENTION,
    "use_train_metrics": "automatic: the loss of training is logged; model.metrics are those of evaluations",
    "load_in_8bit": "model.quantize: nf4, with an adapter",
    "z_loss": "has no counterpart",
}
_LOADER = {
    "drop_last": "automatic: evaluations read every row",
    "pin_memory": "automatic: batches are pinned where there is an accelerator",
    "prefetch_factor": "has no counterpart: of the options of torch's DataLoader there is data.workers",
    "persistent_workers": "automatic",
    "timeout": "has no counterpart: trainer.hang_timeout ends stalled runs",
}
_DATASET = {
    "allow_pad_trimming": "automatic: a batch is as long as its longest row",
    "decoder_only_format": "automatic: model.kind says it",
    "eos_token_id": "automatic: the tokenizer says it",
    "shuffle_seed": "seed",
    "safe_load": "automatic: no code of the hub is run",
}


def convert_model(foreign: Foreign) -> None:
    """The sections `model` and `tokenizer`."""
    name = str(foreign.take("model", "name", default="hf_causal_lm"))
    if name not in _KINDS:
        text = f"there is no {name!r} here: choose a model of transformers (model.kind: causal_lm), or a"
        foreign.remark(f"{text} class of yours (kind: module, name: package.module.Name)", "model", "name")
        foreign.take("model")
        foreign.take("tokenizer")
        return
    foreign.put(_KINDS[name], "model.kind", "model", "name")
    path = foreign.take("model", "pretrained_model_name_or_path")
    if foreign.take("model", "pretrained", default=True):
        foreign.put(path, "model.pretrained", "model", "pretrained_model_name_or_path")
    elif (config := _configuration(path)) is not None:
        config |= foreign.mapping("model", "config_overrides")
        foreign.take("model", "config_overrides")
        foreign.put(config, "model.config", "model", "pretrained_model_name_or_path")
    else:
        text = (
            "a new model needs model.config: model_type and what is not its default, from the config.json of"
        )
        foreign.put({"model_type": "llama"}, "model.config", "model", "pretrained")
        foreign.remark(f"{text} {path}; model_type: llama is a guess", "model", "pretrained")
    foreign.drop("has no counterpart for a pretrained model", "model", "config_overrides", undecided=True)
    if adapter := foreign.mapping("model", "peft_config"):
        foreign.take("model", "peft_config")
        method = str(adapter.get("peft_type", "lora")).lower()
        rest = {key: value for key, value in adapter.items() if key not in ("peft_type", "task_type")}
        foreign.put({"method": method, **rest}, "model.adapter", "model", "peft_config")
    for key, text in _MODEL.items():
        foreign.drop(text, "model", key)
    tokenizer = foreign.take("tokenizer", "name")
    if tokenizer is not None and tokenizer != foreign.ours["model"].get("pretrained"):
        foreign.put(tokenizer, "model.tokenizer", "tokenizer", "name")
    foreign.take("tokenizer", "kwargs", "model_max_length")
    for key in foreign.mapping("tokenizer", "kwargs"):
        text = "has no counterpart: save a tokenizer with it to a directory, and give that as model.tokenizer"
        foreign.drop(text, "tokenizer", "kwargs", key)


def _configuration(path: Any) -> dict[str, Any] | None:
    """The configuration of a model in a local directory."""
    file = Path(str(path)) / "config.json"
    if not file.is_file():
        return None
    dropped = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
    return {key: value for key, value in json.loads(file.read_text()).items() if key not in dropped}


def convert_data(foreign: Foreign) -> None:
    """The sections `train_loader` and `eval_loader`."""
    size = foreign.ours.pop("data", {}).get("batch_size")
    name = foreign.take("train_loader", "name")
    if name != "finetuning" or foreign.get("train_loader", "dataset", "hf_name") is None:
        foreign.remark(
            "shards of MosaicML's streaming cannot be read: give the text (data: {kind: text, source: ...}), "
            "or a function that returns streaming's data set (data: {kind: function, name: file.py:name})",
            "train_loader",
        )
        foreign.take("train_loader")
        foreign.take("eval_loader")
        return
    is_chat = foreign.ours.get("model", {}).get("kind") != "seq2seq_lm"
    foreign.put("chat" if is_chat else "table", "data.kind", "train_loader", "name")
    foreign.put(_source(foreign, "train_loader"), "data.source", "train_loader", "dataset")
    if foreign.get("eval_loader", "dataset") is not None:
        foreign.put(_source(foreign, "eval_loader"), "data.evaluate", "eval_loader", "dataset")
    if size is not None:
        foreign.put(size, "data.batch_size", "global_train_batch_size")
    (_chats if is_chat else _pairs)(foreign, "train_loader", "dataset")
    _rows(foreign, "train_loader", "dataset")
    for loader in ("train_loader", "eval_loader"):
        for key, text in _LOADER.items():
            foreign.drop(text, loader, key)
        for key, text in _DATASET.items():
            foreign.drop(text, loader, "dataset", key)
    for key in ("max_seq_len", "packing_ratio", "shuffle", "target_prompts", "target_responses"):
        foreign.take("eval_loader", "dataset", key)
    for key in ("name", "num_workers"):
        foreign.take("eval_loader", key)


def _rows(foreign: Foreign, *dataset: str) -> None:
    """What all kinds of rows have."""
    context = foreign.take(*dataset, "max_seq_len", default=foreign.get("max_seq_len"))
    if context is not None:
        foreign.put(context, "data.context", *dataset, "max_seq_len")
        foreign.take("max_seq_len")
    foreign.move("data.shuffle", *dataset, "shuffle")
    foreign.move("data.workers", "train_loader", "num_workers")
    drops = foreign.take("train_loader", "drop_last", default=False)
    foreign.put(drops, "data.drop_last", "train_loader", "drop_last")
    if foreign.get(*dataset, "preprocessing_fn") is not None:
        text = "call it in a function of yours (data: {kind: function, name: file.py:name}), or write its"
        foreign.drop(
            f"{text} rows to a file with `prompt` and `completion`",
            *dataset,
            "preprocessing_fn",
            undecided=True,
        )
    text = "rows have `prompt` and `completion`, or `messages`; rename LLM Foundry's `response`"
    foreign.remark(text, *dataset, undecided=False)


def _chats(foreign: Foreign, *dataset: str) -> None:
    """What rows of causal language models have."""
    packing = foreign.take(*dataset, "packing_ratio")
    foreign.put(packing not in (None, 1), "data.packing", *dataset, "packing_ratio")  # 1 packs nothing
    _losses(foreign, *dataset)


def _pairs(foreign: Foreign, *dataset: str) -> None:
    """What rows of sequence-to-sequence models have."""
    foreign.put("prompt", "data.text", *dataset)
    foreign.put("completion", "data.label", *dataset)
    for key in ("target_prompts", "target_responses"):
        foreign.take(*dataset, key)


def _source(foreign: Foreign, loader: str) -> dict[str, Any]:
    """The arguments of `datasets.load_dataset`."""
    path = (loader, "dataset")
    name = foreign.take(*path, "hf_name")
    split = foreign.take(*path, "split", default="train")
    options = foreign.mapping(*path, "hf_kwargs")
    foreign.take(*path, "hf_kwargs")
    return {"dataset": name, **options, "split": split}


def _losses(foreign: Foreign, *path: str) -> None:
    """On which tokens the loss is computed."""
    prompts = str(foreign.take(*path, "target_prompts", default="none"))
    responses = str(foreign.take(*path, "target_responses"))
    if prompts == "all":
        foreign.put("all", "data.loss_on", *path, "target_prompts")
    elif prompts != "none":
        foreign.remark("data.loss_on is assistant or all", *path, "target_prompts")
    elif responses == "all":
        foreign.put("assistant", "data.loss_on", *path, "target_responses")
    else:  # by default the last answer is learned there
        text = "every answer of a chat is learned, which differs from `last` for rows of several answers"
        foreign.remark(text, *path, "target_responses", undecided=responses == "last")
