"""The few errors that LoopKV raises on purpose.

Every one of them answers four questions in one sentence: what was being done, what was got, what was wanted and what
to do about it. Anything else that escapes (an AssertionError, say) is a bug of ours.
"""

from __future__ import annotations


class LoopKVError(Exception):
    """Base of all errors that a user's input can cause.

    Args:
        what: the thing that is wrong ("plan.json: loop count").
        got: what was found.
        wanted: what would have been right.
        hint: what to do about it.
    """

    def __init__(self, what: str, *, got: object = None, wanted: object = None, hint: str | None = None) -> None:
        self.what, self.got, self.wanted, self.hint = what, got, wanted, hint
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if wanted is not None:
            parts.append(f"wanted {wanted}")
        message = ", ".join(parts)
        super().__init__(f"{message}. hint: {hint}" if hint else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.got, self.wanted, self.hint))


def _rebuild(cls: type[LoopKVError], what: str, got: object, wanted: object, hint: str | None) -> LoopKVError:
    return cls(what, got=got, wanted=wanted, hint=hint)


class ModelFormatError(LoopKVError):
    """A checkpoint folder that cannot be read as the looped model it claims to be."""


class DocumentError(LoopKVError):
    """Documents that cannot be used for measuring (too short, unreadable, empty)."""


class ProfileFormatError(LoopKVError):
    """A file that is not a usable profile."""


class PlanFormatError(LoopKVError):
    """A file that is not a usable plan."""


class PlanVersionError(LoopKVError):
    """A plan or profile of a schema version that this release does not read."""


class PlanMismatchError(LoopKVError):
    """A plan for another geometry, other weights or another policy than the model at hand."""


class BudgetInfeasibleError(LoopKVError):
    """No plan satisfies the budgets; the message gives the smallest feasible one."""


class UnsupportedError(LoopKVError):
    """A request that LoopKV understands but does not (yet) carry out."""
