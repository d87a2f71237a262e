"""Watches the waits of all ranks through the store, and ends a run with a lost rank."""

import atexit
import json
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import torch.distributed as dist

from ..comm.control import control_of
from ..comm.groups import Groups
from ..comm.waits import SAVE, Wait, Watch
from .arrivals import CommunicationError, PeerFailure, RankProcesses, break_all_groups
from .barrier import NOTICES_S
from .diagnosis import DeviceQueue, RankReport, ScriptCall, Standing, StragglerReport, is_to_end, others_are_behind
from .error_hook import end_process
from .rank_state import RankState, ScriptCollective, is_in_barrier, main_stack, script_line
from .store import CALL_S, StoreSilentError, StoreThread

# [Note: who is asked] If a rank has waited long, or its wait has failed, the rank asks a question through the store, and a thread
# of each other rank answers with its `RankState`. So nothing is written while all goes well. A rank without an answer is stopped,
# or its host cannot be reached. The connections themselves give less information: gloo closes all connections of a group after
# one failed wait, so most ranks see the end of a rank as innocent as themselves.

_BEAT_S = 0.5
_ANSWER_S = 2.5
"""Time limit of an answer: a rank looks for questions every `_BEAT_S`."""
_STORE_S = 1.0
"""Additional time limit for a few store calls."""
_SURVEY_S = 2 * _ANSWER_S + _STORE_S
"""Time limit of a survey, including other calls to the store."""
_REGISTER_S = 60.0
"""Time limit of the first call to the store: all ranks connect at once, perhaps on machines that do other work."""
_GLANCE_S = 0.05
_LOOK_S = 1.0
_WORDS_S = 60.0
"""A state left by a rank counts as its present state for this time."""
_GIVEN_UP_S = 15.0
"""A rank counts as having given up for this time after a failed wait."""
_HEARD_S = 2.0
"""Time for a late rank to receive the order to end, before this process (and perhaps the store with it) ends."""
_FAREWELL_S = 8.0
"""At its end, the process with the store waits this long for ranks that ask for the reason."""
_CLOSELY = "closely"
"""A question whose answer also contains the stack and the last collectives."""
_OTHER_CALLS_S = 4.0
"""After this time, check for two ranks that wait for each other, which no slow rank or link can cause."""
_ASK_AGAIN_S = 10.0
_GRACE_S = 8.0
"""After this time, a wait that should have failed but did not is ended together with its process."""


class Watchdog(Watch):
    """The watchdog of one of several ranks.

    Args:
        rank, world_size: of the default group.
        name: the same on all ranks, and unique to this object.
        late_s: time after which a wait for a rank is ended; 0 means never.
        has_queue: whether collectives run in the queue of an accelerator.

    Attributes:
        store: the launcher's store, also for calls outside of the watchdog's thread.
        script_wait: the collective that the script itself called in the main thread.
    """

    def __init__(self, rank: int, world_size: int, name: str, late_s: float = 0.0, *, has_queue: bool = False):
        super().__init__()
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._answered = 0
        self._noticed: tuple[Wait | None, int] = (None, 0)
        self.script_wait: Wait | None = None
        self._has_announced_end = False
        self._thread = StoreThread(_STORE_S)
        self.store = self._thread.keys.within(CALL_S)
        self._keys = self._thread.keys.below(f"hf_zero/watchdog/{name}")
        self._processes = RankProcesses(self._thread.keys.within(_STORE_S + _ANSWER_S))
        try:
            self._thread.ask(self._processes.register, _REGISTER_S)
        except StoreSilentError as error:
            self._thread.close(_STORE_S)
            raise CommunicationError(f"hf_zero: {error}. Look at that process and its host.") from error
        # Close before Python ends as well: a thread returning from torch after the end would abort the process.
        weakref.finalize(self, self._thread.close, _STORE_S)
        reference = weakref.ref(self)
        self._thread.repeat(lambda: _beat(reference), _BEAT_S)
        # Python calls the last registered function first, so this one runs before the close above.
        atexit.register(_announce_at_exit, reference)
        if late_s:
            weakref.finalize(self, StragglerWatch(self, late_s, has_queue=has_queue).close, _HEARD_S + _STORE_S)

    # ---- failures ----

    def explain(self, wait: Wait, error: RuntimeError) -> CommunicationError:
        if wait.end is not None:
            return wait.end
        late = error.rank if isinstance(error, PeerFailure) else None
        report = self._diagnose(wait, wait.line, late)
        return CommunicationError(str(report), report.culprits)

    def diagnose(self, wait: Wait) -> StragglerReport:
        """Diagnoses a long wait of this rank."""
        return self._diagnose(wait, script_line()[0])

    def _diagnose(self, wait: Wait, line: str, late: int | None = None) -> StragglerReport:
        def judge() -> StragglerReport:
            report = replace(self._report(wait, line, late, _CLOSELY), late=late, recent=self.log.last_lines())
            if wait.failure is not None:
                # Write the reason before the error is raised: this rank may be gone when the others ask.
                self._write_reason(report.finding, report.culprits)
            return report

        try:
            return self._thread.ask(judge, _SURVEY_S)
        except RuntimeError as silence:
            return replace(self._facts(wait, line), late=late, silence=str(silence))

    def explain_call(self, call: str, line: str, error: RuntimeError) -> CommunicationError | None:
        if self.ended is not None:
            return self.ended
        wait = self.script_wait
        if wait is None or wait.name != call:
            wait = Wait(ScriptCollective(call))
        self.fail(wait, error)
        wait.line = line

        def judge() -> CommunicationError | None:
            report = self._report(wait, line, self._others[0] if len(self._others) == 1 else None)
            if not any(each.is_over or each.words is not None for each in report.rank_reports.values()):
                return None
            self._write_reason(report.finding, report.culprits)
            return CommunicationError(str(report), report.culprits)

        try:
            return self._thread.ask(judge, _SURVEY_S)
        except RuntimeError as silence:
            return CommunicationError(str(replace(self._facts(wait, line), silence=str(silence))))

    def _facts(self, wait: Wait, line: str) -> StragglerReport:
        """Describes a wait of this rank, without the other ranks."""
        return StragglerReport(
            rank=self._rank,
            wait=wait,
            line=line,
            phase=self.log.phase,
            begun=dict(self.begun),
            starts=dict(self.starts),
        )

    def _report(self, wait: Wait, line: str, enough: int | None = None, question: str = "") -> StragglerReport:
        """Compares a wait of this rank with the states of the others; see `_survey`. In the thread of the store."""
        return replace(self._facts(wait, line), rank_reports=self._survey(enough, question))

    def end_stragglers(self, report: StragglerReport) -> None:
        """Publishes the diagnosis, and ends the processes of living culprits outside of collectives."""
        outside = (Standing.IN_SCRIPT, Standing.ELSEWHERE)
        elsewhere = [rank for rank in report.culprits if report.standings.get(rank) in outside]

        def tell() -> None:
            self._write_reason(report.finding, report.culprits)
            self._ask(json.dumps({"ends": elsewhere, "by": self._rank, "said": report.finding}))
            deadline_s = time.monotonic() + _HEARD_S
            # This process may keep the store, so stay until the late ranks have heard, and answer questions in the meantime.
            while time.monotonic() < deadline_s and not all(self._keys.check(f"heard {rank}") for rank in elsewhere):
                self.answer()
                time.sleep(_GLANCE_S)

        with suppress(RuntimeError):
            # Otherwise no rank is left to read the reason.
            self._thread.ask(tell, _HEARD_S + _STORE_S)

    def leave_reason(self, words: str, culprits: Sequence[int] = ()) -> None:
        with suppress(RuntimeError):
            # Otherwise no rank is left to read the reason.
            self._thread.ask(lambda: self._write_reason(words, culprits or [self._rank]), _STORE_S)

    def _write_reason(self, words: str, culprits: Sequence[int]) -> None:
        """Writes this rank's reason to give up, for ranks asking after this rank has stopped answering."""
        left = {"words": words, "culprits": list(culprits), "where": asdict(self._rank_state()), "at": time.time()}
        self._keys.set(f"reason {self._rank}", json.dumps(left))

    # ---- missing ranks ----

    def look_for(self, wait: Wait, enough: int | None = None) -> tuple[list[int], str]:
        """Returns the ranks waiting for this one in another collective, and the state of each rank. `enough`: see `_survey`."""
        report = self._thread.ask(lambda: self._report(wait, script_line()[0], enough), _SURVEY_S)
        return [rank for rank, each in report.rank_reports.items() if each.waits_for(self.begun)], report.in_lines

    # ---- the end ----

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the others to finish, unless another rank waits for a collective without this rank."""
        try:
            self.announce_end()
            at_work = self._await_the_others(time.monotonic() + patience_s)
            if at_work:
                self._keep_store()
            return at_work
        except (StoreSilentError, dist.DistNetworkError):
            # The store exists as long as any rank works, so without a store its owner has left.
            return []
        finally:
            self._thread.close(_STORE_S)

    def announce_end(self) -> None:
        """Publishes once the end of this rank's work."""
        if not self._has_announced_end:
            self._has_announced_end = True
            self._processes.announce_end(self._rank)

    def end(self) -> None:
        """Publishes the end of Python, unless other code calls `leave`. Keeps the store for ranks asking for the reason."""
        if self._thread.is_closing or (self.is_left_by_others and dist.is_initialized()):
            return
        # Without a store, no rank is left to hear of the end.
        with suppress(StoreSilentError, dist.DistNetworkError):
            self.announce_end()
            self._keep_store()

    def _await_the_others(self, deadline_s: float) -> list[int]:
        """Waits; returns the ranks still working when this rank must not or need not wait any longer."""
        look_s, seen = 0.0, dict[tuple, int]()

        def is_missed() -> bool:
            nonlocal look_s, seen
            if time.monotonic() < look_s:
                return False
            misses, waiting, turn = self._thread.ask(self._missed_by, _STORE_S + _ANSWER_S)
            # A call of the script itself may end soon if all ranks are in the call, so only count calls seen twice.
            misses = misses or any(seen.get(each, turn) != turn for each in waiting)
            look_s, seen = time.monotonic() + _LOOK_S, dict.fromkeys(waiting, turn)
            return misses

        return self._processes.unfinished(len(self._others) + 1, deadline_s, is_missed)

    def _keep_store(self) -> None:
        """Keeps a store of this process until the others have looked this rank up."""
        if self._rank != 0 or not self._thread.is_of_rank_0:
            return
        if dist.is_initialized():
            # Waits for this rank fail now, instead of at the end of this process.
            break_all_groups()
        self._processes.unfinished(len(self._others) + 1, time.monotonic() + _FAREWELL_S)

    def _missed_by(self) -> tuple[bool, list[tuple], int]:
        """Returns whether a rank waits in a collective not begun here, the waits in the script's calls, and the turn."""
        mine, turn = self._keys, int(time.time() / _LOOK_S)
        # One finished rank asks the others, and all finished ranks read the result from the store.
        if mine.add(f"look {turn}", 1) == 1:
            begun: Counter[str] = Counter()
            calls = []
            for rank, each in self._survey().items():
                if each.where is not None and each.where.torch_call is not None:
                    calls.append([rank, each.where.torch_call, each.where.line])
                if each.where is not None and each.where.kind is not None and each.is_waiting:
                    begun[each.where.kind] = max(begun[each.where.kind], each.where.begun.get(each.where.kind, 0))
            mine.set("look", json.dumps([begun, calls, turn]))
        look = mine.find("look")
        if look is None:
            return False, [], turn
        begun, calls, turn = json.loads(look)
        misses = any(count > self.begun.get(kind, 0) for kind, count in begun.items())
        return misses, [tuple(each) for each in calls], turn

    # ---- questions and answers, all in the thread of the store ----

    def answer(self) -> None:
        """Answers new questions with the state of this rank."""
        asked = self._answered
        closely = False
        while (question := self._keys.find(f"question {asked + 1}")) is not None:
            asked += 1
            closely |= question == _CLOSELY
            if question.startswith("{"):
                self._obey(json.loads(question))
        if asked > self._answered:
            self._answered = asked
            self._keys.set(f"answer {self._rank}", json.dumps([asked, asdict(self._rank_state(closely=closely))]))

    def _obey(self, order: dict) -> None:
        if self._rank not in order["ends"] or self.longest is not None:
            return
        self._keys.set(f"heard {self._rank}", "")
        where = self._rank_state()
        end_process(
            f"hf_zero: rank {self._rank} was late and exits: {where}.\n  rank {order['by']}: {order['said']}\n"
            f"{main_stack()}If it is only slow, set a larger `comm.late_s` (0: never late)."
        )

    def notice(self) -> None:
        """Prints the missing ranks after a long wait. Only the first of the waiting ranks prints."""
        wait = self.longest
        if wait is None or wait.failure is not None:
            return
        told = self._noticed[1] if self._noticed[0] is wait else 0
        if told == len(NOTICES_S) or wait.seconds < NOTICES_S[told]:
            return
        self._noticed = (wait, told + 1)
        report = self._report(wait, script_line()[0])
        if not any(rank < self._rank and each.is_waiting for rank, each in report.rank_reports.items()):
            print(f"hf_zero: waiting.\n{report.in_lines}", file=sys.stderr, flush=True)

    def _ask(self, question: str) -> int:
        """Asks all other ranks; returns the number of the question."""
        number = self._keys.add("questions", 1)
        self._keys.set(f"question {number}", question)
        return number

    def _survey(self, enough: int | None = None, question: str = "") -> dict[int, RankReport]:
        """Asks the other ranks for their states.

        Args:
            enough: a rank whose end explains everything, so that the other answers are not needed.
        """
        number = self._ask(question)
        found: dict[int, RankReport] = {}
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            in_time = time.monotonic() < deadline_s and not self._thread.is_closing
            for rank in self._others:
                if rank not in found and (rank_report := self._look_at(rank, number, ask_again=in_time)):
                    found[rank] = rank_report
            # Waiting for the others would take seconds and not change the error.
            has_reason = enough in found and found[enough].is_over
            if len(found) == len(self._others) or has_reason:
                return found
            self.answer()
            time.sleep(_GLANCE_S)

    def _look_at(self, rank: int, number: int, *, ask_again: bool) -> RankReport | None:
        """Describes a rank; None while an answer may still arrive."""
        processes, where = self._processes, None
        has_ended, has_left = processes.has_ended(rank), processes.has_left(rank)
        words = json.loads(self._keys.find(f"reason {rank}") or "{}")
        culprits = tuple(words.get("culprits", ()))
        if answer := self._keys.find(f"answer {rank}"):
            answered, where = json.loads(answer)
            where = RankState(**where) if answered >= number else None
        if where is None and not (has_ended or has_left or rank in culprits) and ask_again:
            return None
        if where is None and words and time.time() - words["at"] < _WORDS_S:
            # The rank has given up, and no longer answers.
            where = RankState(**words["where"])
        process = processes.known(rank)
        return RankReport(
            rank=rank,
            process=process,
            has_ended=has_ended,
            has_left=has_left,
            is_stopped=process is not None and process.is_stopped(),
            words=words.get("words"),
            culprits=culprits,
            where=where,
        )

    def _rank_state(self, *, closely: bool = False) -> RankState:
        wait, (line, torch_call) = self.longest, script_line()
        if wait is None and torch_call is None and self.given_up is not None:
            # The error of the last wait may be on its way through the script, or may be printed right now.
            is_recent = time.monotonic() - self.given_up.since_s - self.given_up.seconds < _GIVEN_UP_S
            wait = self.given_up if is_recent else None
        if wait is not None and wait.failure is not None:
            line = wait.line
        timed = wait or self.script_wait
        return RankState(
            waits_in=None if wait is None else str(wait.what),
            kind=None if wait is None else self.kind_of(wait),
            seconds=0.0 if timed is None else timed.seconds,
            failure=None if wait is None else wait.failure,
            # In a collective of the engine, the function of torch was not called by the script.
            torch_call=torch_call if wait is None else None,
            is_in_barrier=wait is None and is_in_barrier(),
            line=line,
            begun=dict(self.begun),
            holds="" if wait is None else wait.holds,
            phase=self.log.phase,
            starts=dict(self.starts) if closely else {},
            stack=main_stack() if closely and wait is None else "",
            recent=tuple(self.log.last_lines()) if closely else (),
        )


class StragglerWatch:
    """Ends waits for a late rank, in its own thread, because the store's thread may hang in a call to a lost host.

    Args:
        limit_s: `comm.late_s`.
        has_queue: whether collectives run in the queue of an accelerator.
    """

    def __init__(self, watchdog: "Watchdog", limit_s: float, *, has_queue: bool = False):
        self._limit_s = limit_s
        self._ask_again_s = 0.0
        self._broken: tuple[Wait, float] | None = None
        self._call = ScriptCall()
        self._queue = DeviceQueue(limit_s) if has_queue else None
        self._is_over = threading.Event()
        reference = weakref.ref(watchdog)
        self._thread = threading.Thread(target=self._run, args=(reference,), name="hf_zero late", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Ends the thread at its next look, and waits for the end: a thread inside torch would abort Python's exit."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    def _run(self, reference: "weakref.ref[Watchdog]") -> None:
        while not self._is_over.wait(_BEAT_S):
            watchdog = reference()
            if watchdog is None:
                return
            self._look(watchdog)
            # Keep no reference while waiting for the next look.
            del watchdog

    def _look(self, watchdog: "Watchdog") -> None:
        # Prefer a wait of hf_zero, whose innermost frame also belongs to torch.
        own = watchdog.longest
        watchdog.script_wait = self._call.look() if own is None else None
        queued = None if self._queue is None else self._queue.look(watchdog.log)
        wait = own or watchdog.script_wait or queued
        if wait is None or wait.failure is not None:
            return
        is_early = wait.seconds < self._limit_s
        if is_early and (wait.kind is None or wait is queued or wait.seconds < _OTHER_CALLS_S):
            return
        if wait.end is not None:
            self._end_if_it_goes_on(wait)
            return
        if time.monotonic() < self._ask_again_s:
            return
        self._ask_again_s = time.monotonic() + _ASK_AGAIN_S
        report = watchdog.diagnose(wait)
        is_over = is_to_end(report)
        if wait is queued:
            is_over = (is_over or report.in_vain) and others_are_behind(report, watchdog.begun, wait.kind)
        else:
            is_in_save = watchdog.kind_of(wait) == SAVE
            is_over = is_over or (is_in_save and others_are_behind(report, watchdog.begun, SAVE))
            is_over = report.in_vain or (is_over and not is_early)
        if not is_over:
            return
        # Set the error before the late rank is ended: its end closes its connections, and so ends this wait.
        wait.end = CommunicationError(str(report), report.culprits)
        watchdog.ended = wait.end
        watchdog.end_stragglers(report)
        self._broken = wait, time.monotonic()
        if wait.is_of_script:
            # The script would only see torch's error, which names addresses.
            print(report, file=sys.stderr, flush=True)
        # Break the groups last: broken groups end the waits, and perhaps the process before the others are informed.
        break_all_groups()

    def _end_if_it_goes_on(self, wait: Wait) -> None:
        if self._broken is not None and self._broken[0] is wait and time.monotonic() > self._broken[1] + _GRACE_S:
            end_process(str(wait.end))


def _beat(reference: "weakref.ref[Watchdog]") -> bool:
    watchdog = reference()
    if watchdog is None:
        return False
    watchdog.answer()
    watchdog.notice()
    if not dist.is_initialized():
        # The group was destroyed by the script, or by accelerate's `end_training`.
        watchdog.announce_end()
    return True


def _announce_at_exit(reference: "weakref.ref[Watchdog]") -> None:
    watchdog = reference()
    if watchdog is not None and getattr(sys, "last_value", None) is None:
        watchdog.end()


def watch_over(groups: Groups) -> Watch:
    """Makes the watchdog of an engine's ranks. Collective."""
    if groups.backend == "fake":
        return Watch()
    name = control_of(groups, Watch()).exchange(uuid.uuid4().hex, "exchange of a name")[0]
    return Watchdog(dist.get_rank(), dist.get_world_size(), name, groups.late_s, has_queue=groups.backend != "gloo")
