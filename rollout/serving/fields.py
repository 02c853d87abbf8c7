"""The fields of a request's JSON, read one by one: a wrong type, a value without an effect here and an unknown name are refused by name."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...comm.errors import HeadraceError

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
}
_SHOWN = 40
"""Most characters of a value in a message."""


class RequestRefused(HeadraceError):
    """A request that gets an error in OpenAI's shape: a status from 400 on, the field's name and a code that programs read."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.status = status
        self.code = code

    @classmethod
    def internal(cls) -> "RequestRefused":
        """The answer where the server is wrong."""
        return cls("the server failed; its log says why", status=500, code="internal_error")

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The fields of an object in a request. A field that is null counts as not given.

    Take each known field once, then call `finish`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """where: the path of the object, which ends with a dot; empty for the request itself."""
        self.where = where
        self._left = {name: value for name, value in values.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a field, of this type; `default` if it is not given. A whole number is a `float` too."""
        self._known.append(name)
        value = self._left.pop(name, None)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is int:
            fits = is_number and abs(value) < 1 << 64 and value == int(value)
        else:
            fits = is_number if kind is float else isinstance(value, kind)
        if not fits:
            raise self.refusal(name, f"must be {_KINDS[kind]}, not {shown(value)}")
        return kind(value) if kind in (int, float) else value

    def any(self, name: str) -> Any:
        """The value of a field of any type; None if it is not given."""
        self._known.append(name)
        return self._left.pop(name, None)

    def neutral(self, accepted: Mapping[str, Sequence[Any]]) -> None:
        """Fields of the API that have no effect here, with the values that ask for none. Any other value is refused."""
        for name, values in accepted.items():
            self._known.append(name)
            value = self._left.pop(name, None)
            if value is not None and not any(_is_same(value, each) for each in values):
                only = " or ".join(shown(each) for each in values)
                raise self.refusal(
                    name, f"is not supported{f' (only {only}, which changes nothing)' if values else ''}"
                )

    def finish(self) -> None:
        """Refuse what was not taken: no field is ignored."""
        for name in self._left:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise self.refusal(name, f"is not a field that this server knows{hint}", code="unknown_field")

    def refusal(self, name: str, problem: str, code: str | None = None) -> RequestRefused:
        """The error about a field of this object."""
        return RequestRefused(problem, f"{self.where}{name}", code=code)


def _is_same(value: Any, accepted: Any) -> bool:
    """Whether two values are equal in JSON, where 1 and 1.0 are, but not 1 and true."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def shown(value: Any) -> str:
    """A value in a message, as JSON would show it, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
