"""An asyncio event loop without threads or waiting: time jumps to the next timer when nothing is ready.

Everything asyncio offers for one process works on it unchanged (tasks, futures, timeouts, task groups); sockets are those of
`sim_sockets.py`. Same work, same
order, in every process: callbacks run first in, first out; tasks and futures hash by birth, so that the sets which asyncio
keeps of them iterate alike; the garbage collector does not run inside a step's world (`run` switches it off).

A step is one callback. Steps of a crashed node are dropped, those of a paused one are held (`node.py`).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import sys
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from tests.simulation.world.node import NODE, Node, NodeCrashed
from tests.simulation.world.sim_sockets import SocketCalls

T = TypeVar("T")

START_S = 1_000.0  # loop time at the start: not 0, so that a forgotten "0 means never" shows


class SimulationError(AssertionError):
    """The simulated code misbehaved in a way that no invariant names: an unhandled exception, a deadlock, an endless run.

    `rule`: the class of that exception: one that a mistake is known to run into is told from all others.
    """

    def __init__(self, message: str, rule: str = "SimulationError") -> None:
        super().__init__(message)
        self.rule = rule


class SimFuture(asyncio.Future[Any]):
    """Hashes by number instead of by address; it gets the number when it is first asked: few futures ever are."""

    __slots__ = ("_birth",)

    def __hash__(self) -> int:
        try:
            return self._birth
        except AttributeError:
            self._birth: int = self.get_loop().next_birth()  # type: ignore[attr-defined]
            return self._birth


class SimTask(asyncio.Task[Any]):
    __slots__ = ("_birth", "_node")

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        loop: VirtualLoop,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **kwargs: Any,
    ) -> None:
        self._birth = loop.next_birth()  # not asyncio's default name: that counts over all loops of the process
        self._node = NODE.get(None) if context is None else context.get(NODE)
        super().__init__(work, loop=loop, name=name or f"task-{self._birth}", context=context, **kwargs)

    def __hash__(self) -> int:
        return self._birth

    @property
    def failed_unheard(self) -> bool:
        """Nobody took notice of its failure, and somebody could have: its process goes on."""
        if not self.done() or self.cancelled() or not self._log_traceback:  # type: ignore[attr-defined]
            return False
        node = self._node
        return (node is None or (node.alive and not node.paused)) and not isinstance(self.exception(), NodeCrashed)


class SimHandle(asyncio.Handle):
    """As asyncio's, but for its debugging: some ten thousand are made in a run."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._callback = callback
        self._args = args
        self._loop = loop
        self._cancelled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class SimTimer(SimHandle, asyncio.TimerHandle):
    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context  # as SimHandle, without a call of it
        self._callback = callback
        self._args = args
        self._loop = loop
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    __hash__ = object.__hash__  # asyncio's would be that of its time, and they are only compared by identity


class VirtualLoop(SocketCalls, asyncio.BaseEventLoop):
    def __init__(self, *, max_steps: int = 5_000_000) -> None:
        super().__init__()
        self.steps = 0
        self.max_steps = max_steps
        self.errors: list[tuple[BaseException | None, str]] = []
        self.strike_at_step = sys.maxsize  # `on_strike` is asked before this step of a process, and before each one until it struck
        self.on_strike: Callable[[Node], bool] = lambda _: True
        self.failure: BaseException | None = None  # set by whoever must not raise where he is: ends the run
        self._now = START_S
        self._births = 0
        self._timers: list[tuple[float, int, SimTimer]] = []  # a heap; tuples, because they compare without a call
        self._tasks: list[SimTask] = []
        self._ended = False
        self.set_task_factory(self._new_task)

    def next_birth(self) -> int:
        self._births += 1
        return self._births

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end, then forgets whatever else still runs. Raises SimulationError for unhandled exceptions."""
        collecting = gc.isenabled()
        gc.disable()  # a cycle collected inside a run would close coroutines at a moment that depends on what ran before
        try:
            result = self.run_until_complete(work)
            self._find_lost_errors()
            self._raise_errors()
            return result
        finally:
            self._bury()
            self.close()
            if collecting:
                gc.enable()

    # -- what asyncio asks of a loop ------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def moment(self, when: float) -> SimFuture:
        """To be awaited: comes true at that time. Cheaper than `asyncio.sleep`."""
        moment = SimFuture(loop=self)
        self._births += 1
        heapq.heappush(self._timers, (when, self._births, SimTimer(when, _come_true, (moment,), self, None)))
        return moment

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        if self._ended or (isinstance(task, SimTask) and task.done() and not task.failed_unheard):
            return
        error = context.get("exception")
        self.errors.append((error, f"{context.get('message')}: {error!r} in {task!r}"))

    def _run_once(self) -> None:
        """Goes on until the loop is stopped. asyncio would ask for each round of callbacks; most rounds have one."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while not self._stopping:  # type: ignore[attr-defined]
            if self.failure is not None or self.errors:
                self._raise_errors()
            if not ready:
                self._jump()
            while timers and timers[0][0] <= self._now:
                timer = heapq.heappop(timers)[2]
                if not timer._cancelled:
                    ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                node = handle._context.get(NODE)
                runs_on = node is None or (node.alive and not node.paused and self.steps + 1 < self.strike_at_step)
                if runs_on or self._takes(node, handle):
                    self.steps += 1
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.call_exception_handler({"message": f"Exception in callback {handle!r}", "exception": error})
            if self.steps > self.max_steps:
                raise SimulationError(f"no end after {self.steps} steps, at {self._now:.3f} s: an endless loop?")

    def _takes(self, node: Node, step: asyncio.Handle) -> bool:
        """Whether a process takes its step now: not when it has ended, and later when it is paused (rules 1 and 2 of nodes)."""
        if node.alive and not node.paused and self.steps + 1 >= self.strike_at_step:
            self._strike(node)
        if node.alive and node.paused:
            node.held.append(step)
        return node.alive and not node.paused

    def strike(self, after_steps: int, act: Callable[[Node], bool]) -> None:
        """Asks `act` right before a step of a process, so many steps from now; while it answers False, before the next ones."""
        self.strike_at_step, self.on_strike = self.steps + after_steps, act

    def _strike(self, node: Node) -> None:
        if self.on_strike(node):
            self.strike_at_step = sys.maxsize

    def _raise_errors(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.errors:
            first, told = self.errors[0][0], "; ".join(text for _, text in self.errors)
            rule = "SimulationError" if first is None else type(first).__name__
            raise SimulationError(f"at {self._now:.6f} s, step {self.steps}: {told}", rule)

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # those fall out when they come up
            heapq.heappop(timers)
        if not timers:
            waiting = sorted(task.get_name() for task in self._tasks if not task.done())
            raise SimulationError(
                f"deadlock at {self._now:.3f} s: nothing is ready or due, {len(waiting)} tasks wait: {waiting[:20]}"
            )
        if timers[0][0] > self._now:
            self._now = timers[0][0]

    def _write_to_self(self) -> NoReturn:
        raise SimulationError("a thread called into the simulated loop")

    def run_in_executor(self, executor: object, func: object, *args: object) -> NoReturn:
        raise SimulationError(f"{func!r} wants a thread: blocking work goes through a Worker")

    def _new_task(self, loop: Any, work: Coroutine[Any, Any, Any], **kwargs: Any) -> SimTask:
        task = SimTask(work, loop=loop, **kwargs)
        self._tasks.append(task)
        if len(self._tasks) > 1_000:  # the dead are kept until the end: see `_bury`
            self._tasks = [task for task in self._tasks if not task.done() or task.failed_unheard]
        return task

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = SimTimer(when, callback, args, self, context)
        self._births += 1
        heapq.heappush(self._timers, (when, self._births, timer))  # due at the same time: in the order of their making
        return timer

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self._ended:
            self.call_soon(self.create_task, agen.aclose())

    # -- the end --------------------------------------------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = SimHandle(callback, args, self, context)
        if not self._ended:
            self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _find_lost_errors(self) -> None:
        """A task that failed and was awaited by nobody: asyncio would log it some time after the run."""
        for task in self._tasks:
            if task.failed_unheard:
                self.errors.append((task.exception(), f"nobody heard that task {task.get_name()} failed: {task.exception()!r}"))

    def _bury(self) -> None:
        """Closes what crashed nodes and unfinished work left behind, so that nothing of it runs or complains later."""
        self._ended = True
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # exit stacks go on closing: see below
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a task that never began: its coroutine was never awaited
                self._close_tasks()
        finally:
            sys.unraisablehook = hook
        self._ready.clear()  # type: ignore[attr-defined]
        self._timers.clear()

    def _close_tasks(self) -> None:
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                for _ in range(100):
                    try:
                        coroutine.close()  # type: ignore[union-attr]
                        break
                    except BaseException:  # a `finally` that awaits or fails: nobody is left to care
                        continue
            elif not task.cancelled():
                task.exception()  # retrieved
        self._tasks.clear()


def _come_true(moment: SimFuture) -> None:
    if not moment.done():  # cancelled
        moment.set_result(None)


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def run_simulated(work: Coroutine[Any, Any, T], *, max_steps: int = 5_000_000) -> T:
    """Runs `work` on a new virtual loop. Takes no wall time to wait."""
    loop = VirtualLoop(max_steps=max_steps)
    return loop.run(work)
