"""The temporary folder is looked into when the tests have ended."""

from support.scratch import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]
