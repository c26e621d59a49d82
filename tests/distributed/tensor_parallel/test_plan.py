"""Which module gets which style, why, and what is refused; no process group."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from composer_dist import MeshConfig, ParallelismConfig, ParallelismError, Rule, TPConfig
from composer_dist.distributed import ParallelPlan, plan_parallelism
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit.compare import fails
from tests.kit.decoder import Decoder, DecoderBlock, GroupedAttention, UnevenMlp
from tests.kit.huggingface import built as hf_built
from tests.kit.huggingface import gpt2, llama, lora, lora_gpt2, lora_llama, mixtral, phi3, qwen3
from tests.kit.toy import built

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own


def planned(model: nn.Module, *rules: Rule, tp: int = 2, world: int = 2, **options: Any) -> ParallelPlan:
    """The plan of a model on `tp` tensor-parallel ranks of `world`."""
    config = ParallelismConfig(mesh=MeshConfig(tp=tp), tp=TPConfig(**options), rules=rules)
    return plan_parallelism(model, config, world_size=world)


def styles(plan: ParallelPlan) -> dict[str, str]:
    """Module name to style."""
    assert isinstance(plan.tensor_parallel, TensorParallelPlan)
    return {name: one.label for name, one in plan.tensor_parallel.modules.items()}


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory."""
    return built(make, device="meta")


BLOCK = {
    "attention": "share_input",
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.0": "colwise",
    "mlp.3": "rowwise",
}
ENDS = {"embed": "vocab", "head": "colwise_gather"}


def test_a_plain_decoder_is_planned_by_its_structure() -> None:
    plan = planned(meta(Decoder))
    blocks = {f"layers.{i}.{name}": style for i in range(2) for name, style in BLOCK.items()}
    assert styles(plan) == ENDS | blocks
    assert plan.explain("layers.1.mlp.3").endswith(
        "Tensor parallel over 2 ranks: rowwise, because layers.1.mlp has a pair of matrices."
    )
    text = "layers.0.mlp.0.weight, cut along dimension 0 among 2 tensor-parallel ranks."
    assert plan.explain("layers.0.mlp.0.weight") == text.replace(",", ":")
    assert "only tensor-parallel ranks share the model" in plan.explain("norm.weight")
    assert plan.units == ()
    assert "tensor parallel: 16 modules (1 vocab, 2 share_input, 8 colwise, 4 rowwise, 1" in str(plan)


def test_units_gather_what_a_rank_has_of_cut_parameters() -> None:
    alone = plan_parallelism(meta(Decoder), ParallelismConfig(mesh=MeshConfig()), world_size=2)
    both = planned(meta(Decoder), world=4)
    names = [unit.modules for unit in both.units]
    assert names == [unit.modules for unit in alone.units]
    assert both.units[1].nbytes < 0.6 * alone.units[1].nbytes
    assert both.explain("head.weight") == (
        "head.weight, cut along dimension 0 among 2 tensor-parallel ranks: sharded in unit root."
    )
    assert both.digest() != alone.digest()


LLAMA = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}


@pytest.mark.promise(30)
def test_a_hugging_face_model_brings_its_plan() -> None:
    found = styles(planned(meta(llama)))
    assert {name for name, style in found.items() if style == "colwise"} == {
        f"model.layers.{i}.{name}" for i in range(2) for name in LLAMA
    }
    assert found["model.embed_tokens"] == "vocab"
    assert found["lm_head"] == "colwise_gather"
    assert "it is in the plan of LlamaForCausalLM" in planned(meta(llama)).explain("lm_head")
    assert styles(planned(meta(qwen3)))["model.layers.0.self_attn.q_norm"] == "sum_gradients"
    plan = planned(meta(mixtral))
    assert styles(plan)["model.layers.0.mlp.experts"] == "replicate"
    text = "replicate, because its experts stay whole on every tensor-parallel rank."
    assert plan.explain("model.layers.1.mlp.experts").endswith(text)
    assert styles(planned(meta(phi3)))["model.layers.0.self_attn.qkv_proj"] == "colwise_gather"


def test_a_plan_of_the_head_alone_is_warned_of() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    found = planned(hf_built("GptOssForCausalLM", **sizes, **heads))
    assert any("cuts 6% of the parameters, in lm_head; each of the 2" in one for one in found.warnings)
    assert not planned(llama()).warnings


def test_a_fused_projection_is_cut_in_each_of_its_parts_and_sizes_are_divided() -> None:
    plan = planned(meta(gpt2))
    found = styles(plan)
    assert found["transformer.h.0.attn.c_attn"] == "colwise:3"
    assert found["transformer.wte"] == "vocab"
    sizes = "On each rank its num_heads 4 -> 2, embed_dim 32 -> 16, split_size 32 -> 16."
    assert sizes in plan.explain("transformer.h.0.attn")
    assert "nf 96 -> 48" in plan.explain("transformer.h.0.attn.c_attn")
    where = plan.explain("transformer.h.0.attn.c_attn.weight")
    assert "cut along dimension 1, each of its 3 groups among 2 tensor-parallel ranks" in where
    tie = "lm_head.weight, one parameter with transformer.wte.weight"
    assert plan.explain("lm_head.weight").startswith(tie)


def test_adapters_are_cut_with_their_layer() -> None:
    found = styles(planned(built(lora_llama)))
    prefix = "base_model.model.model.layers.0.self_attn."
    assert found[f"{prefix}q_proj.base_layer"] == found[f"{prefix}q_proj.lora_B.default"] == "colwise"
    assert found[f"{prefix}q_proj.lora_A.default"] == "replicate"
    assert found[f"{prefix}o_proj.lora_A.default"] == "rowwise"
    assert found[f"{prefix}o_proj.lora_B.default"] == "replicate"
    found = styles(planned(built(lora_llama), sequence_parallel=True))
    assert found[f"{prefix}q_proj.lora_A.default"] == "sum_gradients"
    assert found[f"{prefix}o_proj.lora_B.default"] == "sum_gradients"
    found = styles(planned(built(lora_gpt2)))
    assert found["base_model.model.transformer.h.0.attn.c_attn.lora_B.default"] == "colwise:3"


def test_copies_that_peft_trains_instead_get_the_style_too() -> None:
    found = styles(planned(lora(llama(), modules_to_save=["lm_head"])))
    names = ("original_module", "modules_to_save.default")
    assert [found[f"base_model.model.lm_head.{name}"] for name in names] == ["colwise_gather"] * 2


@pytest.mark.promise(31)
def test_heads_are_divided_for_all_or_none() -> None:
    plan = planned(nn.ModuleDict({"attention": GroupedAttention()}))
    found = {d.attribute: (d.before, d.after) for d in plan.tensor_parallel.divisions}  # type: ignore[union-attr]
    assert found == {"num_heads": (4, 2), "num_kv_heads": (2, 1), "embed_dim": (16, 8)}

    model = nn.ModuleDict({"good": GroupedAttention(), "bad": GroupedAttention(3, 3, 12)})
    with pytest.raises(ParallelismValueError, match=r"(?s)^(?!.*good).*num_kv_heads=3") as error:
        planned(model)
    text = "bad (GroupedAttention) has num_heads=3, which tp=2 does not divide; take a tp that does"
    assert text in str(error.value)
    assert model["good"].num_heads == 4
    alike = nn.ModuleDict({name: GroupedAttention(3, 3, 12) for name in "abcd"})
    kind = "(GroupedAttention)"
    with pytest.raises(ParallelismValueError) as error:
        planned(alike)
    text = f"a {kind}, b {kind}, c {kind} and 1 more have num_heads=3, which tp=2 does not divide; take a tp"
    assert str(error.value).count(text) == 1
    assert len(str(error.value).splitlines()) == 2  # and num_kv_heads


class Renamed(nn.Module):
    """Attention that calls its sizes by names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teams, self.num_heads, self.breadth = 4, 7, 16
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))


@pytest.mark.promise(31)
def test_a_module_may_name_its_own_sizes() -> None:
    model = Renamed()
    model.tensor_parallel_attributes = ("teams",)  # type: ignore[assignment]
    plan = planned(model, head_attributes=("breadth",))
    found = {d.attribute: d.after for d in plan.tensor_parallel.divisions}  # type: ignore[union-attr]
    assert found == {"teams": 2, "breadth": 8}
    with pytest.raises(ParallelismValueError, match="num_heads=7"):
        planned(Renamed())
    with pytest.raises(ParallelismValueError, match="has the head_attributes width, as integers"):
        planned(model, head_attributes=("breadth", "width"))


def test_what_cannot_be_placed_is_listed_and_rules_place_it() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    conv = "  0: a Conv1d, not part of a known attention"
    with fails(ParallelismValueError, conv, "  1: a Linear", "  3: a Linear", "tp='replicate'"):
        planned(model)
    rules = [Rule("0", tp="replicate"), Rule("1", tp="colwise"), Rule("3", tp="rowwise")]
    assert styles(planned(model, *rules)) == {"0": "replicate", "1": "colwise", "3": "rowwise"}


class Ternary(nn.Linear):
    """A layer that divides its weight by the mean of all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.abs().mean(), self.bias)


class Named(nn.Linear):
    """A layer that computes what its base does."""


@pytest.mark.parametrize(
    ("name", "style"),
    [("attention.v_proj", "colwise"), ("mlp.0", "colwise"), ("mlp.3", "rowwise"), ("head", "colwise_gather")],
)
def test_a_layer_with_a_forward_of_its_own_is_cut_only_if_asked(name: str, style: str) -> None:
    model = nn.ModuleDict({**dict(DecoderBlock().named_children()), "head": nn.Linear(16, 8)})
    inner, out = model.get_submodule(name).in_features, model.get_submodule(name).out_features
    model.set_submodule(name, Named(inner, out))
    assert styles(planned(model))[name] == style
    model.set_submodule(name, Ternary(inner, out))
    text = f"  {name}: a Ternary, which has a forward of its own and may need the whole matrix"
    with fails(ParallelismValueError, text, "Rule(name, tp='colwise')"):
        planned(model)
    assert styles(planned(nn.ModuleDict({"one": Ternary(4, 4)}), plan={"one": style})) == {"one": style}
    whole = Rule(name.rpartition(".")[0] or name, tp="replicate")
    assert not {key for key in styles(planned(model, whole)) if key.startswith(name)} - {whole.match}


def test_a_rule_leaves_a_part_of_the_plan_whole() -> None:
    found = styles(planned(meta(Decoder), Rule("layers.0.attention", tp="replicate")))
    assert found["layers.0.attention"] == "replicate"
    assert not [name for name in found if name.startswith("layers.0.attention.")]
    assert found["layers.1.attention.q_proj"] == "colwise"


def warmed() -> nn.Module:
    """Attention with a parameter that stays whole among its heads."""
    model = GroupedAttention()
    model.temperature = nn.Parameter(torch.ones(1))
    return model


def test_explicit_styles_go_by_name_and_pattern() -> None:
    plan = planned(UnevenMlp(), plan={"re:u.": "colwise", "down": "rowwise"})
    assert styles(plan) == {"up": "colwise", "down": "rowwise"}
    assert plan.tensor_parallel.cuts.keys() == {"up.weight", "up.bias", "down.weight"}  # type: ignore[union-attr]


TORCH = {"up": ColwiseParallel(), "down": RowwiseParallel(), "": PrepareModuleInput(input_layouts=None)}


def test_torchs_style_objects_are_planned_like_the_others() -> None:
    plan = planned(UnevenMlp(), plan=TORCH)
    assert styles(plan) == {"": "PrepareModuleInput", "up": "ColwiseParallel", "down": "RowwiseParallel"}
    assert plan.tensor_parallel.parameters == ("up.weight", "up.bias", "down.weight", "down.bias")  # type: ignore[union-attr]
    assert "cut along dimension 1" in plan.explain("down.weight")


def tied() -> nn.Module:
    """A matrix that two layers hold."""
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def fused() -> nn.Module:
    return nn.ModuleDict({"qkv": nn.Linear(4, 12), "proj": nn.Linear(4, 4)})


UP = {"plan": {"up": "colwise"}}


def prefixed() -> nn.Module:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model: nn.Module = peft.get_peft_model(llama(), config)
    return model


FAULTS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (UnevenMlp, {"plan": {"upp": "colwise"}}, "no module matches 'upp'. Did you mean 'up'?"),
    (UnevenMlp, {"plan": {"up": "columns"}}, "no tensor-parallel style 'columns'.*Did you mean 'colwise'?"),
    (UnevenMlp, {"plan": {"up": "rowwise:3"}}, "no tensor-parallel style 'rowwise:3'"),
    (UnevenMlp, {"plan": {"up": 3}}, "style of TPConfig.plan\\['up'\\] is of type int"),
    (UnevenMlp, {"plan": {"norm": "colwise"}}, "norm cannot be colwise: .* nn.Linear .*, not for LayerNorm"),
    (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        {"plan": {"0": "colwise"}},
        r"0 cannot be colwise: .* not for ParametrizedLinear, whose weight is quantized or computed",
    ),
    (UnevenMlp, {"plan": {"up": "vocab"}}, "up cannot be vocab: the style is for nn.Embedding"),
    (UnevenMlp, {"plan": {"up": "colwise:4"}}, "6 features, which cannot be divided into 4 equal groups"),
    (lambda: UnevenMlp(1), UP, "up.weight has 1 features along dimension 0, too few for tp=2"),
    (lambda: UnevenMlp(5), {"plan": {"up": ColwiseParallel()}}, "5 features.*torch's styles require it"),
    (lambda: nn.Embedding(8, 2, sparse=True), {"plan": {"": "vocab"}}, "an embedding with sparse needs all"),
    (tied, {"plan": {"embed": "colwise", "head": "colwise"}}, "one parameter, but embed and head would cut"),
    (UnevenMlp, UP | {"loss_parallel": True}, "needs a module with the style 'colwise_gather'"),
    (UnevenMlp, UP | {"sequence_parallel": True}, "no ModuleList has cut matrices"),
    (lambda: nn.ModuleDict({"only": nn.LayerNorm(4)}), {}, "the model has no matrix"),
    (lambda: meta(llama), {"plan": {}}, "Nothing would be cut among the 2"),
    (lambda: meta(llama), {"tp": 4, "world": 4}, "1 more have 2 heads of 8 features, which tp=4 does not"),
    (fused, {}, "qkv: it fuses query, key and value in an unknown order.*'colwise:3'"),
    (warmed, {}, "temperature stays whole inside the root, where each rank has only some"),
    (lambda: lora(llama(), use_dora=True), {}, r"0\.self_attn\.q_proj has adapters whose lora_magnitude"),
    (lambda: lora(llama(), target_modules=["embed_tokens"]), {}, "embed_tokens .*embedding cannot be cut"),
    (
        lambda: lora(llama(), trainable_token_indices={"embed_tokens": [1]}),
        {},
        "embed_tokens has trainable tokens of peft",
    ),
    (
        lambda: lora(llama(), target_parameters=["mlp.up_proj.weight"]),
        {},
        "up_proj has adapters whose target_parameters cannot be cut",
    ),
    (prefixed, {}, "Prefix tuning gives each layer keys and values of all heads.*FSDP2 or DDP"),
]


@pytest.mark.parametrize(("make", "options", "text"), FAULTS)
def test_what_is_wrong_is_named(make: Callable[[], nn.Module], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ParallelismError, match=text):
        planned(make(), **options)


def test_a_tied_partner_gets_a_style_that_agrees() -> None:
    plan = planned(tied(), plan={"head": "colwise_gather"})
    assert styles(plan) == {"embed": "vocab", "head": "colwise_gather"}
    assert "shares its matrix with head" in plan.explain("embed")


def test_sequence_parallel_cuts_between_the_regions() -> None:
    found = styles(planned(meta(Decoder), sequence_parallel=True))
    assert found["layers.0"] == found["layers.1"] == "sequence_block"
    assert found["layers.0.attention"] == found["layers.0.mlp"] == "gather_sequence"
    assert found["layers.1.mlp_norm"] == "sequence"
    with pytest.raises(ParallelismValueError, match=r"whether layers\.0\.attention\.q_proj \(Linear\) mixes"):
        planned(meta(Decoder), Rule("layers.0.attention", tp="replicate"), sequence_parallel=True)


def test_options_without_tensor_parallel_ranks_and_ranks_without_options_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="2 tensor-parallel ranks, but no module"):
        plan_parallelism(UnevenMlp(), ParallelismConfig(mesh=MeshConfig(tp=2)), world_size=2)
    config = ParallelismConfig(tp=TPConfig(), rules=[Rule("up", tp="colwise")])
    with pytest.raises(ParallelismValueError, match=r"Rule\('up'\), tp=TPConfig.* but the mesh has tp=1"):
        plan_parallelism(UnevenMlp(), config, world_size=2)
    lenient = ParallelismConfig(tp=TPConfig(), strict=False)
    assert "the mesh has tp=1" in plan_parallelism(UnevenMlp(), lenient, world_size=2).warnings[0]
    with pytest.raises(ParallelismTypeError, match="'auto' or a mapping"):
        TPConfig(plan="colwise")  # type: ignore[arg-type]


def test_a_cut_parameter_in_no_unit_is_refused_where_gradients_differ() -> None:
    rules = [Rule("up", shard=False)]
    plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(ParallelismValueError, match="Tensor parallelism would cut up.weight, up.bias"):
        planned(UnevenMlp(), *rules, plan=plan, world=4)
    assert planned(UnevenMlp(), *rules, plan=plan).units == ()


def test_styles_come_from_yaml() -> None:
    config = {"mesh": {"tp": 2}, "tp": UP, "rules": [{"match": "down", "tp": "rowwise"}]}
    assert styles(plan_parallelism(UnevenMlp(), config, world_size=2)) == {"up": "colwise", "down": "rowwise"}
