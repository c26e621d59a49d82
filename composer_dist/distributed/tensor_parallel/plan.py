"""Which module gets which tensor-parallel style, and why: pure data, before anything is touched."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.tensor_parallel.adapters import with_adapters
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
from composer_dist.wording import near_miss


@dataclass(frozen=True)
class TensorParallelPlan(FeaturePlan):
    """Everything that tensor parallelism will do to a model."""

    size: int
    """Ranks that share each matrix."""
    modules: Mapping[str, Styled]
    """The styled modules, in the order of the model."""
    cuts: Mapping[str, Cut]
    """Parameters, by their first names, that are cut."""
    parameters: tuple[str, ...]
    """Parameters that lie on the tensor-parallel mesh: the cut ones, and what torch's styles replicate."""
    of_torch: frozenset[str]
    """Those of them that torch's own style objects put there."""
    divisions: tuple[Division, ...]
    """Sizes that modules keep of their own, to be divided."""
    logits: str | None = None
    """The module whose output stays cut, for a loss that takes it so."""

    def explain(self, module: str) -> str:
        """The style of a module, and the sizes that it divides, in words."""
        one = self.modules.get(module)
        divided = [f"{d.attribute} {d.before} -> {d.after}" for d in self.divisions if d.module == module]
        parts = [f"Tensor parallel over {self.size} ranks: {one.label}, because {one.reason}."] if one else []
        parts += [f"On each rank its {', '.join(divided)}."] if divided else []
        return " ".join(parts)

    def where(self, parameter: str) -> str | None:
        """How the tensor-parallel ranks cut a parameter, in words; None if they do not."""
        cut = self.cuts.get(parameter)
        if cut is None:
            return None
        groups = f", each of its {cut.groups} groups" if cut.groups > 1 else ""
        return f"cut along dimension {cut.dim}{groups} among {self.size} tensor-parallel ranks"

    def notes(self) -> Iterator[str]:
        """Lines for the plan as text."""
        styles = Counter(one.label for one in self.modules.values())
        counts = ", ".join(f"{count} {style}" for style, count in styles.items())
        yield f"tensor parallel: {styles.total()} modules ({counts})"


def plan(structure: Structure, wishes: Wishes, sizes: Mapping[str, int]) -> TensorParallelPlan | None:
    """Decide every module's style; None where there is one tensor-parallel rank.

    Raises:
        ParallelismValueError: all that is wrong at once: names that match nothing, modules that cannot
            have their style or that nothing places, sizes and heads that do not divide, ties cut in two
            ways.
    """
    asked, size = wishes.ruled("tp"), sizes["tp"]
    options = wishes.config.tp or TPConfig(plan={})
    if size == 1:
        return None
    if wishes.config.tp is None and not asked:
        raise ParallelismValueError(
            f"The mesh has {size} tensor-parallel ranks, but nothing says which modules they share; add "
            "tp=TPConfig(plan='auto'), or styles by TPConfig(plan={...}) or Rule(tp=...)."
        )
    styled = _choose(structure, options, asked)
    styled = _with_ties(structure, styled)
    if options.sequence_parallel:
        styled = with_sequence_parallel(structure, styled)
    logits = _find_logits(structure, styled) if options.loss_parallel else None
    if logits is not None:
        one = styled[logits]
        assert isinstance(one.style, Style)
        styled[logits] = replace(one, style=replace(one.style, name="colwise_logits", after="logits"))
    divisions: tuple[Division, ...] = ()
    cuts: dict[str, Cut] = {}
    of_torch: frozenset[str] = frozenset()
    with Faults() as faults:
        with faults.catching():
            divisions = plan_divisions(structure, styled, size, options.head_attributes)
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
    """Tensor-parallel options where there is one tensor-parallel rank.

    Raises:
        ParallelismValueError: there are some, and `strict`.
    """
    asked = [f"Rule({spell(rule.match)})" for rule in wishes.config.rules if rule.tp is not None]
    asked += ["tp=TPConfig(...)"] if wishes.config.tp is not None else []
    if sizes["tp"] > 1 or not asked:
        return []
    text = f"{', '.join(asked)} asks for tensor parallelism, but the mesh has tp=1: set MeshConfig(tp=...)."
    if wishes.config.strict:
        raise ParallelismValueError(text)
    return [text]


def _choose(
    structure: Structure, options: TPConfig, asked: Mapping[str, tuple[Any, str]]
) -> dict[str, Styled]:
    """The rules' word first, then the configuration's."""
    modules = structure.modules
    styled: dict[str, Styled] = {}
    unplaced: dict[str, str] = {}
    if options.plan == "auto":
        styled, unplaced = infer_styles(structure)
    else:
        unmatched: list[str] = []
        for key, value in options.plan.items():
            names = select(key, modules)
            if not names:
                unmatched.append(f"TPConfig.plan: no module matches {key!r}.{near_miss(key, list(modules))}")
            style = as_style(value, f"TPConfig.plan[{key!r}]")
            styled.update({structure.first[n]: Styled(style, f"TPConfig.plan[{key!r}]") for n in names})
        if unmatched:
            raise ParallelismValueError("\n".join(unmatched))
    for name, (value, source) in asked.items():
        style = as_style(value, source)
        if style == STYLES["replicate"]:  # of all that lies below
            styled = {n: one for n, one in styled.items() if name not in ancestors(n)}
        styled[name] = Styled(style, source)
    unplaced = {n: why for n, why in unplaced.items() if not any(above in styled for above in ancestors(n))}
    if unplaced:
        listed = "\n".join(f"  {name}: {why}" for name, why in unplaced.items())
        raise ParallelismValueError(
            f"TPConfig(plan='auto') cannot place these modules:\n{listed}\nGive each a style: by "
            "Rule(name, tp='colwise'), or tp='replicate' to leave it whole on every rank; or list all "
            "modules in TPConfig(plan={...})."
        )
    return styled


def _with_ties(structure: Structure, styled: dict[str, Styled]) -> dict[str, Styled]:
    """The embedding and the head that share a matrix get styles that agree, where one of them has one."""
    found = dict(styled)
    for held in structure.parameters.values():
        owners = [structure.first[name] for name in held.info.owners]
        having = [name for name in owners if name in styled and not _is_whole(styled[name])]
        for owner in owners if having else ():
            if owner not in styled:
                embedding = isinstance(structure.modules[owner], nn.Embedding)
                style = STYLES["vocab" if embedding else "colwise_gather"]
                found[owner] = Styled(style, f"it shares its matrix with {having[0]}")
    return found


def _share_inputs(styled: dict[str, Styled]) -> dict[str, Styled]:
    """Modules with several projections of one input, as query, key and value, sum its gradient once."""
    parents = Counter(
        name.rpartition(".")[0]
        for name, one in styled.items()
        if isinstance(one.style, Style) and one.style.before == "copy"
    )
    share = Styled(Style("share_input", share=True), "it projects its input several times")
    return styled | {name: share for name, count in parents.items() if count > 1 and name not in styled}


def _is_whole(one: Styled) -> bool:
    return isinstance(one.style, Style) and one.style.cut is None


def _find_logits(structure: Structure, styled: Mapping[str, Styled]) -> str:
    """The module that makes the logits: the last whose cut output is gathered."""
    for name in reversed(structure.modules):
        one = styled.get(name)
        if one and isinstance(one.style, Style) and one.style.after == "gather":
            return name
    raise ParallelismValueError(
        "loss_parallel leaves the logits cut, but no module has the style 'colwise_gather' that makes them; "
        "give it to the model's head, or leave loss_parallel out."
    )


def _cuts(structure: Structure, styled: Mapping[str, Styled], size: int) -> dict[str, Cut]:
    """Every cut parameter.

    Raises:
        ParallelismValueError: what cannot be cut.
    """
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
                        f"{' and '.join(info.names)} are one parameter, which {found[first][1]} and {name} "
                        "would cut in different ways; give both styles that agree ('vocab' and "
                        "'colwise_gather')."
                    )
                found[first] = cut, name
                faults += _size_faults(f"{name}.{key}", info.shape, cut, size, isinstance(one.style, Style))
        for name, (_, owner) in found.items():
            others = {structure.first[one] for one in structure.tensors[name].info.owners} - styled.keys()
            if others:
                faults.append(
                    f"{name} is cut for {owner}, but {', '.join(sorted(others))} holds it too; give "
                    "that a style."
                )
    return {name: cut for name, (cut, _) in found.items()}


def _module_cuts(module: nn.Module, style: Any) -> Iterator[tuple[str, Cut]]:
    if isinstance(style, Style):
        yield from cuts_of(module, style)
    elif isinstance(style, (ColwiseParallel, RowwiseParallel)):
        along_out = isinstance(style, ColwiseParallel)
        known = STYLES["colwise" if along_out else "rowwise"]
        if isinstance(module, nn.Embedding) and not along_out:
            known = STYLES["vocab"]
        yield from cuts_of(module, known)


def _misfit(module: nn.Module, style: Any) -> str | None:
    """Why a module cannot have a style."""
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
            return f"that is for an embedding, not for {kind}."
        odd = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
        return f"an embedding with {', '.join(odd)} needs all of its rows." if odd else None
    if not is_matrix(module):
        return f"that is for nn.Linear (and GPT-2's Conv1D) in full precision, not for {kind}."
    return None


def _size_faults(name: str, shape: tuple[int, ...], cut: Cut, size: int, ours: bool) -> Iterator[str]:
    length = shape[cut.dim]
    if length % cut.groups:
        yield f"{name} has {length} features, which are not {cut.groups} equal groups."
        return
    first, last = chunk(length // cut.groups, size, size - 1)
    if first == last:
        yield f"{name} has {length} features along dimension {cut.dim}, too few for tp={size} ranks."
    elif length % size and not ours:
        yield (
            f"{name} has {length} features along dimension {cut.dim}, which tp={size} does not divide; "
            "torch's styles need that, styles by name ('colwise', 'rowwise') do not."
        )


def _of_torch(structure: Structure, styled: Mapping[str, Styled]) -> Iterator[str]:
    """Parameters that torch's style objects make DTensors of: all that lie below the module.

    Raises:
        ParallelismValueError: modules with buffers, which the styles would make DTensors too.
    """
    with Faults() as faults:
        for name, one in styled.items():
            if isinstance(one.style, Style) or type(one.style).__name__.startswith("PrepareModule"):
                continue
            below = [
                held.info
                for held in structure.tensors.values()
                if any(name in ancestors(owner) for owner in held.info.owners)
            ]
            buffers = [info.name for info in below if info.kind == "buffer"]
            if buffers and not isinstance(one.style, SequenceParallel):
                faults.append(
                    f"{name} has buffers ({', '.join(buffers)}), which torch's {one.label} would make "
                    "DTensors; give it a style by name."
                )
            yield from (info.name for info in below if info.kind == "parameter")
