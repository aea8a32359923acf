"""Laws of the rows of a table as one test: a test of its own takes longer than most of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from _pytest.outcomes import Failed


def every(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[..., Callable[[], None]]:
    """As `pytest.mark.parametrize`, but all rows are looked at in one test, which names those that
    break the law; of two tables each row with each other one.
    """
    keys = (names,) if isinstance(names, str) else names
    table = [dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)) for row in rows]

    def test_of(law: Callable[..., None]) -> Callable[[], None]:
        body, inner = getattr(law, "of", (law, [{}]))
        cases = [row | more for row in table for more in inner]

        def test() -> None:
            broken: list[tuple[dict[str, Any], BaseException]] = []
            for case in cases:
                try:
                    body(**case)
                except (Exception, Failed) as error:
                    broken.append((case, error))
            if broken:
                said = "\n".join(
                    f"{case}: {type(error).__name__}: {error}" for case, error in broken
                )
                raise AssertionError(f"{len(broken)} of {len(cases)}\n{said}") from broken[0][1]

        test.__name__, test.__qualname__ = law.__name__, law.__qualname__
        test.__doc__, test.__module__ = law.__doc__, law.__module__
        test.of = body, cases  # type: ignore[attr-defined]
        return test

    return test_of
