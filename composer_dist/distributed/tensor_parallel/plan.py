"""The plan of tensor parallelism: which module gets which style, and why. The model is not changed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed.feature_plan import (
    FeaturePlan,
    Rank,
    StepEvent,
    Transfer,
    refuse_compiled,
    sent_along,
)
from composer_dist.distributed.tensor_parallel.adapters import refuse_prefixes, with_adapters
from composer_dist.distributed.tensor_parallel.heads import Division, plan_divisions
from composer_dist.distributed.tensor_parallel.infer import infer_styles
from composer_dist.distributed.tensor_parallel.matrices import Cut, cuts_of, is_matrix
from composer_dist.distributed.tensor_parallel.sequence import with_sequence_parallel
from composer_dist.distributed.tensor_parallel.styles import STYLES, Style, Styled, as_style
from composer_dist.distributed.wishes import Wishes
from composer_dist.errors import Faults, ParallelismValueError
from composer_dist.structure.names import ancestors
from composer_dist.structure.select import select, spell
from composer_dist.structure.structure import Structure
from composer_dist.tensors.parts import chunk
from composer_dist.wording import HINTS, listed, near_miss

_CUDA_STATE = 16
"""Bytes of a CUDA generator's state: its seed and its offset."""
_LITTLE = 0.25
"""Of the parameters: less than this is hardly worth the ranks."""


@dataclass(frozen=True)
class TensorParallelPlan(FeaturePlan):
    """Everything that tensor parallelism will do to a model."""

    size: int
    """Ranks that share each matrix."""
    modules: Mapping[str, Styled]
    """The styled modules, in the order of the model."""
    cuts: Mapping[str, Cut]
    """The cut parameters, by first name."""
    parameters: tuple[str, ...]
    """Parameters on the tensor-parallel mesh: cut ones, and those that torch's styles replicate."""
    of_torch: frozenset[str]
    """Those of `parameters` that torch's own style objects put there."""
    divisions: tuple[Division, ...]
    """Sizes that modules store and that are divided."""
    logits: str | None = None
    """The module whose output stays cut, for a loss that accepts cut logits."""

    def communication(self, rank: Rank) -> Callable[[StepEvent], Iterator[Transfer]]:
        sent = sent_along("tp")
        state = [torch.get_rng_state().nbytes, *([_CUDA_STATE] if rank.device_type == "cuda" else [])]

        def follow(event: StepEvent) -> Iterator[Transfer]:
            if event.moment == "start-up":  # the random state, which `apply.arm` aligns
                yield from (Transfer("broadcast", "tp", self.size, nbytes) for nbytes in state)
            yield from sent(event)

        return follow

    def explain(self, module: str) -> str:
        one = self.modules.get(module)
        divided = [f"{d.attribute} {d.before} -> {d.after}" for d in self.divisions if d.module == module]
        parts = [f"Tensor parallel over {self.size} ranks: {one.label}, because {one.reason}."] if one else []
        parts += [f"On each rank its {', '.join(divided)}."] if divided else []
        return " ".join(parts)

    def where(self, parameter: str) -> str | None:
        """A description of how the tensor-parallel ranks cut a parameter; None if they do not."""
        cut = self.cuts.get(parameter)
        if cut is None:
            return None
        groups = f", each of its {cut.groups} groups" if cut.groups > 1 else ""
        return f"cut along dimension {cut.dim}{groups} among {self.size} tensor-parallel ranks"

    def notes(self) -> Iterator[str]:
        styles = Counter(one.label for one in self.modules.values())
        counts = ", ".join(f"{count} {style}" for style, count in styles.items())
        yield f"tensor parallel: {styles.total()} modules ({counts})"


def plan(structure: Structure, wishes: Wishes, sizes: Mapping[str, int]) -> TensorParallelPlan | None:
    """Decide every module's style; None for one tensor-parallel rank."""
    asked, size = wishes.ruled("tp"), sizes["tp"]
    options = wishes.config.tp or TPConfig(plan={})
    if size == 1:
        return None
    if wishes.config.tp is None and not asked:
        raise ParallelismValueError(
            f"The mesh has {size} tensor-parallel ranks, but no module has a tensor-parallel style; add "
            "tp=TPConfig(plan='auto'), or styles by TPConfig(plan={...}) or Rule(tp=...)."
        )
    styled = _with_ties(structure, _choose(structure, options, asked))
    refuse_compiled(structure, styled)
    if options.sequence_parallel:
        styled = with_sequence_parallel(structure, styled)
    logits = _keep_logits_cut(structure, styled) if options.loss_parallel else None
    divisions: tuple[Division, ...] = ()
    cuts: dict[str, Cut] = {}
    of_torch: frozenset[str] = frozenset()
    with Faults() as faults:
        with faults.catching():
            divisions = plan_divisions(structure, styled, size, options.head_attributes)
        with faults.catching():
            refuse_prefixes(structure, styled)
        styled = with_adapters(structure, _share_inputs(styled))
        with faults.catching():
            cuts = _cuts(structure, styled, size)
        with faults.catching():
            of_torch = frozenset(_of_torch(structure, styled))
        if not cuts and not of_torch and not faults:
            faults.append(
                f"Nothing would be cut among the {size} tensor-parallel ranks: no style cuts a matrix. Give "
                "some modules 'colwise', 'rowwise' or 'vocab', or use tp=1."
            )
    parameters = tuple(name for name in structure.parameters if name in cuts or name in of_torch)
    ordered = {name: styled[name] for name in structure.modules if name in styled}
    return TensorParallelPlan(size, ordered, cuts, parameters, of_torch, divisions, logits)


def idle_styles(wishes: Wishes, sizes: Mapping[str, int]) -> list[str]:
    """Warnings about tensor-parallel options for a mesh with one tensor-parallel rank."""
    asked = [f"Rule({spell(rule.match)})" for rule in wishes.config.rules if rule.tp is not None]
    asked += ["tp=TPConfig(...)"] if wishes.config.tp is not None else []
    if sizes["tp"] > 1 or not asked:
        return []
    text = f"{', '.join(asked)} asks for tensor parallelism, but the mesh has tp=1: set MeshConfig(tp=...), "
    text += "or start several processes."
    return wishes.tolerated([text])


def little_cut(structure: Structure, wishes: Wishes, plan: TensorParallelPlan | None) -> list[str]:
    """A warning if "auto" leaves most of the model whole, as where a model's own plan has only the head."""
    if plan is None or wishes.config.tp is None or wishes.config.tp.plan != "auto":
        return []
    sizes = {name: held.info.nbytes for name, held in structure.parameters.items()}
    share = sum(sizes[name] for name in plan.parameters) / sum(sizes.values())
    if share >= _LITTLE:
        return []
    return [
        f"TPConfig(plan='auto') cuts {share:.0%} of the parameters, in {listed([*plan.modules], 3)}; each of "
        f"the {plan.size} tensor-parallel ranks holds and computes the rest whole. Give other modules "
        "styles, with Rule(name, tp='colwise') and so on, or use tp=1."
    ]


def _choose(
    structure: Structure, options: TPConfig, asked: Mapping[str, tuple[Any, str]]
) -> dict[str, Styled]:
    """The styles of the configuration, and those of the rules, which take precedence."""
    modules = structure.modules
    styled: dict[str, Styled] = {}
    unplaced: dict[str, str] = {}
    if options.plan == "auto":
        styled, unplaced = infer_styles(structure)
    else:
        with Faults() as unmatched:
            for key, value in options.plan.items():
                names, source = select(key, modules), f"TPConfig.plan[{key!r}]"
                if not names:
                    hint = near_miss(key, modules) if len(unmatched) < HINTS else ""
                    unmatched.append(f"TPConfig.plan: no module matches {key!r}.{hint}")
                style = as_style(value, source)
                styled.update({structure.first[name]: Styled(style, source) for name in names})
    for name, (value, source) in asked.items():
        style = as_style(value, source)
        if style == STYLES["replicate"]:  # with everything inside
            styled = {n: one for n, one in styled.items() if name not in ancestors(n)}
        styled[name] = Styled(style, source)
    unplaced = {n: why for n, why in unplaced.items() if not any(above in styled for above in ancestors(n))}
    if unplaced:
        lines = "\n".join(f"  {name}: {why}" for name, why in unplaced.items())
        raise ParallelismValueError(
            f"TPConfig(plan='auto') cannot place these modules:\n{lines}\nGive each one a style with "
            "Rule(name, tp='colwise'), or tp='replicate' to leave it whole on every rank; or list all "
            "modules in TPConfig(plan={...})."
        )
    return styled


def _with_ties(structure: Structure, styled: dict[str, Styled]) -> dict[str, Styled]:
    """The styles, with one that agrees for each module that shares its matrix with a styled one."""
    found = dict(styled)
    for held in structure.parameters.values():
        owners = [structure.first[name] for name in held.info.owners]
        having = [name for name in owners if name in styled and getattr(styled[name].style, "cut", True)]
        for owner in owners if having else ():
            if owner not in styled:
                embedding = isinstance(structure.modules[owner], nn.Embedding)
                style = STYLES["vocab" if embedding else "colwise_gather"]
                found[owner] = Styled(style, f"it shares its matrix with {having[0]}")
    return found


def _share_inputs(styled: dict[str, Styled]) -> dict[str, Styled]:
    """The styles, with one for parents of several projections of one input, to sum its gradient once."""
    parents = Counter(
        name.rpartition(".")[0]
        for name, one in styled.items()
        if isinstance(one.style, Style) and one.style.before == "copy"
    )
    share = Styled(Style("share_input", share=True), "it projects its input several times")
    return styled | {name: share for name, count in parents.items() if count > 1 and name not in styled}


def _keep_logits_cut(structure: Structure, styled: dict[str, Styled]) -> str:
    """Change the style of the module that makes the logits: the last whose cut output is gathered."""
    for name in reversed(structure.modules):
        one = styled.get(name)
        if one and isinstance(one.style, Style) and one.style.after == "gather":
            styled[name] = replace(one, style=replace(one.style, name="colwise_logits", after="logits"))
            return name
    raise ParallelismValueError(
        "loss_parallel needs a module with the style 'colwise_gather' that makes the logits; give it to the "
        "model's head, or leave loss_parallel out."
    )


def _cuts(structure: Structure, styled: Mapping[str, Styled], size: int) -> dict[str, Cut]:
    names = {place.key_of: name for name, held in structure.parameters.items() for place in held.places}
    found: dict[str, tuple[Cut, str]] = {}
    with Faults() as faults:
        for name, one in styled.items():
            module = structure.modules[name]
            if fault := _misfit(module, one.style):
                faults.append(f"{name or 'the root'} cannot be {one.label}: {fault}")
                continue
            for key, cut in _module_cuts(module, one.style):
                first = names[id(module), key]
                info = structure.tensors[first].info
                if first in found and found[first][0] != cut:
                    faults.append(
                        f"{' and '.join(info.names)} are one parameter, but {found[first][1]} and {name} "
                        "would cut it in different ways; give both styles that agree ('vocab' and "
                        "'colwise_gather')."
                    )
                found[first] = cut, name
                faults += _size_faults(f"{name}.{key}", info.shape, cut, size, isinstance(one.style, Style))
        for name, (_, owner) in found.items():
            others = {structure.first[one] for one in structure.tensors[name].info.owners} - styled.keys()
            if others:
                faults.append(
                    f"{owner} cuts {name}, but {', '.join(sorted(others))} holds it too and has no style; "
                    "give it one."
                )
    return {name: cut for name, (cut, _) in found.items()}


def _module_cuts(module: nn.Module, style: Any) -> Iterator[tuple[str, Cut]]:
    if isinstance(style, ColwiseParallel):
        style = STYLES["colwise"]
    elif isinstance(style, RowwiseParallel):
        style = STYLES["vocab" if isinstance(module, nn.Embedding) else "rowwise"]
    if isinstance(style, Style):
        yield from cuts_of(module, style)


def _misfit(module: nn.Module, style: Any) -> str | None:
    kind = type(module).__name__
    if not isinstance(style, Style):
        torch_kinds = (ColwiseParallel, RowwiseParallel)
        if isinstance(style, torch_kinds) and not isinstance(module, (nn.Linear, nn.Embedding)):
            return f"torch's style is for nn.Linear and nn.Embedding, not for {kind}."
        return None
    if style.cut is None:
        return None
    if style.cut == "rows" or (isinstance(module, nn.Embedding) and style.cut == "out"):
        if not isinstance(module, nn.Embedding):
            return f"the style is for nn.Embedding, not for {kind}."
        odd = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
        return f"an embedding with {', '.join(odd)} needs all of its rows." if odd else None
    if not is_matrix(module):
        why = ", whose weight is quantized or computed (weight norm, spectral norm)"
        why = why if isinstance(module, nn.Linear) else ""
        return (
            f"the style is for nn.Linear (and GPT-2's Conv1D) with a weight of its own, not for {kind}{why}."
        )
    return None


def _size_faults(name: str, shape: tuple[int, ...], cut: Cut, size: int, ours: bool) -> Iterator[str]:
    length = shape[cut.dim]
    if length % cut.groups:
        yield f"{name} has {length} features, which cannot be divided into {cut.groups} equal groups."
        return
    first, last = chunk(length // cut.groups, size, size - 1)
    if first == last:
        yield f"{name} has {length} features along dimension {cut.dim}, too few for tp={size} ranks."
    elif length % size and not ours:
        yield (
            f"{name} has {length} features along dimension {cut.dim}, which tp={size} does not divide; "
            "torch's styles require it, styles by name ('colwise', 'rowwise') do not."
        )


def _of_torch(structure: Structure, styled: Mapping[str, Styled]) -> Iterator[str]:
    """Parameters that torch's style objects turn into DTensors: all those inside the module."""
    of_torch = {
        name: one
        for name, one in styled.items()
        if not isinstance(one.style, Style) and not type(one.style).__name__.startswith("PrepareModule")
    }
    with Faults() as faults:
        for name, below in structure.inside(of_torch).items():
            one = of_torch[name]
            buffers = [info.name for info in below if info.kind == "buffer"]
            if buffers and not isinstance(one.style, SequenceParallel):
                faults.append(
                    f"{name} has buffers ({', '.join(buffers)}), which torch's {one.label} would turn into "
                    "DTensors; give the module a style by name."
                )
            yield from (info.name for info in below if info.kind == "parameter")
