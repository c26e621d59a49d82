"""What transformers, peft and datasets reject, in words that name the key and the remedy."""

import inspect
import json
import os
import socket
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from composer_dist.errors import CheckpointError, ParallelismError, ParallelismValueError, in_words
from composer_dist.files.index import check_inside, read_text
from composer_dist.files.safetensors import read_index
from composer_dist.recipe.named import check_directory
from composer_dist.recipe.schema import Arguments, HubModel
from composer_dist.structure.families import position_tables
from composer_dist.users_code import is_of_users_code
from composer_dist.wording import listed, near_miss

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS = ("tokenizer*", "vocab*", "spiece*", "*.model")
_MAPPINGS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Errors of libraries become ours, about `what`.

    Raises:
        ParallelismValueError: what a library says, without its advice; with the class from the user's code.
    """
    try:
        yield
    except ParallelismError:
        raise
    except Exception as error:  # each library has kinds of its own
        said = in_words(error) if is_of_users_code(error) else str(error)
        text = textwrap.shorten(said.strip().partition("\n")[0], 300, placeholder=" ...")
        raise ParallelismValueError(f"{what}: {text or type(error).__name__}") from error


@contextmanager
def from_hub(key: str, name: str) -> Iterator[None]:
    """Inside, transformers reads what `key` names: a directory, or a name on the Hugging Face hub.

    Raises:
        ParallelismValueError: it is not there, or not readable; names the file where one is cut short.
    """
    path, what = Path(name), f"{key}={name}"
    if path.is_dir():
        with _named(what):
            _check_files(key, what, path)
    else:
        check_directory(name, what)
    unreachable = None
    try:
        with nullcontext() if path.is_dir() else _cached_if_unreachable() as unreachable:
            yield
    except ParallelismError:
        raise
    except Exception as error:
        if path.is_dir():
            with blaming(what):
                raise
        if unreachable:
            hub = f"{unreachable}, and the model is not in the cache"
        elif os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
            hub = "HF_HUB_OFFLINE is set, so only models that are in the cache already can be used"
        else:
            hub = textwrap.shorten(str(error).partition("\n")[0], 300, placeholder=" ...")
        raise ParallelismValueError(
            f"{what}: there is no such directory (seen from {Path.cwd()}), and the Hugging Face hub does not "
            f"give a model of this name: {hub}"
        ) from error


@contextmanager
def _cached_if_unreachable() -> Iterator[str | None]:
    """Inside, huggingface_hub works offline if its host has no address, for which it tries half a minute.

    Yields:
        Why it cannot be reached.
    """
    from huggingface_hub import constants

    host, before = urlsplit(constants.ENDPOINT).hostname, constants.HF_HUB_OFFLINE
    why = None
    if host and not before and not getproxies():
        try:
            socket.getaddrinfo(host, 443)
        except socket.gaierror as error:
            why = f"{host} cannot be reached ({error.strerror})"
    constants.HF_HUB_OFFLINE = before or why is not None
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_files(key: str, what: str, path: Path) -> None:
    """A directory must have what `key` needs; no link leads out of it."""
    _check_content(key, what, path)
    inside = [str(one.relative_to(path)) for one in path.rglob("*") if one.is_symlink() or not one.is_dir()]
    for index in path.glob("*.bin.index.json"):
        with blaming(f"{what}: {index.name}"):
            inside += map(os.fspath, json.loads(read_text(index))["weight_map"].values())
    check_inside(path, inside)


def _check_content(key: str, what: str, path: Path) -> None:
    there = listed(sorted(file.name for file in path.iterdir())) or "no file at all"
    if key == "model.tokenizer":
        if not any(file for pattern in _TOKENIZERS for file in path.glob(pattern)):
            raise ParallelismValueError(
                f"{what}: the directory has no tokenizer; it has {there}. 'bytes' needs none."
            )
        return
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ParallelismValueError(
                f"{what} is an adapter of peft, not a model: merge it into its model first (peft's "
                "merge_and_unload, or export: merged in its run), and give that directory."
            )
        raise ParallelismValueError(f"{what}: the directory has no config.json of a model; it has {there}.")


def check_weights(name: str) -> None:
    """Raises if `name` is a directory without weights, or whose safetensors files have invalid headers.

    Raises:
        ParallelismValueError: names the file.
    """
    path, what = Path(name), f"model.pretrained={name}"
    found = [path / file for file in _WEIGHTS if (path / file).is_file()]
    if path.is_dir() and not found:
        raise ParallelismValueError(f"{what}: the directory has none of {', '.join(_WEIGHTS)}.")
    if found and "safetensors" in found[0].name:
        with _named(what):
            read_index(found[0])


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors about files say which key names them."""
    try:
        yield
    except CheckpointError as error:
        raise ParallelismValueError(f"{what}: {error}") from error


def check_kind(model: HubModel, config: Any) -> None:
    """Raises unless transformers has a model of this kind for the configuration.

    Raises:
        ParallelismValueError: names the kinds that there are, or what makes the model causal.
    """
    import transformers

    kinds = [kind for kind, name in _MAPPINGS.items() if type(config) in getattr(transformers, name)]
    if model.kind not in kinds:
        found = f"only as {' or '.join(kinds)}" if kinds else "in no kind that a run can train"
        raise ParallelismValueError(
            f"model.kind={model.kind}: transformers has {config.model_type!r} {found}."
        )
    # transformers only warns of encoders that learn to copy the next token.
    off = [key for key in ("is_decoder", "causal") if getattr(config, key, None) is False]
    encodes = "masked_lm" in kinds and not getattr(config, "is_encoder_decoder", False)
    if model.kind == "causal_lm" and encodes and off:
        where = f"{model.pretrained}/config.json" if model.pretrained is not None else "model.config"
        raise ParallelismValueError(
            f"model.kind=causal_lm: {config.model_type!r} sees the token that it has to predict. Set "
            f"{off[0]}: true in {where}, or use model.kind: masked_lm."
        )


def check_vocabulary(config: Arguments, tokenizer: Any) -> None:
    """Raises if a new model would have fewer tokens than the tokenizer.

    Raises:
        ParallelismValueError: names both numbers.
    """
    rows = config.get("vocab_size", len(tokenizer))
    if not isinstance(rows, int | float) or rows < len(tokenizer):  # transformers tells of 300.0
        raise ParallelismValueError(
            f"model.config.vocab_size is {rows!r}, but the tokenizer has {len(tokenizer)} tokens; without "
            "vocab_size the model gets as many."
        )


def check_positions(model: nn.Module, context: int | None) -> None:
    """Raises if the data's samples are longer than the model's table of positions.

    Raises:
        ParallelismValueError: names the table, both sizes and the keys.
    """
    for name, positions in position_tables(model).items():
        if context is not None and context > positions:
            raise ParallelismValueError(
                f"data.context is {context}, but {name} has only {positions} positions: lower "
                "data.context, or give a new model more of them (max_position_embeddings, n_positions)."
            )


def targets(model: nn.Module) -> str:
    """The names of a model's linear layers, of which adapters are targets."""
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return listed(sorted(names), 12)


def check_wandb(options: Mapping[str, Any]) -> None:
    """Raises if wandb would not take a logger's options, or has no key and nobody to ask for one."""
    import wandb

    known = inspect.signature(wandb.init).parameters
    for name in options.keys() - known - {"interval"}:
        raise ParallelismValueError(f"loggers.wandb: unknown key {name!r}.{near_miss(name, known)}")
    mode = options.get("mode") or os.environ.get("WANDB_MODE") or "online"
    keys = map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    files = (Path(os.environ.get("NETRC") or "~/.netrc"), Path("~/_netrc"))
    asks = sys.stdin is not None and sys.stdin.isatty()
    if mode == "online" and not (asks or any(keys) or any(one.expanduser().is_file() for one in files)):
        raise ParallelismValueError(
            "loggers.wandb: wandb has no key. Run `wandb login`, set WANDB_API_KEY, or set mode: offline."
        )
