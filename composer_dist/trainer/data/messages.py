"""The messages of a conversation, as chat templates take them."""

import json
from collections.abc import Mapping
from typing import Any

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.users_code import warn

Message = dict[str, Any]
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"human": "user", "gpt": "assistant"}
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


def conversation(value: Any, column: str) -> list[Message]:
    """The messages of a column, each with a `role`; those of `from` and `value` are renamed.

    Args:
        value: a list of messages, or that as JSON.
        column: its name, for errors.

    Raises:
        ParallelismValueError: there are no messages; one has no role, or nothing else.
        ParallelismTypeError: it is not a list of mappings.
    """
    messages = read_json(value, column)
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        raise ParallelismTypeError(
            f"{column} must be a list of messages, each with a role and a content, not "
            f"{type(messages).__name__}."
        )
    if not messages:
        raise ParallelismValueError(f"{column} is empty. Remove the row.")
    return [_message(one, f"Message {number} of {column}") for number, one in enumerate(messages)]


def text_or_messages(value: Any) -> Any:
    """The value of a column of texts or messages; a JSON list of messages is read."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            read = json.loads(value)
        except ValueError:
            return value
        if isinstance(read, list) and read and all(isinstance(one, dict) and "role" in one for one in read):
            return read
    return value


def read_json(value: Any, column: str) -> Any:
    """The value of a column that tables without lists and mappings hold as JSON.

    Raises:
        ParallelismValueError: it is a string, but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ParallelismValueError(f"{column} is a string that is not valid JSON: {error}.") from error


def without_empty(value: Any) -> Any:
    """Without the empty fields that Arrow adds where other rows have some."""
    if isinstance(value, Mapping):
        return {key: without_empty(one) for key, one in value.items() if one is not None or key == "content"}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def _message(given: Mapping[str, Any], name: str) -> Message:
    keys = _KEYS if "from" in given else {}
    message: Message = without_empty({keys.get(key, key): one for key, one in given.items()})
    if not isinstance(role := message.get("role"), str):
        raise ParallelismValueError(f"{name} has no role; it has {', '.join(given) or 'nothing'}.")
    message["role"] = role = _ROLES.get(role, role)
    if not any(one is not None for key, one in message.items() if key != "role"):
        raise ParallelismValueError(f"{name}, of role {role!r}, has no content.")
    if role not in _KNOWN:
        warn(
            f"The role {role!r} is not one of {', '.join(_KNOWN)}. Nothing is learned from its messages, "
            "unless the chat template marks them."
        )
    return message
