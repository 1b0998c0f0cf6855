"""Recorded calls of the programs of one kernel, as a tree that branches where a tensor's value was a decision. A path
through the tree holds the calls of one program. Another program with the same decisions makes the same calls on its own
values, so it need not run the kernel's Python. Calls that depend only on constants were made when the path was
recorded, those that depend on the launch's arguments are made once per launch, and those whose result is not used are
never made. A node is trusted and replayed once two programs have passed it with the same calls.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cuda_on_cpu.triton_bounds import threads_meet
from cuda_on_cpu.triton_together import EFFECTS, Batch, NotTogether

Run = Callable[..., Any]
Effect = tuple[object, Any]
"""An effect, and its result."""
_MOST_CALLS = 20_000
_MOST_BYTES_KEPT = 1 << 15


class Kind(enum.Enum):
    """Kind of a call, which decides how it is replayed."""

    INPUT = enum.auto()
    """No call: an argument of the launch, or a constant."""
    LAUNCH = enum.auto()
    """Equal for every program of a launch, like the size of the grid."""
    PURE = enum.auto()
    """The result follows from the arguments, and nothing else happens."""
    PROGRAM = enum.auto()
    """Pure, but depends on the program."""
    EFFECT = enum.auto()
    """Memory is read or written, or something is printed: done once, in the order of the program."""
    DECISION = enum.auto()
    """The kernel's Python saw the result."""
    ORDER = enum.auto()
    """Says something of the calls around it: made by every program in its place, and once more by one that begins
    again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a path. `args` are indices of earlier results of the path; `name` and `args` identify the call.
    `shorter` computes the same: another function, and its arguments. `together`: the call for several programs.
    """

    name: object
    args: tuple[int, ...]
    kind: Kind
    run: Run | None
    value: Any
    shorter: tuple[Run, tuple[int, ...]] | None = None
    together: Run | None = None


class Contradiction(Exception):
    """Raised if two programs with the same decisions made different calls."""


@dataclasses.dataclass(slots=True)
class _Step:
    name: object
    args: tuple[int, ...]
    run: Run
    takes: tuple[int, ...]
    out: int
    level: int
    is_effect: bool
    is_order: bool = False
    together: Run | None = None


class _Node:
    """Calls without a decision in between, then one decision, or the end."""

    __slots__ = ("at_launch", "children", "decision", "is_known", "needed", "programs", "steps", "todo", "together")

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.decision: _Step | None = None
        self.children: dict[Any, _Node] = {}
        self.programs = 0
        self.is_known = False
        self.needed: set[int] = set()
        self.at_launch: list[_Step] = []
        self.todo: list[tuple[Run, tuple[int, ...], int, object, tuple[int, ...]]] = []
        self.together: list[Run | None] = []


_CONSTANT, _PER_LAUNCH, _PER_PROGRAM = range(3)


class Paths:
    """All paths that programs of one kernel, with arguments of one kind, have taken."""

    def __init__(self, arguments: int) -> None:
        self._root = _Node()
        self._nodes = [self._root]
        self._values: list[Any] = [None] * arguments
        self._levels = [_PER_LAUNCH] * arguments
        self._arguments = arguments
        self._calls = 0
        self._is_planned = False
        self.plans = 0
        self.largest = 1
        """Bytes of the largest block of a program."""

    @property
    def begins(self) -> bool:
        """True if it is known how programs begin."""
        return self._root.programs > 1

    def learn(self, path: Iterable[Call]) -> None:
        """Add the path of one program, or count it if it is there.

        Raises Contradiction if another program with the same decisions made different calls, or if there are too many
        paths.
        """
        node, at, slots = self._root, 0, list(range(self._arguments))
        for call in path:
            args = tuple(slots[arg] for arg in call.args)
            if call.kind is Kind.DECISION:
                self._decide(node, at, call, args)
                if call.value not in node.children:
                    node.children[call.value] = _Node()
                    self._nodes.append(node.children[call.value])
                node, at = node.children[call.value], 0
                continue
            if not node.is_known:
                node.steps.append(self._step(call, args, slots))
            elif at >= len(node.steps) or (node.steps[at].name, node.steps[at].args) != (call.name, args):
                raise Contradiction
            slots.append(node.steps[at].out)
            at += 1
        self._close(node, at, None)

    def _decide(self, node: _Node, at: int, call: Call, args: tuple[int, ...]) -> None:
        assert call.run is not None
        self._close(node, at, _Step(call.name, args, call.run, args, -1, _PER_PROGRAM, False))

    def _close(self, node: _Node, at: int, decision: _Step | None) -> None:
        if not node.is_known:
            node.is_known, node.decision, self._is_planned = True, decision, False
        same = node.decision is decision is None or (
            node.decision is not None
            and decision is not None
            and (node.decision.name, node.decision.args) == (decision.name, decision.args)
        )
        if at != len(node.steps) or not same:
            raise Contradiction
        node.programs += 1

    def _step(self, call: Call, args: tuple[int, ...], slots: Sequence[int]) -> _Step:
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise Contradiction
        level = max((self._levels[arg] for arg in args), default=_CONSTANT)
        if call.kind is Kind.LAUNCH:
            level = max(level, _PER_LAUNCH)
        elif call.kind in (Kind.PROGRAM, Kind.EFFECT, Kind.ORDER):
            level = _PER_PROGRAM
        elif level is _CONSTANT and call.kind is Kind.PURE and _bytes_of(call.value) > _MOST_BYTES_KEPT:
            level = _PER_LAUNCH
        if level is _PER_PROGRAM:
            self.largest = max(self.largest, _bytes_of(call.value))
        self._levels.append(level)
        self._values.append(call.value if level is _CONSTANT else None)
        out = len(self._values) - 1
        run, takes = call.run or _none, args
        if call.shorter is not None:
            run, takes = call.shorter[0], tuple(slots[arg] for arg in call.shorter[1])
        is_effect, is_order = call.kind is Kind.EFFECT, call.kind is Kind.ORDER
        return _Step(call.name, args, run, takes, out, level, is_effect, is_order, call.together)

    def _plan(self) -> None:
        """Find, for every node, the calls that are needed, and the results that are not needed afterwards."""
        for node in reversed(self._nodes):  # children are younger than their parents
            needed = set().union(*(child.needed for child in node.children.values()))
            if node.decision is not None:
                needed.update(node.decision.args)
            node.todo, node.together, node.at_launch = [], [], []
            for step in reversed(node.steps):
                if step.level is _CONSTANT or not (step.is_effect or step.is_order or step.out in needed):
                    continue
                if step.level is _PER_LAUNCH:
                    node.at_launch.append(step)
                else:
                    last = {step.out, *step.takes} - needed
                    dead = tuple(slot for slot in last if self._levels[slot] is _PER_PROGRAM)
                    node.todo.append((step.run, step.takes, step.out, step.name if step.is_effect else None, dead))
                    node.together.append(_meet if step.is_order else step.together)
                needed.update(step.takes)
            node.todo.reverse()
            node.together.reverse()
            node.at_launch.reverse()
            node.needed = needed
        self._is_planned = True
        self.plans += 1

    def walk(self, launch: Launch) -> list[Effect] | None:
        """Run one program along the known paths.

        Returns None, or, if the paths end before the program, its effects so far. An exception of a call ends them too.
        """
        if not self._is_planned:
            self._plan()
        effects: list[Effect] = []
        node, values = self._root, launch.values_of(self._values, self.plans)
        while node.programs > 1:
            try:
                if node not in launch.visited:
                    launch.visit(node, node.at_launch, values)
                for run, args, out, effect, dead in node.todo:
                    values[out] = answer = run(*[values[arg] for arg in args])
                    if effect is not None:
                        effects.append((effect, answer))
                    for slot in dead:
                        values[slot] = None
                if node.decision is None:
                    return None
                choice = node.decision.run(*[values[arg] for arg in node.decision.args])
            except Exception:  # the kernel's own Python will meet it again, and say where
                return effects
            following = node.children.get(choice)
            if following is None:
                return effects
            node = following
        return effects

    def walk_together(self, launch: Launch, batch_of: Callable[[list[Any]], Batch]) -> None:
        """Run several programs along the known paths. ``batch_of`` makes the batch from a list of values of a program.

        Raises NotTogether if a path is not known, and whatever a call raises.
        """
        if not self._is_planned:
            self._plan()
        differ = [level is _PER_PROGRAM for level in self._levels]
        open_ones = [(self._root, batch_of(launch.values_of(self._values, self.plans)))]
        while open_ones:
            node, batch = open_ones.pop()
            if node.programs <= 1:
                raise NotTogether(int(batch.rows[0]))
            batch.enter()
            values = batch.values
            if node not in launch.visited:
                launch.visit(node, node.at_launch, values)
            for (run, takes, out, effect, dead), together in zip(node.todo, node.together, strict=True):
                if effect is not None and effect not in EFFECTS:
                    raise NotTogether
                values[out] = batch.call(run, takes, together, differ, effect is not None)
                for slot in dead:
                    values[slot] = None
            if node.decision is None:
                continue
            places: dict[Any, list[int]] = {}
            for at, choice in enumerate(batch.each(node.decision.run, node.decision.args, differ)):
                places.setdefault(choice, []).append(at)
            for choice, found in places.items():
                if choice not in node.children:
                    raise NotTogether(int(batch.rows[found[0]]))
                part = batch if len(places) == 1 else batch.part(found, differ)
                open_ones.append((node.children[choice], part))


class Launch:
    """State that the programs of one launch share."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._arguments = list(arguments)
        self._values: list[Any] = []
        self._plan = -1
        self.visited: set[Any] = set()

    def values_of(self, constants: Sequence[Any], plan: int) -> list[Any]:
        """A list with a place for every result of a program, filled with the known ones."""
        if plan != self._plan:
            self._values = [*self._arguments, *constants[len(self._arguments) :]]
            self._plan = plan
            self.visited.clear()
        return self._values.copy()

    def visit(self, node: Any, steps: Iterable[_Step], values: list[Any]) -> None:
        """Make the calls of a node that are made once per launch."""
        for step in steps:
            answer = step.run(*[values[arg] for arg in step.takes])
            self._values[step.out] = values[step.out] = answer
        self.visited.add(node)


def _bytes_of(value: Any) -> int:
    return int(getattr(getattr(value, "data", None), "nbytes", 0))


def _none() -> None:
    return None


def _meet(batch: Batch) -> None:
    """The threads of each of several programs wait for each other."""
    threads_meet()
