"""The arguments of a function or class as a schema, to check what a configuration passes to it."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Any

import pydantic


@lru_cache(maxsize=256)
def arguments_of(target: Callable[..., Any], given: frozenset[str] = frozenset()) -> type[pydantic.BaseModel]:
    """A schema of the arguments of `target` that can be passed by name, except those in `given`.

    Unknown keys are allowed if the target takes any keyword.
    """
    hints = _hints(target)
    fields: dict[str, Any] = {}
    extra = "forbid"
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        if name in given or name.startswith("_") or parameter.kind in _UNNAMED:
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"{name}_"] = (_checked(hints.get(name, Any)), pydantic.Field(default, alias=name))
    config = pydantic.ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())  # type: ignore[typeddict-item]
    made: Any = pydantic.create_model(getattr(target, "__name__", "arguments"), __config__=config, **fields)
    return made  # type: ignore[no-any-return]


def known_names(target: Callable[..., Any]) -> list[str]:
    """The names of the arguments that `arguments_of` has."""
    return [str(field.alias) for field in arguments_of(target).model_fields.values()]


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
    from composer_dist.trainer import Time

    kinds = (hint, *typing.get_args(hint))
    for kind, read in ((Time, Time.of), (Precision, as_precision)):
        if kind in kinds:
            return Annotated[hint, pydantic.AfterValidator(partial(_readable, read))]
    return hint


def _readable(read: Callable[[Any], object], value: Any) -> Any:
    """The unchanged value, after a check that it can be read."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        read(value)
    return value
