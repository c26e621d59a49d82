"""The keys of a run's configuration; the reference of runs shows the fields' docs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

Arguments = dict[str, Any]
Entries = Annotated[dict[str, Arguments | None], BeforeValidator(lambda given: given or {})]
"""Entries by name; a key without a value, as when all of them are commented out, has none."""


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class Adapter(Section):
    """An adapter that peft trains instead of the whole model."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str = "lora"
    """Peft's name: "lora", "ia3", "adalora", ...; the other keys are that method's own arguments."""


class DPO(Section):
    """What an adapter learns from preferences."""

    beta: float = Field(default=0.1, gt=0)
    """How much the model may differ from the one without the adapter; less for larger values."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Of DPO (arXiv:2305.18290), SLiC (arXiv:2305.10425) or IPO (arXiv:2310.12036)."""


class HubModel(Section):
    """A Hugging Face model."""

    kind: Literal["causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification"]
    config: Arguments | None = None
    """Build a new model from this transformers configuration: `model_type` and what is not its default."""
    pretrained: str | None = None
    """Or read the model from this directory, or from the Hugging Face hub by name."""
    tokenizer: str | None = None
    """"bytes", a directory or a name on the hub. None means that of `pretrained`, or else "bytes"."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; None means float32 for new models and the files' dtype for pretrained ones."""
    adapter: Adapter | None = None
    """Train an adapter and freeze the model's own weights."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen weights below an adapter in 4 bits (QLoRA); needs torchao."""
    dpo: DPO = DPO()
    """For data of kind preferences; the model without its adapter is the reference."""
    num_labels: PositiveInt | None = None
    """Classes of a sequence classifier; by default those of `data`."""
    metrics: Entries = {}
    """Of evaluations: perplexity, token_accuracy, accuracy (of classes), or package.module.Name."""
    chunked_loss: bool | PositiveInt = True
    """Compute the loss without all logits, a number of positions at a time (an integer is this number), where
    the model's head is linear and no metric reads them."""

    @model_validator(mode="after")
    def _one_origin(self) -> HubModel:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError("give either config (a new model) or pretrained (one from disk or the hub)")
        if self.quantize and self.adapter is None:
            raise ValueError("quantize freezes the weights, so there must be an adapter to train")
        return self


class ModuleModel(Section):
    """A PyTorch module: a ComposerModel, or a classifier of (inputs, targets)."""

    kind: Literal["module"]
    name: str
    """`package.module.Name`, or `file.py:Name` for a file next to the configuration."""
    arguments: Arguments = {}
    num_classes: PositiveInt | None = None
    """For a plain classifier's accuracy."""


class Data(Section):
    """The keys of all kinds of data."""

    batch_size: PositiveInt = 8
    """Samples in a step across all ranks: results do not depend on the number of ranks."""
    shuffle: bool = True
    """Read the samples to train on in another order in each epoch."""
    drop_last: bool = True
    """Leave out the last batch of each epoch of training if it has fewer samples."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes of each rank that load data; 0 loads it in the training process."""


Source = str | list[str] | Arguments
"""A text: "english" or "python" (they come with Python), files (globs), or {dataset: name, ...}."""


class TextData(Data):
    """Text, cut into pieces of equal length; for causal and masked language models."""

    kind: Literal["text"]
    source: Source
    """"english" or "python", which come with Python itself; files by glob, one or a list; or {dataset: ...}
    for `datasets.load_dataset`, whose `column` is the text."""
    context: PositiveInt = 128
    """Tokens in a sample."""
    held_out: int = Field(64, ge=0)
    """Samples to evaluate on, spread evenly over the text."""
    mask: float = Field(0.15, gt=0, lt=1)
    """For masked language models: the share of tokens to guess."""


class LabeledData(Data):
    """Pieces of text by class; for sequence classification."""

    kind: Literal["labeled_text"]
    classes: dict[str, Source]
    """Label to text, in the form of `source` of `kind: text`."""
    context: PositiveInt = 128
    held_out: int = Field(64, ge=0)

    @field_validator("classes")
    @classmethod
    def _are_several(cls, classes: dict[str, Source]) -> dict[str, Source]:
        if len(classes) < 2:
            raise ValueError(f"expected at least two classes, got {len(classes)}")
        return classes


class RowData(Data):
    """The keys of data in rows."""

    source: Source
    """Files (.jsonl, .json, .parquet, .csv) by glob, one or a list; a folder that `save_to_disk` wrote; or
    {dataset: ...} for `datasets.load_dataset`."""
    evaluate: Source | None = None
    """Rows to evaluate on, in the same form."""
    held_out: int = Field(0, ge=0)
    """Or how many rows of `source` to evaluate on, spread evenly over it."""
    streaming: bool = False
    """Read rows while training, and not before: each rank and worker reads its own files."""
    context: PositiveInt = 1024
    """The most tokens of a sample; longer rows are cut at their end."""

    @model_validator(mode="after")
    def _one_evaluation(self) -> RowData:
        if self.held_out and (self.streaming or self.evaluate is not None):
            raise ValueError("held_out takes rows of a source that is not streamed; evaluate names others")
        return self


class ChatData(RowData):
    """Conversations (`messages`, `tools`), pairs of `prompt` and `completion`, or `text`; for causal LMs."""

    kind: Literal["chat"]
    packing: bool = True
    """Pack rows into samples of `context` tokens, without attention between them; else pad them."""
    loss_on: Literal["assistant", "all"] | None = None
    """null: the assistant's turns of `messages`, the `completion` after a `prompt`, and all of a text."""
    chat_template: str | None = None
    """A file next to the configuration, with a chat template in place of the tokenizer's; it is saved with
    the model."""


class PreferenceData(RowData):
    """Rows of `prompt`, `chosen` and `rejected`, strings or messages, for DPO of an adapter."""

    kind: Literal["preferences"]
    chat_template: str | None = None
    """A file next to the configuration, with a chat template in place of the tokenizer's; it is saved with
    the model."""


def _class_name(value: object) -> object:
    """YAML reads 1 and true, which are names too."""
    return str(value).lower() if isinstance(value, int) else value


ClassName = Annotated[str, BeforeValidator(_class_name)]


class TableData(RowData):
    """Rows with a text and a label: a class, or for sequence-to-sequence models the text to write."""

    kind: Literal["table"]
    text: str | Annotated[list[str], Field(min_length=1, max_length=2)] = "text"
    """The column of texts, or two of them."""
    label: str = "label"
    """The column of labels: numbers, names, or texts to write."""
    classes: list[ClassName] | None = None
    """The names of the labels, in order; by default those of the column."""

    @field_validator("classes")
    @classmethod
    def _are_different(cls, classes: list[str] | None) -> list[str] | None:
        if classes is not None and (len(classes) < 2 or len({*classes}) < len(classes)):
            raise ValueError(f"expected at least two different names, got {classes!r}")
        return classes


class FunctionData(Data):
    """Data sets returned by a function of yours."""

    kind: Literal["function"]
    name: str
    """`package.module.name`, or `file.py:name` for a file next to the configuration. It returns the data set
    to train on and the one to evaluate on, which may be None. Rows of `datasets` become tensors."""
    arguments: Arguments = {}
    collate: str | None = None
    """A function that makes a batch of a list of samples, in the same form; by default torch's, or for
    rows of `datasets` with `input_ids` PadRows."""


class Named(Section):
    """Something by its name; the other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def arguments(self) -> Arguments:
        """The other keys."""
        return dict(self.model_extra or {})


class Run(Section):
    """A whole run."""

    out: Path
    """The folder for everything that the run writes: checkpoints, logs, the exported model."""
    seed: int = Field(17, ge=0, lt=2**63)
    """Of everything random: weights, order of the data, dropout."""
    model: Annotated[HubModel | ModuleModel, Field(discriminator="kind")]
    data: Annotated[
        TextData | LabeledData | ChatData | PreferenceData | TableData | FunctionData,
        Field(discriminator="kind"),
    ]
    optimizer: Named = Named(name="adamw")
    """"adamw", "adam", "sgd" or package.module.Name, and its arguments; without them the name is enough. By
    default Adam's lr is 1e-3 for a new model, 2e-5 for a pretrained one, and 2e-4 for an adapter on it."""
    scheduler: Named | None = None
    """Of the learning rate, in the same form; or a function (state) -> factor, as package.module.name."""
    parallelism: str | Arguments | None = "fsdp"
    """A strategy by name ("fsdp", "hsdp", "tp", "ddp", ...), the fields of a ParallelismConfig, or null for
    none."""
    trainer: Arguments
    """Arguments of the Trainer: `max_duration`, `precision`, `gradient_clipping`, ..."""
    callbacks: Entries = {}
    """By name, with their arguments."""
    loggers: Entries = {}
    """By name, with their arguments."""
    checkpoints: Arguments | None = {}
    """Arguments of the CheckpointSaver, whose `folder` is in `out` unless given; null saves nothing."""
    phases: Arguments | None = None
    """Arguments of FineTuningPhases, to thaw the model phase by phase."""
    resume: bool | Arguments = True
    """Resume from the newest checkpoint of this run, if there is one; with false an existing one is an error.
    Or the fields of a Resume: {load_path: ..., load_weights_only: true}."""
    export: bool | Literal["merged"] = True
    """Write the model when the run ends, in the format of transformers, peft or torch. With "merged" an
    adapter is merged into the weights of its model."""

    @model_validator(mode="after")
    def _can_merge(self) -> Run:
        if self.export == "merged" and getattr(self.model, "adapter", None) is None:
            raise ValueError("export: merged has nothing to merge, because there is no model.adapter")
        return self

    @model_validator(mode="after")
    def _has_reference(self) -> Run:
        prefers = isinstance(self.data, PreferenceData)
        if not prefers and getattr(self.model, "dpo", DPO()) != DPO():
            raise ValueError("model.dpo has no effect: it needs data of kind preferences")
        if prefers and getattr(self.model, "adapter", None) is None:
            raise ValueError(
                "data of kind preferences needs a model.adapter: the model without it is the reference"
            )
        return self

    @field_validator("out", mode="before")
    @classmethod
    def _is_local(cls, out: object) -> object:
        if "://" in str(out):
            raise ValueError(f"{out} is a URL, but out is a local folder; checkpoints.folder may be a URL")
        return os.path.expanduser(out) if isinstance(out, str) else out
