"""Exact multiple-choice knapsack with two resources, solved for every amount of both at once.

Each item takes one choice; a choice uses ``shared`` and ``excess`` (non-negative whole numbers) and does some damage.
For every reachable ``(sum shared, sum excess)`` the table knows the least damage and the choices that give it.

**Why it is exact.** A float is a whole number of 2^-e for some e, so all damages become whole numbers of one common
2^-e and are added and compared as integers of as many 62-bit limbs as they need (two for any ordinary profile). No sum
is ever rounded on the way; a total is rounded once, to the nearest double, which is what ``math.fsum`` returns.
Rounding is monotone, so the least exact total also has the least rounded one. Only "the first in cell order among equal
damages" can be decided by totals that differ by less than a rounding step: ``first_plan`` looks for those too.

The items are processed from the last to the first, ties go to the earlier choice: so the choices stored for a state are
the first in lexicographic order among those of least exact damage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopkv.errors import UnsupportedError

IntArray = npt.NDArray[np.int64]

_LIMB_BITS = 62  # a carry and the sum of two limbs still fit a signed 64-bit integer
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_UNREACHED = 1 << (_LIMB_BITS - 1)  # top limb of a state that no choice of options gives
_NO_CHOICE = 255
_BANDS = 8  # rows are cut into bands: each needs fewer columns than the whole, and stays in the cache
MAX_TABLE_ENTRIES = 1 << 30


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to take an item: what it uses of both resources, and the damages (nats) it adds to the sum."""

    shared: int
    excess: int
    damages: tuple[float, ...]


class KnapsackTable:
    """Least damage of every reachable state ``(shared, excess)``.

    ``shared`` and ``excess`` [N] list the reachable states; ``order`` [N] ranks their exact damages (equal damages have
    equal ranks). ``fixed`` are damages that every plan contains.

    Raises:
        UnsupportedError: a table beyond ``MAX_TABLE_ENTRIES`` entries.
    """

    def __init__(self, items: Sequence[Sequence[Choice]], fixed: Sequence[float] = ()) -> None:
        self._items = [tuple(item) for item in items]
        # The common exponent: every damage is a whole number of 2 ** -self._exponent.
        ratios = [d.as_integer_ratio() for item in items for choice in item for d in choice.damages]
        ratios += [d.as_integer_ratio() for d in fixed]
        self._exponent = max((den.bit_length() - 1 for _, den in ratios), default=0)
        self._exact = [[sum(map(self._to_exact, choice.damages)) for choice in item] for item in self._items]
        # Fill the top limb: it then decides almost every comparison alone.
        bits = sum(map(max, self._exact)).bit_length()
        self._limb_count = -(-(bits + 1) // _LIMB_BITS)
        spare = _LIMB_BITS * self._limb_count - 1 - bits
        self._exponent += spare
        self._exact = [[value << spare for value in item] for item in self._exact]
        self._fixed = sum(map(self._to_exact, fixed))
        self._choices, limbs = self._solve()
        shared, excess = np.nonzero(limbs[0] < _UNREACHED)
        self.shared: IntArray = shared.astype(np.int64)
        self.excess: IntArray = excess.astype(np.int64)
        self._limbs = [limb[shared, excess] for limb in limbs]
        self.order: IntArray = self._rank()

    def damage(self, states: IntArray) -> npt.NDArray[np.float64]:
        """Least damage [M] in nats (fixed damages included) of the states with these positions [M], rounded once."""
        values = [0] * len(states)
        for limb in self._limbs:  # highest first
            values = [(v << _LIMB_BITS) | part for v, part in zip(values, limb[states].tolist(), strict=True)]
        return np.array([self._round(value) for value in values], dtype=np.float64)

    def first_plan(self, state: int) -> tuple[int, ...]:
        """Choices (one per item) of ``state``: the first in order among all whose damage rounds to the least one."""
        shared, excess = int(self.shared[state]), int(self.excess[state])
        target = self._round(self._best_from(0, shared, excess))
        prefix, plan = 0, []
        for number, item in enumerate(self._items):
            best = int(self._choices[number][shared, excess])
            taken = best
            for candidate in range(best):  # earlier in order, so exactly worse; it may still round to the target
                rest = self._state_after(number, candidate, shared, excess)
                if rest is None:
                    continue
                total = prefix + self._exact[number][candidate] + self._best_from(number + 1, *rest)
                if self._round(total) == target:
                    taken = candidate
                    break
            prefix += self._exact[number][taken]
            shared -= item[taken].shared
            excess -= item[taken].excess
            plan.append(taken)
        return tuple(plan)

    def _to_exact(self, damage: float) -> int:
        numerator, denominator = damage.as_integer_ratio()
        return numerator << (self._exponent - (denominator.bit_length() - 1))

    def _round(self, total: int) -> float:
        """The double nearest to ``(fixed + total) * 2 ** -exponent``; a subnormal total is exact, so ldexp is too."""
        value = self._fixed + total
        extra = max(0, value.bit_length() - 1000)  # keeps float() below its overflow
        if extra:
            # Sticky bit: what is cut off only matters for being non-zero, far below the 53 bits that are kept.
            value = (value >> extra) | int(value & ((1 << extra) - 1) != 0)
        return math.ldexp(float(value), extra - self._exponent)

    def _state_after(self, number: int, candidate: int, shared: int, excess: int) -> tuple[int, int] | None:
        choice = self._items[number][candidate]
        shared, excess = shared - choice.shared, excess - choice.excess
        if shared < 0 or excess < 0:
            return None
        if number + 1 == len(self._items):
            return (0, 0) if shared == excess == 0 else None
        table = self._choices[number + 1]
        if shared >= table.shape[0] or excess >= table.shape[1] or table[shared, excess] == _NO_CHOICE:
            return None
        return shared, excess

    def _best_from(self, number: int, shared: int, excess: int) -> int:
        """Exact least damage of items ``number`` and later that use exactly this much."""
        total = 0
        for i in range(number, len(self._items)):
            taken = int(self._choices[i][shared, excess])
            total += self._exact[i][taken]
            shared -= self._items[i][taken].shared
            excess -= self._items[i][taken].excess
        return total

    def _rank(self) -> IntArray:
        order = np.lexsort(self._limbs[::-1])
        steps = np.zeros(len(order), dtype=np.int64)
        for limb in self._limbs:
            ordered = limb[order]
            steps[1:] |= ordered[1:] != ordered[:-1]
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.cumsum(steps)
        return ranks

    def _solve(self) -> tuple[list[npt.NDArray[np.uint8]], list[IntArray]]:
        """The best choice of every state of every suffix of the items, and the exact values of the whole [K, A]."""
        items, exact = self._items, self._exact
        peaks = [(max(c.shared for c in item), max(c.excess for c in item)) for item in items]
        # What a unit of sharing costs in reachable excess: bounds the columns that a row of the table can need.
        loss = min(
            (
                (peak - choice.excess) // choice.shared
                for item, (_, peak) in zip(items, peaks, strict=True)
                for choice in item
                if choice.shared
            ),
            default=0,
        )
        max_shared, max_excess = sum(p[0] for p in peaks), sum(p[1] for p in peaks)
        if (max_shared + 1) * (max_excess + 1) * max(1, len(items)) > MAX_TABLE_ENTRIES:
            raise UnsupportedError(
                "planning table",
                got=f"{len(items)} cells x {max_shared + 1} x {max_excess + 1} states",
                wanted=f"at most {MAX_TABLE_ENTRIES} entries",
                hint="byte sizes with a large common divisor (page and group of 32) keep it small",
            )
        limbs = self._limb_count
        shape = (max_shared + 1, max_excess + 1)
        old = [np.zeros(shape, dtype=np.int64) for _ in range(limbs)]
        new = [np.zeros(shape, dtype=np.int64) for _ in range(limbs)]
        old[0].fill(_UNREACHED)
        old[0][0, 0] = 0
        height = -(-shape[0] // _BANDS)
        scratch = _Scratch(height * shape[1], limbs)
        suffixes = [(1, 1)]
        for shared, excess in reversed(peaks):
            suffixes.append((suffixes[-1][0] + shared, suffixes[-1][1] + excess))
        # One allocation for all layers: thousands of fresh pages cost more than the arithmetic on them.
        stored = np.full(sum(rows * columns for rows, columns in suffixes[1:]), _NO_CHOICE, dtype=np.uint8)
        choices: list[npt.NDArray[np.uint8]] = []
        used = 0
        for number in reversed(range(len(items))):
            before, (rows, columns) = suffixes[len(choices)], suffixes[len(choices) + 1]
            chosen = stored[used : used + rows * columns].reshape(rows, columns)
            used += rows * columns
            new[0][:rows, :columns] = _UNREACHED
            bands = [
                (first, min(first + height, before[0]), max(1, before[1] - loss * first))
                for first in range(0, before[0], height)
            ]
            for option, choice in enumerate(items[number]):
                added = [
                    (exact[number][option] >> (_LIMB_BITS * (limbs - 1 - limb))) & _LIMB_MASK for limb in range(limbs)
                ]
                for first, last, width in bands:
                    source = [limb[first:last, :width] for limb in old]
                    rows_to = slice(first + choice.shared, last + choice.shared)
                    columns_to = slice(choice.excess, choice.excess + width)
                    target = [limb[rows_to, columns_to] for limb in new]
                    scratch.improve(source, target, added, chosen[rows_to, columns_to], option)
            choices.append(chosen)
            old, new = new, old
        rows, columns = suffixes[-1]
        choices.reverse()
        return choices, [limb[:rows, :columns] for limb in old]


class _Scratch:
    """Buffers of one step of the dynamic program, reused so that nothing is allocated in the inner loop."""

    def __init__(self, size: int, limbs: int) -> None:
        self._values = [np.empty(size, dtype=np.int64) for _ in range(limbs)]
        self._carry = np.empty(size, dtype=np.int64)
        self._less = np.empty(size, dtype=np.bool_)
        self._equal = np.empty(size, dtype=np.bool_)

    def improve(
        self,
        source: Sequence[IntArray],
        target: Sequence[IntArray],
        added: Sequence[int],
        chosen: npt.NDArray[np.uint8],
        option: int,
    ) -> None:
        """``target = min(target, source + added)``, highest limb first; where it fell, ``chosen = option``."""
        shape, size = source[0].shape, source[0].size
        values = [buffer[:size].reshape(shape) for buffer in self._values]
        carry, less = self._carry[:size].reshape(shape), self._less[:size].reshape(shape)
        lowest = len(values) - 1
        for limb in range(lowest, -1, -1):
            np.add(source[limb], added[limb], out=values[limb])
            if limb < lowest:
                values[limb] += carry
            if limb:
                np.right_shift(values[limb], _LIMB_BITS, out=carry)
                values[limb] &= _LIMB_MASK
        np.less(values[0], target[0], out=less)
        if option and lowest:
            equal = self._equal[:size].reshape(shape)
            np.equal(values[0], target[0], out=equal)
            if equal.any():
                where = np.nonzero(equal)
                fell = np.zeros(len(where[0]), dtype=np.bool_)
                open_ = np.ones(len(where[0]), dtype=np.bool_)
                for mine, theirs in zip(values[1:], target[1:], strict=True):
                    a, b = mine[where], theirs[where]
                    fell |= open_ & (a < b)
                    open_ &= a == b
                less[where] = fell
        for mine, theirs in zip(values, target, strict=True):
            np.copyto(theirs, mine, where=less)
        np.copyto(chosen, np.uint8(option), where=less)
