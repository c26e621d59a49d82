"""Tiny transformers models, adapters of many kinds, and a tokenizer, built without a download."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from composer_dist.models import HuggingFaceModel
from tests.kit.meshes import mesh_of

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def built(name: str, **options: Any) -> Any:
    """A transformers model by the name of its class, with these fields of its configuration."""
    import transformers

    cls = getattr(transformers, name)
    return cls(cls.config_class(**options))


def _pretrained(name: str, **options: Any) -> Any:
    """A model of two layers as a file would give it: the same weights each time, in eval mode."""
    torch.manual_seed(0)
    return built(name, **SIZES, **options).eval()


def pretrained_llama(tied: bool = False) -> Any:
    """A causal language model of two blocks."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return _pretrained("LlamaForCausalLM", tie_word_embeddings=tied, initializer_range=0.4, **sizes, **heads)


def pretrained_gpt2() -> Any:
    """A causal language model with biases, Conv1D layers and tied embeddings."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return _pretrained("GPT2LMHeadModel", initializer_range=0.4, **sizes)


def pretrained_t5() -> Any:
    """An encoder and decoder that share their embedding."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    options = {"initializer_factor": 3.0, "decoder_start_token_id": 0}
    return _pretrained("T5ForConditionalGeneration", **sizes, **options)


def adapter(kind: str) -> Any:
    """A peft configuration by name; see `ADAPTERS`."""
    return ADAPTERS[kind]()


def _peft(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import peft

        return getattr(peft, f"{name}Config")(**options)

    return build


CAUSAL = {"task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": _peft("Lora", r=4, init_lora_weights=False, **CAUSAL),
    "dora": _peft("Lora", r=4, use_dora=True, init_lora_weights=False),
    "modules_to_save": _peft("Lora", r=4, modules_to_save=["lm_head"], **CAUSAL),
    "embedding": _peft("Lora", r=4, target_modules=["embed_tokens", "v_proj"], **CAUSAL),
    "tokens": _peft("Lora", r=4, trainable_token_indices=[1, 5], **CAUSAL),
    "bias_all": _peft("Lora", r=4, bias="all", target_modules=["c_attn"], fan_in_fan_out=True),
    "bias_lora_only": _peft("Lora", r=4, bias="lora_only", target_modules=["c_attn"], fan_in_fan_out=True),
    "ia3": _peft("IA3", init_ia3_weights=False, **CAUSAL),
    "adalora": _peft("AdaLora", total_step=10, **CAUSAL),
    "vera": _peft("Vera", r=4, **CAUSAL),
    "vblora": _peft("VBLoRA", num_vectors=16, vector_length=8, save_only_topk_weights=True, **CAUSAL),
    "oft": _peft("OFT", oft_block_size=8, **CAUSAL),
    "prompt": _peft("PromptTuning", num_virtual_tokens=3, **CAUSAL),
    "p_tuning": _peft("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL),
    "prefix": _peft("PrefixTuning", num_virtual_tokens=3, **CAUSAL),
}


def base_for(kind: str) -> Any:
    """The model that an adapter of this kind is made for."""
    return pretrained_gpt2() if kind.startswith("bias") else pretrained_llama()


def tokenizer() -> Any:
    """One token per letter."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    letters = Tokenizer(model)
    letters.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=letters, **special)


def sharded(model: Any, *, root: bool | None = None, blocks: bool = True) -> Any:
    """`model` under plain FSDP2.

    Args:
        root: the root's `reshard_after_forward`.
        blocks: a unit per transformer block, the rest in the root's; else one unit.
    """
    mesh = mesh_of(1)
    for module in list(model.modules()):
        if blocks and type(module).__name__ in {"LlamaDecoderLayer", "GPT2Block", "T5Block"}:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=root)
    return model


def prompt(rank: int) -> Tensor:
    """Prompts `(2, length)` that differ from rank to rank, in length too."""
    return torch.randint(3, 30, (2, 4 + 3 * rank), generator=torch.Generator().manual_seed(rank))


_SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
_SMALL |= {"max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL |= {"num_key_value_heads": 2}


def llama(**options: Any) -> Any:
    """A Llama of two layers and 50 tokens."""
    return built("LlamaForCausalLM", **(_SMALL | options))


def tied_llama() -> Any:
    """A Llama whose head is its embedding."""
    return llama(tie_word_embeddings=True)


def gpt2(**options: Any) -> Any:
    """A GPT-2: fused projections, Conv1D, a tied head; 51 tokens, uneven for two ranks."""
    sizes = {"vocab_size": 51, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return built("GPT2LMHeadModel", **(sizes | still | tokens | options))


def dropping_gpt2(**options: Any) -> Any:
    """A GPT-2 with dropout."""
    return gpt2(**({"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1} | options))


def lora(model: nn.Module, **options: Any) -> Any:
    """The model with LoRA, on the query and value projections unless told otherwise."""
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "v_proj"], "r": 3} | options
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


def lora_llama(**options: Any) -> Any:
    """A Llama with LoRA on matrices that are cut by rows and by columns."""
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    return lora(llama(), r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.0, **options)


def lora_gpt2() -> Any:
    """A GPT-2 with LoRA on its fused projection."""
    targets = ["c_attn", "c_proj"]
    return lora(gpt2(), r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True)


def qwen3() -> Any:
    """A Qwen 3: norms within the attention, head by head."""
    return built("Qwen3ForCausalLM", head_dim=8, **_SMALL)


def phi3() -> Any:
    """A Phi 3: query, key and value of different widths in one matrix."""
    return built("Phi3ForCausalLM", pad_token_id=0, bos_token_id=0, eos_token_id=0, **_SMALL)


def mixtral(**options: Any) -> Any:
    """A model whose experts lie one by one in its checkpoints."""
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 24, "num_local_experts": 3}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return built("MixtralForCausalLM", **(sizes | heads | options))


LORA = {"llama": lora_llama, "gpt2": lora_gpt2}


def logits(model: nn.Module) -> Tensor:
    ids = prompt(0)
    given = {"decoder_input_ids": ids} if "T5" in type(model).__name__ else {}
    with torch.no_grad():
        result: Tensor = model.eval()(input_ids=ids, **given).logits
    return result


def adapted(kind: str) -> HuggingFaceModel:
    torch.manual_seed(1)
    return HuggingFaceModel(base_for(kind), tokenizer(), peft_config=adapter(kind)).eval()


def random(model: nn.Module, seed: int = 1) -> Any:
    """The model with parameters and saved buffers that no initializer gives."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator))
    return model


def emptied(model: nn.Module) -> nn.Module:
    """The model, whose adapters have lost their tensors."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            del module.lora_A["default"], module.lora_B["default"]
    return model
