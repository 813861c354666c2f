"""Is a restored answer the right one? Storing, restoring and correctness, tier by tier.

The seven steps of an acceptance test: fixed settings, a first run of a frozen set of requests,
records that are there, an empty L0 beside a full LMCache, restored answers, their times and hits,
and all of it cold, warm and after a restart.

Correctness is judged by a *forced continuation*. A cold engine generates a few tokens greedily, and
every path is then asked for the log-probabilities at the same positions, after the same tokens. The
continuation is forced by sending it: position ``j`` is a request of its own, the context followed
by the first ``j`` tokens, answered with one token. So every figure is of a *generated* token (the
log-probabilities of prompts are computed without the cache), a token that flips does not change
what is asked next, and nothing is needed but the completions API: a constraint inside one long
answer would have to differ from token to token, which no request option of vLLM can say.

L0 is emptied before each of these requests, so that each is served from the tier under test. Where
vLLM has no endpoint for that, a restart empties L0: then only the first position is asked, and
what needs an empty L0 beside a full L1 is not measured.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from kvlab import counters, prompts
from kvlab import profile as profiles
from kvlab.client import Question
from kvlab.errors import MeasurementError
from kvlab.profile import Profile
from kvlab.records import Event, RequestRecord, now_ns
from kvlab.stack import Launch
from kvlab.stack.ready import RESET_S
from kvlab.units import NS_PER_S
from kvlab.workloads import Recorder
from kvlab.workloads.arm import Arm, visit

ARMS = ("cold", "recold", "lmcache", "restarted", "stock")
"""Two cold engines, LMCache, LMCache after a restart on the same disk, the negative control."""
ROOM = 0.95
"""L1 is filled up to this share before it evicts: every context must fit."""
POLL_S = 0.05
CLEAR_S = 5.0
"""L1 may hold something for so long after it was emptied."""


@dataclass(frozen=True, slots=True)
class Case:
    """A context and how many positions after it are compared."""

    context_id: str
    token_ids: tuple[int, ...]
    positions: int

    def question(self, position: int, forced: Sequence[int]) -> Question:
        """The context with the continuation up to a position; its id names both."""
        ids = (*self.token_ids, *forced[:position])
        return Question(f"{self.context_id}+{position}", ids)


@dataclass(slots=True)
class Trial:
    """One acceptance test: what is asked, and the continuation that the first cold engine gave."""

    profile: Profile
    cases: list[Case]
    record: Recorder
    nonce: str
    resets: bool
    """Whether L0 can be emptied through an endpoint."""
    forced: dict[str, list[int]] = field(default_factory=dict)


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """The arms in their order, as far as this profile has them; one repeat."""
    left_out = set()
    if not has_control(profile):
        left_out.add("stock")
    if profile.cache.l2 is None or not profile.fresh:
        left_out.add("restarted")
    return [(1, arm) for arm in arms if arm not in left_out]


def has_control(profile: Profile) -> bool:
    """Whether the stock connector is known to be wrong here, so that the test must notice it."""
    wanted = profile.experiments.acceptance.control and profile.fresh
    return wanted and profile.model.hybrid and profile.engine.connector == "kvlab"


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts, by kind and arm."""
    every = cases(profile, "")
    some = control_cases(profile, every)
    asked = sum(case.positions for case in every)
    count: Counter[str] = Counter()
    for _, arm in order(profile, arms):
        count[f"launch:{arm}"] += 1
        count[f"request:{arm}:warmup"] += profile.experiments.two_round.warmup_requests
        count[f"stop:{arm}"] += 1
        if arm in ("cold", "recold"):
            count[f"request:{arm}:cold"] += asked
        elif arm == "restarted":
            count[f"request:{arm}:restarted"] += asked
        elif arm == "stock":
            count[f"request:{arm}:fill"] += len(some)
            count[f"request:{arm}:l1"] += sum(case.positions for case in some)
            count[f"drain:{arm}"] += 2
        else:
            count[f"request:{arm}:fill"] += len(every)
            for name in ("l0", "l1", *(["l2"] if profile.cache.l2 else [])):
                count[f"request:{arm}:{name}"] += asked
            count[f"drain:{arm}"] += 2
    return count


def cases(profile: Profile, nonce: str) -> list[Case]:
    """The contexts of the measured length, then those with other tails.

    A continuation ends before it would complete another chunk, so that what a path can restore is
    the same at every position.
    """
    setup, chunk = profile.experiments.acceptance, profile.cache.chunk_tokens
    tokens = profile.workload.context_tokens
    whole = (tokens - 1) // chunk * chunk
    longest = profile.engine.max_model_len - 1
    positions = min(setup.positions, whole + chunk - tokens + 1, longest - tokens + 1)
    found = []
    for index in range(setup.contexts):
        question = prompts.question(profile, nonce, "fill", index)
        found.append(Case(question.context_id, question.token_ids, max(1, positions)))
    for tail in setup.tails:
        if tail > chunk or whole + tail > longest:
            continue
        for index in range(setup.tail_contexts):
            name = f"t{tail:04d}-{index}"
            question = prompts.of_length(profile, nonce, name, whole + tail)
            found.append(Case(name, question.token_ids, 1))
    return found


def control_cases(profile: Profile, every: Sequence[Case]) -> list[Case]:
    """The cases of the negative control: few contexts, every tail."""
    setup = profile.experiments.acceptance
    return [*every[: setup.control_contexts], *every[setup.contexts :]]


async def acceptance(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = ARMS,
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every path of one acceptance test; one that was interrupted begins again.

    All paths are compared with the same cold continuation, so no arm stands by itself: they are
    finished together.
    """
    wanted = [arm for _, arm in order(profile, arms)]
    if all((1, arm) in done for arm in wanted):
        return
    roomy = _with(profile, {"cache.eviction_watermark": ROOM})
    trial = Trial(profile, cases(profile, nonce), record, nonce, resets=True)
    for arm_name in ("cold", "recold"):
        async with (
            launch("baseline", 1, label=arm_name) as stack,
            visit(profile, stack, record, prompts.of_launch(profile, nonce, arm_name)) as arm,
        ):
            if arm_name == "cold":
                await _learn_reset(arm, trial)
            await arm.warm_up()
            await _ask_cold(arm, trial)
    async with (
        launch("lmcache", 1, label="lmcache", variant=roomy, keep_l2=True) as stack,
        visit(roomy, stack, record, nonce) as arm,
    ):
        l2_path = stack.l2_path
        await _fill(arm, trial, trial.cases, with_l0=True)
        if trial.resets:
            await _check_reset(arm, trial)
            await _ask_restored(arm, trial, trial.cases, "l1")
            if profile.cache.l2 is not None:
                await _ask_restored(arm, trial, trial.cases, "l2", clear=True)
    if "restarted" in wanted:
        async with (
            launch("lmcache", 1, label="restarted", variant=roomy, l2_path=l2_path) as stack,
            visit(roomy, stack, record, nonce) as arm,
        ):
            await arm.warm_up()
            _name_cases(arm, trial.cases)
            await _ask_restored(arm, trial, trial.cases, "restarted", clear=trial.resets)
        _remove(profile, l2_path)
    if "stock" in wanted:
        await _control(roomy, launch, trial)
    for name in wanted:
        record(Event(at_ns=now_ns(), kind="arm_finished", scenario=name, repeat=1))


def _remove(profile: Profile, l2_path: Path | None) -> None:
    """Remove the records of the launch that was restarted, unless the profile names their place."""
    if l2_path is not None and profile.cache.l2 is not None and not profile.cache.l2.base_path:
        shutil.rmtree(l2_path, ignore_errors=True)


async def _control(roomy: Profile, launch: Launch, trial: Trial) -> None:
    """The negative control: the stock connector, which this test has to catch."""
    stock = _with(roomy, {"engine.connector": "stock"})
    some = control_cases(trial.profile, trial.cases)
    async with (
        launch("lmcache", 1, label="stock", variant=stock) as stack,
        visit(stock, stack, trial.record, trial.nonce) as arm,
    ):
        await _fill(arm, trial, some, with_l0=False)
        if trial.resets:
            await _ask_restored(arm, trial, some, "l1")


def _with(profile: Profile, values: dict[str, object]) -> Profile:
    """The profile with other values for this launch only."""
    tree = profile.as_dict()
    for dotted, value in values.items():
        section, key = dotted.split(".")
        tree[section] = {**tree[section], key: value}
    return profiles.from_dict(tree)


async def _learn_reset(arm: Arm, trial: Trial) -> None:
    """Find out how L0 can be emptied; without an endpoint only first positions are asked."""
    trial.resets = await arm.stack.reset_local_cache() is not None
    arm.event("reset_method", method="endpoint" if trial.resets else "restart")
    if not trial.resets:
        trial.cases = [Case(case.context_id, case.token_ids, 1) for case in trial.cases]


def _name_cases(arm: Arm, asked: Sequence[Case]) -> None:
    """Write down what every round of this launch has to hold."""
    arm.event("cases", cases={case.context_id: case.positions for case in asked})


async def _ask_cold(arm: Arm, trial: Trial) -> None:
    """Every position, computed from nothing; the first cold engine decides the continuation."""
    _name_cases(arm, trial.cases)
    async with _Round(arm, trial, "cold") as round_:
        for case in trial.cases:
            known = trial.forced.get(case.context_id)
            forced = list(known or ())
            for position in range(case.positions):
                await round_.reset()
                reply = await round_.ask(case.question(position, forced))
                if known is None:
                    forced.append(_token_id(reply))
            trial.forced[case.context_id] = forced


async def _fill(arm: Arm, trial: Trial, asked: Sequence[Case], *, with_l0: bool) -> None:
    """Every context once, cold, and at once again from L0: it may not stay there for long."""
    await arm.warm_up()
    await arm.drain("warmup")
    _name_cases(arm, asked)
    async with _Round(arm, trial, "fill") as round_:
        for case in asked:
            await round_.ask(case.question(0, ()))
            if with_l0:
                await round_.ask_all(case, "l0")
        await arm.drain("fill")


async def _check_reset(arm: Arm, trial: Trial) -> None:
    """One context after a reset: L0 must hold nothing of it, LMCache all."""
    async with _Round(arm, trial, "reset") as round_:
        await round_.reset()
        await round_.ask(trial.cases[0].question(0, ()))


async def _ask_restored(
    arm: Arm, trial: Trial, asked: Sequence[Case], name: str, *, clear: bool = False
) -> None:
    """Every position from the tier under test; ``clear`` empties L1 before each request."""
    async with _Round(arm, trial, name) as round_:
        for case in asked:
            await round_.ask_all(case, name, reset=True, clear=clear)


class _Round:
    """One round: its counters and the servers' state before and after, its requests numbered."""

    def __init__(self, arm: Arm, trial: Trial, name: str):
        self.arm = arm
        self.trial = trial
        self.name = name
        self._asked: Counter[str] = Counter()
        self._resets: Counter[str] = Counter()
        self._ends_ns = now_ns() + int(arm.profile.timeouts.round_s * NS_PER_S)

    async def __aenter__(self) -> _Round:
        await self.arm.scrape(f"{self.name}:start")
        self.arm.state(self.name)
        await self.arm.condition(self.name, "start")
        self.arm.event("round_started", self.name)
        return self

    async def __aexit__(self, *problem: object) -> None:
        self.arm.event("round_ended", self.name, resets=dict(self._resets))
        self.arm.state(self.name)
        if problem[0] is None:
            await self.arm.condition(self.name, "end")
            await self.arm.scrape(f"{self.name}:end")

    async def ask(self, question: Question, name: str | None = None) -> RequestRecord:
        """One answer of this round, or of the one named, which runs inside it."""
        name = name or self.name
        if now_ns() > self._ends_ns:
            raise MeasurementError(
                f"the {name} round of {self.arm.stack.scenario} exceeded its deadline of "
                f"{self.arm.profile.timeouts.round_s:g} s",
                hint="raise timeouts.round_s, or ask fewer contexts",
            )
        reply = await self.arm.ask(question, name, self._asked[name])
        self._asked[name] += 1
        self.arm.stack.check_alive()
        return reply

    async def ask_all(
        self, case: Case, name: str, *, reset: bool = False, clear: bool = False
    ) -> None:
        """Every position of a case, along the continuation of the cold engine."""
        for position in range(case.positions):
            if reset:
                await self.reset()
            if clear:
                await self.clear()
            await self.ask(case.question(position, self.trial.forced[case.context_id]), name)

    async def reset(self) -> None:
        """Empty L0 and count what the server says; it refuses while a store holds blocks."""
        if not self.trial.resets:
            return
        end_ns = now_ns() + int(RESET_S * NS_PER_S)
        while (answer := await self.arm.stack.reset_local_cache()) is False:
            if now_ns() > end_ns:
                break
            await asyncio.sleep(POLL_S)
        self._count("reset", answer)

    async def clear(self) -> None:
        """Empty L1 until it holds nothing: what was just loaded stays until its reader lets go."""
        patience_s = 0.0 if self._resets["cleared_refused"] else CLEAR_S
        end_ns = now_ns() + int(patience_s * NS_PER_S)
        while True:
            answer = await self.arm.stack.clear_memory_tier()
            held = await self._l1_bytes()
            if not held or now_ns() > end_ns:
                break
            await asyncio.sleep(POLL_S)
        self._count("cleared", bool(answer) and not held)

    async def _l1_bytes(self) -> float | None:
        """What L1 holds; None where LMCache does not say."""
        readings = await self.arm.stack.scrape(only="lmcache")
        return counters.read(readings[0].samples, "l1_memory_bytes") if readings else None

    def _count(self, what: str, answer: bool | None) -> None:
        self._resets[f"{what}_done" if answer else f"{what}_refused"] += 1


def _token_id(reply: RequestRecord) -> int:
    """The id of the token that a cold engine chose."""
    prefix, _, number = (reply.token or "").partition(":")
    if reply.error or prefix != "token_id" or not number.isdecimal():
        raise MeasurementError(
            f"the cold answer to {reply.context_id} names no token to continue with: "
            f"{reply.error or reply.token}",
            hint="does this vLLM know return_tokens_as_token_ids? update it",
        )
    return int(number)
