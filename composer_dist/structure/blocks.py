"""The repeated blocks of a model: the default units."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def structural_units(structure: Structure) -> Iterator[tuple[str, str]]:
    """The outermost repeated blocks of a model, each with the reason.

    A block is a child of a ModuleList, ModuleDict or Sequential, and either its class is listed in Hugging
    Face's `_no_split_modules` or it has a sibling of the same class. It has children of its own, because a
    list of bare layers may be indexed for their weights instead of being called. If a model has no such
    block, the layers of a Sequential, which are always called, count as blocks.
    """
    kinds: set[str] = set()
    for module in structure.modules.values():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    found = list(_blocks(structure, kinds, leaves=False))
    yield from found or _blocks(structure, kinds, leaves=True)


def _blocks(structure: Structure, kinds: set[str], leaves: bool) -> Iterator[tuple[str, str]]:
    modules = structure.modules
    named = [name for name, module in modules.items() if type(module).__name__ in kinds]
    around = {above for name in named for above in ancestors(name) if above != name}
    alike: dict[str, Counter[type]] = {}
    inside: set[str] = set()  # blocks and everything below them
    for name, module in modules.items():
        parent, kind = name.rpartition(".")[0], type(module).__name__
        if name and parent in inside:
            inside.add(name)
        elif name and _may_be_block(modules[parent], module):
            if parent not in alike:
                alike[parent] = Counter(map(type, modules[parent]._modules.values()))
            siblings = alike[parent][type(module)]
            whole = bool(module._modules) or (leaves and isinstance(modules[parent], nn.Sequential))
            if kind in kinds:
                reason = f"{kind} is one of the model's _no_split_modules"
            elif siblings > 1 and whole and name not in around:
                reason = f"it is one of {siblings} {kind} in {parent or 'the root'}"
            else:
                continue
            inside.add(name)
            if structure.first[name] == name:
                yield name, reason


def _may_be_block(parent: nn.Module, module: nn.Module) -> bool:
    return isinstance(parent, _CONTAINERS) and has_forward(module) and holds_parameters(module)


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be a unit: a bare container has no forward."""
    return not (
        isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        and type(module).forward is nn.Module.forward
    )


def called_parts(root: nn.Module) -> list[nn.Module]:
    """What a user's loop calls: `root`, or the parts of a bare container."""
    return [root] if has_forward(root) else [part for one in root.children() for part in called_parts(one)]


def holds_parameters(module: nn.Module) -> bool:
    """Whether `module` or a module below it has a parameter."""
    return any(True for _ in module.parameters())
