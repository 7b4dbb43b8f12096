"""The device's events, as tests make them."""

from collections.abc import Callable


class Gate:
    """A `ready=` or `after=`: what `query` answers is up to the test; an error is raised.
    `asked` is called with each look."""

    def __init__(
        self, answer: bool | BaseException = False, asked: Callable[[], object] = int
    ) -> None:
        self.answer, self.queries, self._asked = answer, 0, asked

    def query(self) -> bool:
        self.queries += 1
        self._asked()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer
