"""The arguments of a function or class as a schema, to check what a configuration passes to it."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import pydantic

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.clock import Time


@lru_cache(maxsize=256)
def arguments_of(
    target: Callable[..., Any],
    given: frozenset[str] = frozenset(),
    documented: bool = False,
    extra: Literal["allow", "forbid"] | None = None,
) -> type[pydantic.BaseModel]:
    """A schema of the arguments of `target` that can be passed by name.

    Args:
        target: a function or class.
        given: arguments to leave out.
        documented: describe the arguments, which takes time.
        extra: whether unknown keys are allowed; by default if the target takes any keyword.
    """
    hints, docs = _hints(target), documentation(target) if documented else {}
    fields: dict[str, Any] = {}
    any_keyword = False
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        if not callable(target):
            raise ParallelismValueError(f"{target!r} is not a function or a class.") from None
        raise ParallelismValueError(f"{target!r} cannot be called with arguments by name.") from None
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_keyword = True
        if name in given or name.startswith("_") or parameter.kind in _UNNAMED:
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"{name}_"] = (
            _checked(hints.get(name, Any)),
            pydantic.Field(default, alias=name, description=docs.get(name)),
        )
    extra = extra or ("allow" if any_keyword else "forbid")
    config = pydantic.ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
    made: Any = pydantic.create_model(getattr(target, "__name__", "arguments"), __config__=config, **fields)
    return made  # type: ignore[no-any-return]


def known_names(target: Callable[..., Any]) -> list[str]:
    """The names of the arguments that `arguments_of` has."""
    return [str(field.alias) for field in arguments_of(target).model_fields.values()]


def documentation(target: Any) -> dict[str, str]:
    """What is written about the arguments of a function or class: in its docstring, or below its fields."""
    found: dict[str, str] = {}
    for cls in target.__mro__[::-1] if inspect.isclass(target) else ():
        if dataclasses.is_dataclass(cls):
            found |= _below_fields(cls)
    for one in (target, getattr(target, "__init__", None)):
        _, _, rest = (inspect.getdoc(one) or "").partition("Args:\n")
        block = re.split(r"\n(?=\S)", rest)[0] + "\n"
        for name, text in re.findall(r"^ {4}(\w+)(?: \(.*?\))?:\s(.*?)(?=^ {0,4}\S|\Z)", block, re.S | re.M):
            found.setdefault(name, " ".join(text.split()))
    return found


def _below_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


_UNNAMED = (
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.POSITIONAL_ONLY,
)


def _hints(target: Any) -> dict[str, Any]:
    """The types of the arguments, or nothing if some are imported for type checkers only."""
    source = target
    if inspect.isclass(target) and not dataclasses.is_dataclass(target):
        source = target.__init__
    try:
        return typing.get_type_hints(source)
    except (NameError, TypeError, AttributeError):
        return {}


def _checked(hint: Any) -> Any:
    """The hint; strings are checked where they stand for a time or a precision."""
    from composer_dist.precision import Precision, as_precision

    kinds = (hint, *typing.get_args(hint))
    for kind, read in ((Time, Time.of), (Precision, as_precision)):
        if kind in kinds:
            return readable(hint, read)
    return hint


def readable(hint: Any, read: Callable[[Any], object]) -> Any:
    """The hint, for values that `read` can read."""
    return Annotated[hint, pydantic.AfterValidator(partial(_readable, read))]


def _readable(read: Callable[[Any], object], value: Any) -> Any:
    """The unchanged value, after a check that it can be read."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        read(value)
    return value
