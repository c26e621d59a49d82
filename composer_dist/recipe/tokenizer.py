"""Tokenizers by name. The one of bytes needs no files."""

from typing import Any


def tokenizer_named(name: str) -> Any:
    """A tokenizer by name: `bytes`, a directory, or a name of the Hugging Face hub."""
    if name == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    from composer_dist.recipe.other_libraries.failures import from_hub

    with from_hub("model.tokenizer", name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of the text, and five special ones after them.

    It is one of transformers' classes: it is saved with the model, and `AutoTokenizer` loads it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    vocabulary = {character: byte for byte, character in alphabet.items()}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        is_bytes=True,  # kept with the tokenizer: its texts need no tokenization
    )
    return made
