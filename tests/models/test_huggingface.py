"""`HuggingFaceModel`: a transformers model's loss, metrics, adapters and generation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from torchmetrics.text import Perplexity

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import full_model_state, load_full_model_state
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import init_context, parallelize_composer_model, parallelize_model
from composer_dist.errors import CheckpointError, ParallelismTypeError, ParallelismValueError
from composer_dist.models import ComposerModel, HuggingFaceModel
from composer_dist.models.metrics import LanguagePerplexity
from tests.kit import huggingface as hf
from tests.kit.compare import equal, part_of, same, same_parameters
from tests.kit.decoder import token_batch
from tests.kit.grids import crossed, slow
from tests.kit.world import on_ranks
from tests.zoo import toy

# peft 0.21 reads an attribute that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def adapted_base(kind: str = "lora", **options: Any) -> HuggingFaceModel:
    torch.manual_seed(1)
    return HuggingFaceModel(hf.base_for(kind), peft_config=hf.adapter(kind), **options)


def batch() -> dict[str, Tensor]:
    ids = hf.prompt(0)
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def test_forward_and_loss_are_the_models_own() -> None:
    model = HuggingFaceModel(hf.pretrained_llama())
    assert isinstance(model, ComposerModel)
    given = batch() | {"of no use": torch.zeros(1)}
    before = dict(given)
    outputs = model(given)
    expected = hf.pretrained_llama()(**batch())
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(model.loss(outputs, given), expected.loss)
    assert given == before, "the batch is not changed"


def test_the_name_of_a_model_is_refused() -> None:
    name: Any = "gpt2"
    with pytest.raises(ParallelismTypeError, match="not 'gpt2': load one by AutoModelForCausalLM"):
        HuggingFaceModel(name)


def test_training_makes_no_cache_of_keys_and_values() -> None:
    model = HuggingFaceModel(hf.pretrained_llama(), chunked_loss=False)
    caches = {training: model.train(training)(batch()).past_key_values for training in (True, False)}
    assert caches[True] is None
    assert caches[False] is not None


def test_the_loss_is_weighted_by_the_labels_that_count() -> None:
    assert HuggingFaceModel(hf.pretrained_llama()).loss_weight(batch()) == 2 + 3
    assert HuggingFaceModel(hf.pretrained_t5()).loss_weight(batch()) == 2 + 4
    assert HuggingFaceModel(hf.pretrained_llama()).loss_weight({"input_ids": torch.ones(1, 2)}) is None


def test_batches_and_losses_are_checked() -> None:
    model = HuggingFaceModel(hf.pretrained_llama())
    with pytest.raises(ParallelismTypeError, match="tuple"):
        model((hf.prompt(0),))
    outputs = model({"input_ids": hf.prompt(0)})
    with pytest.raises(ParallelismValueError, match="needs labels; it has only input_ids"):
        model.loss(outputs, {"input_ids": hf.prompt(0)})


@pytest.mark.parametrize(("build", "shifts"), [(hf.pretrained_llama, True), (hf.pretrained_t5, False)])
def test_metrics_see_logits_and_shifted_labels(build: Callable[[], Any], shifts: bool) -> None:
    model = HuggingFaceModel(build(), use_logits=True, metrics=[Perplexity(ignore_index=-100)])
    given = batch()
    outputs = model(given)
    logits = model.eval_forward(given, outputs)
    assert torch.equal(logits, outputs.logits)
    assert torch.equal(model.eval_forward(given), logits)
    metric = model.get_metrics(is_train=False)["Perplexity"]
    assert metric is not model.get_metrics(is_train=True)["Perplexity"]
    labels = given["labels"].clone()
    model.update_metric(given, logits, metric)
    assert torch.equal(given["labels"], labels)
    torch.testing.assert_close(metric.compute().log(), outputs.loss.detach())
    assert model.shift_labels is shifts
    assert not any("metric" in name.lower() for name, _ in model.named_modules())


@pytest.mark.parametrize(("name", "shifts"), [
    *[(name, True) for name in ("llava", "qwen2_5_vl", "idefics3", "kosmos-2", "voxtral")],
    *[(name, False) for name in ("florence2", "pix2struct", "bert")],
])  # fmt: skip
def test_labels_are_shifted_where_the_models_own_loss_shifts_them(name: str, shifts: bool) -> None:
    model: Any = toy.build(name)
    given: Any = toy.inputs(name, model)
    wrapped = HuggingFaceModel(model, use_logits=True, metrics=[LanguagePerplexity()])
    assert wrapped.shift_labels is shifts
    labels = given["labels"][..., 1:] if shifts else given["labels"]
    assert wrapped.loss_weight(given) == (labels != -100).sum()
    outputs = wrapped(given)
    metric = wrapped.get_metrics()["LanguagePerplexity"]
    wrapped.update_metric(given, wrapped.eval_forward(given, outputs), metric)
    torch.testing.assert_close(metric.compute().log().float(), outputs.loss.detach())


@pytest.mark.parametrize(("text", "shifts"), [("OPTConfig", True), ("T5Config", False)])
def test_labels_are_shifted_if_the_language_model_inside_shifts_them(text: str, shifts: bool) -> None:
    config = transformers.Blip2Config(text_config=getattr(transformers, text)())
    with torch.device("meta"):
        model = transformers.Blip2ForConditionalGeneration(config)
    assert HuggingFaceModel(model).shift_labels is shifts


def test_a_larger_tokenizer_needs_leave_to_resize() -> None:
    large = hf.tokenizer()
    large.add_tokens([f"word{i}" for i in range(60)])
    with pytest.raises(ParallelismValueError, match=f"{len(large)} tokens, .* 64"):
        HuggingFaceModel(hf.pretrained_llama(), large)
    model = HuggingFaceModel(hf.pretrained_llama(), large, allow_embedding_resizing=True)
    assert model.model.get_input_embeddings().num_embeddings == len(large)
    assert model.config.vocab_size == len(large)


@pytest.mark.promise(92)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("kind", hf.ADAPTERS)
def test_the_state_dict_is_what_peft_would_save(kind: str) -> None:
    model = adapted_base(kind)
    state = model.state_dict()
    whole = dict(model.named_parameters(remove_duplicate=False))
    whole |= dict(model.named_buffers(remove_duplicate=False))
    assert 0 < len(state) < len(whole)
    model.model.peft_config["default"].save_only_topk_weights = False  # it would save them changed
    saved = {tensor.data_ptr() for tensor in get_peft_model_state_dict(model.model).values()}
    if not model.model.peft_config["default"].is_prompt_learning:
        assert {tensor.data_ptr() for tensor in state.values()} == saved
    kept = {tensor.data_ptr() for tensor in state.values()}
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.data_ptr() not in kept] == []
    same(state, {name: whole[name] for name in state})


@pytest.mark.promise(92)
@pytest.mark.parametrize("kind", ["lora", "dora", "modules_to_save", "bias_all", "prompt"])
def test_that_state_dict_loads_strictly(kind: str) -> None:
    model = adapted_base(kind)
    state = {name: torch.full_like(tensor, 2) for name, tensor in model.state_dict().items()}
    assert model.load_state_dict(state) == ([], [])
    equal(dict(model.state_dict()), state)
    missing = next(iter(state))
    del state[missing]
    assert model.load_state_dict(state, strict=False).missing_keys == [missing]


@pytest.mark.promise(92)
def test_nested_anywhere() -> None:
    critic = nn.ModuleDict({"inner": adapted_base("ia3")})
    outer = nn.ModuleDict({"policy": adapted_base(), "critic": critic, "head": nn.Linear(2, 2)})
    state = outer.state_dict()
    heads = {"head.weight", "head.bias"}
    assert all("lora_" in n or "ia3_" in n for n in state if n not in heads)
    assert set(full_model_state(outer, select="adapters")) == set(state) - heads
    assert outer.load_state_dict(state) == ([], [])
    del state["head.bias"]
    assert outer.load_state_dict(state, strict=False).missing_keys == ["head.bias"]


@pytest.mark.promise(92)
def test_several_adapters_of_any_name_and_peft_without_a_peft_model() -> None:
    model = adapted_base()
    model.model.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"]))
    names = list(model.state_dict())
    assert len([n for n in names if ".default." in n]) == 8
    assert len([n for n in names if n.endswith("o_proj.lora_A.second.weight")]) == 2
    base = hf.pretrained_llama()
    base.add_adapter(hf.adapter("lora"))
    names = list(HuggingFaceModel(base).state_dict())
    assert len(names) == len([name for name in names if "lora_" in name]) == 8


@pytest.mark.promise(92)
def test_everything_on_request() -> None:
    model = adapted_base(should_save_peft_only=False)
    assert "model.base_model.model.lm_head.weight" in model.state_dict()
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        model.load_state_dict(full_model_state(model, select="adapters"))
    with pytest.raises(ParallelismValueError, match="already a PeftModel"):
        HuggingFaceModel(model.model, peft_config=hf.adapter("lora"))


@pytest.mark.promise(92)
def test_an_empty_adapter_is_refused() -> None:
    model = hf.emptied(adapted_base())
    with pytest.raises(CheckpointError, match="'default' of model"):
        model.state_dict()
    with pytest.raises(CheckpointError, match="'default' of the model"):
        HuggingFaceModel(model.model)


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"target_modules": ["q_proj", "v_prj"]}, r"target_modules: 'v_prj' .* Did you mean 'v_proj'"),
        ({"modules_to_save": ["lm_head", "score"]}, r"modules_to_save: 'score' matches nothing"),
        ({"exclude_modules": ["odd"]}, r"exclude_modules: 'odd' matches nothing"),
        ({"target_parameters": ["q_proj.weight", "odd.weight"]}, r"target_parameters: 'odd.weight'"),
        ({"rank_pattern": {"q_proj": 2, "k_prj": 2}}, r"rank_pattern: 'k_prj' matches nothing"),
        ({"layers_to_transform": [0, 9]}, r"layers_to_transform: '9' matches nothing"),
    ],
)
def test_what_an_adapter_names_must_be_in_the_model(options: Any, missing: str) -> None:
    with pytest.raises(ParallelismValueError, match=missing):
        HuggingFaceModel(hf.base_for("lora"), peft_config=LoraConfig(**options))


@pytest.mark.parametrize("kind", hf.ADAPTERS)
def test_an_adapter_on_a_meta_base_is_on_meta_too(kind: str) -> None:
    with torch.device("meta"):
        base = hf.base_for(kind)
    model = HuggingFaceModel(base, peft_config=hf.adapter(kind))
    real = adapted_base(kind)
    parameters = dict(model.named_parameters())
    assert [name for name, p in parameters.items() if not p.is_meta] == []
    assert list(model.state_dict()) == list(real.state_dict())
    found, expected = (
        {name: (p.shape, p.requires_grad) for name, p in one.named_parameters()} for one in (model, real)
    )
    assert found == expected


@pytest.mark.promise(92)
@crossed({"wrapped": [False, True], "kind": ["lora", "dora", "modules_to_save", "bias_lora_only", "adalora"]})
@on_ranks(2)
def test_the_same_from_shards(kind: str, wrapped: bool) -> None:
    model, expected = adapted_base(kind), dict(adapted_base(kind).state_dict())
    if wrapped:
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
        for i in range(2):
            layers[i] = checkpoint_wrapper(layers[i])
    hf.sharded(model)
    for options in ({}, {"select": "adapters"}):
        equal(full_model_state(model, ranks="all", **options), expected)


@pytest.mark.promise(92)
@on_ranks(2)
def test_adapters_load_into_shards_strictly() -> None:
    expected, model = dict(adapted_base().state_dict()), adapted_base()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    hf.sharded(model)
    assert load_full_model_state(model, {} if dist.get_rank() else expected) == ([], [])
    equal(full_model_state(model, ranks="all"), expected)


def base_of(rank: int, dtype: torch.dtype) -> Any:
    """Real weights on rank 0, none elsewhere."""
    with init_context(empty=rank != 0, dtype=dtype):
        return hf.pretrained_llama()


def trained_adapters(base: Any) -> tuple[HuggingFaceModel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = HuggingFaceModel(base, peft_config=hf.adapter("lora"), should_save_peft_only=False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-2)


def ten_steps(model: HuggingFaceModel, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(10):
        loss = model.loss(model(batch()), batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.promise(93)
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
@on_ranks(2)
def test_base_and_adapters_arrive_and_only_adapters_move(dtype: torch.dtype) -> None:
    reference, their_optimizer = trained_adapters(base_of(0, dtype))
    model, optimizer = trained_adapters(base_of(dist.get_rank(), dtype))
    parallelize_composer_model(model, optimizer, FSDP2Config(activation_checkpointing=True))
    before = full_model_state(model, ranks="all")
    equal(before, dict(reference.state_dict()))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert ten_steps(model, optimizer) == pytest.approx(ten_steps(reference, their_optimizer), rel=tolerance)
    after = full_model_state(model, ranks="all")
    model.should_save_peft_only = True
    adapters = full_model_state(model, ranks="all")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == set(adapters) == {name for name in before if "lora_" in name}
    assert {tensor.dtype for tensor in adapters.values()} == {torch.float32}


@pytest.mark.promise(93)
@pytest.mark.parametrize("config", [FSDP2Config(), DDPConfig()], ids=["fsdp", "ddp"])
@pytest.mark.parametrize("kind", ["prompt", "p_tuning", "prefix"])
@on_ranks(2)
def test_learned_prompts_train_like_one_process(kind: str, config: FSDP2Config | DDPConfig) -> None:
    reference, model = hf.adapted(kind).model, hf.adapted(kind).model
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (reference, model)]
    done = parallelize_model(model, config, optimizers[1])
    for step in range(2):
        ids = token_batch(step)
        for one, rows, optimizer in zip(
            (reference, model), (ids, part_of(ids, done.mesh)), optimizers, strict=True
        ):
            one(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, reference)
    before = hf.adapted(kind).model
    assert any(
        not torch.equal(a, b) for a, b in zip(before.parameters(), reference.parameters(), strict=True)
    )
