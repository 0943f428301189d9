"""A process that dies at its n-th operation on the disk: from there on nothing is done any more."""

from collections.abc import Callable, Iterator

from megatrain_cli.checkpoint.fsio import FileSystem


class Killed(BaseException):
    """What the operation meets, and all that follow it."""


class MortalFileSystem(FileSystem):
    """The real file system for `lifetime` operations."""

    def __init__(self, lifetime: int) -> None:
        self.left = lifetime

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> object:
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return found(*args, **kwargs)

        return call


def every_death(act: Callable[[FileSystem, int], None]) -> Iterator[int]:
    """Run `act` so that it dies at its first operation, its second, ... until it survives.

    `act` is told how many operations it has. Yields that number after each death, for the caller
    to look at what is left and to prepare the next.
    """
    lifetime = 0
    while True:
        try:
            act(MortalFileSystem(lifetime), lifetime)
        except Killed:
            yield lifetime
            lifetime += 1
        else:
            return
