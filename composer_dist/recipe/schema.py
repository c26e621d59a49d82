"""What a run's configuration may say. The fields' docs are what `composer-dist train --help` points to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Arguments = dict[str, Any]


class Section(BaseModel):
    """A part of the configuration; it knows its keys and refuses others."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Adapter(Section):
    """What peft trains in place of the whole model."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str = "lora"
    """Peft's name: "lora", "ia3", "adalora", ...; the other keys are that method's own arguments."""


class HubModel(Section):
    """A Hugging Face model."""

    kind: Literal["causal_lm", "masked_lm", "sequence_classification"]
    config: Arguments | None = None
    """Build it new, of this transformers configuration: `model_type` and what differs from its defaults."""
    pretrained: str | None = None
    """Or read it from this directory, or from the Hugging Face hub by name."""
    tokenizer: str | None = None
    """"bytes", a directory or a name of the hub. None: that of `pretrained`, else "bytes"."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; None is float32 for new models and the files' own for pretrained ones."""
    adapter: Adapter | None = None
    """Train an adapter and leave the model's own weights as they are."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen weights below an adapter in 4 bits (QLoRA); needs torchao."""

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
    """`package.module.Name`, or `file.py:Name` for a file beside the configuration."""
    arguments: Arguments = {}
    num_classes: PositiveInt | None = None
    """For a plain classifier's accuracy."""


class Data(Section):
    """What all kinds of data have in common."""

    batch_size: PositiveInt = 8
    """Samples in a step, those of all ranks together: results do not depend on how many ranks there are."""
    shuffle: bool = True
    workers: int = Field(0, ge=0)
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
    """For masked language models: the share of the tokens to guess."""


class LabeledData(Data):
    """Pieces of text by class; for sequence classification."""

    kind: Literal["labeled_text"]
    classes: dict[str, Source]
    """Label to text, as in `TextData.source`."""
    context: PositiveInt = 128
    held_out: int = Field(64, ge=0)


class FunctionData(Data):
    """Data sets that a function of yours returns."""

    kind: Literal["function"]
    name: str
    """`package.module.name`, or `file.py:name` for a file beside the configuration. It returns the data set
    to train on and the one to evaluate on, or None in its place."""
    arguments: Arguments = {}


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
    """The folder for all that the run writes: checkpoints, logs, the exported model."""
    seed: int = 17
    model: Annotated[HubModel | ModuleModel, Field(discriminator="kind")]
    data: Annotated[TextData | LabeledData | FunctionData, Field(discriminator="kind")]
    optimizer: Named = Named(name="adamw")
    """"adamw", "adam", "sgd", or package.module.Name, and its arguments; without any, the name alone."""
    scheduler: Named | None = None
    """Of the learning rate: likewise."""
    parallelism: str | Arguments | None = "fsdp"
    """A strategy by name ("fsdp", "hsdp", "tp", "ddp", ...), or the fields of a ParallelismConfig; null:
    none."""
    trainer: Arguments
    """Arguments of the Trainer: `max_duration`, `precision`, `gradient_clipping`, ..."""
    callbacks: dict[str, Arguments | None] = {}
    """By name, with their arguments."""
    loggers: dict[str, Arguments | None] = {}
    """By name, with their arguments."""
    checkpoints: Arguments | None = {}
    """Arguments of the CheckpointSaver; null saves nothing."""
    phases: Arguments | None = None
    """Arguments of FineTuningPhases: thaw the model phase by phase."""
    resume: bool | Arguments = True
    """Go on from the newest checkpoint of this run, if there is one; false begins anew, where there is none
    yet. Or the fields of a Resume: {load_path: ..., load_weights_only: true}."""
    export: bool | Literal["merged"] = True
    """Write the model when the run ends, as transformers, peft or torch load it. An adapter is written
    as one, or with "merged" as the model with the adapter in its weights."""
