"""An interpreter of the pickles that describe plain tensors, which calls nothing they name."""

import pickletools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import attrs

from ...domain.errors import UnsafeWeightsError

STORAGE_DTYPES: Mapping[str, str] = {
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "DoubleStorage": "<f8",
    "BFloat16Storage": "<u2",  # numpy has no such type: its bits are widened by the reader
}
"""torch's name of a storage class → the numpy type of its elements."""

_ORDERED_DICT = ("collections", "OrderedDict")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_KNOWN_GLOBALS = {
    _ORDERED_DICT,
    _TENSOR,
    _PARAMETER,
    *(("torch", kind) for kind in STORAGE_DTYPES),
}


@attrs.frozen
class PickledStorage:
    """A run of `elements` numbers, kept in record ``data/<key>``."""

    kind: str
    key: str
    elements: int


@attrs.frozen
class PickledTensor:
    """A view of a storage; `offset` and `strides` count elements and are not negative."""

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@attrs.frozen
class _Global:
    """A name that the pickle asked for; it stays a name."""

    name: tuple[str, str]


def read_state_dict(data: bytes, path: Path) -> Mapping[str, PickledTensor]:
    """Name → tensor; `path` is for messages.

    Raises:
        UnsafeWeightsError: the pickle holds anything else; the message names what was met.
    """
    machine = _Machine(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings that are refused anyway
            for opcode, argument, _ in pickletools.genops(data):
                machine.step(opcode.name, argument)
        result = machine.stack.pop()
    except (ValueError, IndexError, KeyError) as error:
        raise UnsafeWeightsError(f"{path}: not a well-formed pickle ({error})") from error
    if type(result) is not dict:
        machine.refuse(f"a {type(result).__name__} where a state_dict was expected")
    for name, value in result.items():
        if type(value) is not PickledTensor:
            machine.refuse(f"a {type(value).__name__} named {name!r} where a tensor was expected")
    return result


@attrs.frozen
class _Machine:
    """The pickle machine's stack, marks and memo, for the opcodes that tensors need."""

    path: Path
    stack: list[Any] = attrs.field(factory=list)
    marks: list[int] = attrs.field(factory=list)
    memo: dict[int, Any] = attrs.field(factory=dict)

    def refuse(self, what: str) -> NoReturn:
        raise UnsafeWeightsError(
            f"{self.path} was refused: it holds {what[:200]}; only plain tensors are read, and "
            "nothing that the file names is ever run"
        )

    def step(self, opcode: str, argument: Any) -> None:  # noqa: ANN401 (what an opcode carries)
        if opcode in _CARRIES_VALUE:
            self.stack.append(argument)
        elif opcode in _MEMO_PUT:
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif opcode in _MEMO_GET:
            self.stack.append(self.memo[argument])
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        elif opcode not in _WITHOUT_EFFECT:
            self.refuse(f"the pickle opcode {opcode}")

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop_tuple(self, size: int) -> None:
        items = tuple(self.stack[len(self.stack) - size :])
        if len(items) != size:
            raise ValueError("the stack ran out")
        del self.stack[len(self.stack) - size :]
        self.stack.append(items)

    def push_global(self, module: object, name: object) -> None:
        wanted = (module, name)
        if wanted not in _KNOWN_GLOBALS or not all(type(part) is str for part in wanted):
            self.refuse(f"the global {module}.{name}")
        self.stack.append(_Global((str(module), str(name))))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            self.refuse("a global whose name is not text")
        self.push_global(module, name)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            self.refuse(f"items set on a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                self.refuse(f"a key that is a {type(key).__name__}")
            target[key] = value

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(function) is not _Global:
            self.refuse("a call of something that is not a known global")
        match function.name, arguments:
            case (name, ()) if name == _ORDERED_DICT:
                self.stack.append({})
            case (name, (storage, offset, shape, strides, _, _, *_)) if name == _TENSOR:
                self.stack.append(self.tensor(storage, offset, shape, strides))
            case (name, (PickledTensor() as data, _, _)) if name == _PARAMETER:
                self.stack.append(data)
            case _:
                self.refuse(f"an unusual call of {'.'.join(function.name)}")

    def tensor(
        self, storage: object, offset: object, shape: object, strides: object
    ) -> PickledTensor:
        if (
            type(storage) is not PickledStorage
            or not _is_natural(offset)
            or not _are_natural(shape)
            or not _are_natural(strides)
            or len(shape) != len(strides)
            or 0 in shape
        ):
            self.refuse("a tensor whose shape, strides or offset make no sense")
        return PickledTensor(storage, offset, shape, strides)

    def build(self) -> None:
        """Attributes hung on the state_dict (its ``_metadata``) are dropped."""
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            self.refuse(f"attributes set on a {type(self.stack[-1]).__name__}")

    def persistent(self) -> None:
        match self.stack.pop():
            case ("storage", _Global(name=("torch", kind)), str(key), str(), int(elements)) if (
                kind in STORAGE_DTYPES and _is_natural(elements)
            ):
                self.stack.append(PickledStorage(kind, key, elements))
            case other:
                self.refuse(f"a persistent id that is no storage of floats: {_shown(other)}")


def _is_natural(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _are_natural(values: object) -> TypeGuard[tuple[int, ...]]:
    return type(values) is tuple and all(map(_is_natural, values))


def _shown(value: object) -> str:
    """A short account of a hostile value: the repr of nested tuples can be of any length."""
    if type(value) is tuple:
        return f"({', '.join(type(item).__name__ for item in value[:8])})"
    return type(value).__name__


_CARRIES_VALUE = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_MEMO_PUT = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_MEMO_GET = {"BINGET", "LONG_BINGET"}
_WITHOUT_EFFECT = {"PROTO", "FRAME", "STOP"}
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.pop_tuple(1),
    "TUPLE2": lambda machine, _: machine.pop_tuple(2),
    "TUPLE3": lambda machine, _: machine.pop_tuple(3),
    "GLOBAL": lambda machine, names: machine.push_global(*str(names).split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.stack_global(),
    "SETITEM": lambda machine, _: machine.set_items(
        [machine.stack.pop(), machine.stack.pop()][::-1]
    ),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.persistent(),
}
