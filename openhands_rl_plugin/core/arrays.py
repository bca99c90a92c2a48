"""Frozen arrays of numbers, held as bytes: token ids, logprobs and masks are compared, joined and stored as a whole."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Array[T: (int, float)](Sequence[T]):
    """Numbers of one width, made of some, or of ``bytes`` that hold them. Raises ``ValueError`` for others.

    It equals an array of its kind, a tuple or a list with the same numbers, and is hashed by its bytes. ``memoryview``,
    ``numpy.frombuffer`` and ``torch.frombuffer`` read it without a copy, and so does ``bytes(array)``. A slice is an
    array of the same kind.
    """

    __slots__ = ("_data",)

    code: ClassVar[str]
    """The letter by which ``struct`` knows a number."""

    def __init__(self, numbers: Iterable[T] | bytes = ()) -> None:
        try:
            if isinstance(numbers, bytes):
                self._data = numbers
            elif type(numbers) is type(self):
                self._data = numbers._data
            else:
                given = tuple(numbers)
                self._data = struct.pack(f"{len(given)}{self.code}", *given)
        except (struct.error, OverflowError, TypeError) as error:
            raise ValueError(f"these are no {type(self).__name__}: {error}") from error

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._data).cast(self.code)  # pyrefly: ignore[no-matching-overload]

    def __bytes__(self) -> bytes:
        return self._data

    def __len__(self) -> int:
        return len(self._data) // struct.calcsize(self.code)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__buffer__(0))

    def __getitem__(self, index: Any) -> Any:
        found = self.__buffer__(0)[index]
        return type(self)(found.tobytes()) if isinstance(found, memoryview) else found

    def __add__(self, other: Iterable[T]) -> Self:
        return type(self)(self._data + type(self)(other)._data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple | list):
            return [*self] == [*type(self)(other)] if len(other) == len(self) else False
        return type(other) is type(self) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[*self[:8]]}, {len(self)} in all)"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_list = core_schema.plain_serializer_function_ser_schema(list, when_used="json")
        return core_schema.no_info_plain_validator_function(cls, serialization=as_list)


class Ids(Array[int]):
    """Token ids, 32 bits each; no model has one over 31 bits, so that they are ``int32`` as well."""

    __slots__ = ()
    code = "I"


class Floats(Array[float]):
    """Numbers of 32 bits, as model servers compute logprobs."""

    __slots__ = ()
    code = "f"


class Mask(Array[bool]):
    """One byte for each of the tokens that it masks."""

    __slots__ = ()
    code = "?"
