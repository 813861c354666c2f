"""Records that outlive their servers: fill, stop both, start again on the same L2, ask again.

Once the servers are stopped in order (SIGTERM), once they are killed (SIGKILL). Both variants ask
the same contexts and have L2 folders of their own, so the second fill is also a control: it finds
nothing although the first one's records lie beside it. Two more controls start on the first
variant's records with another chunk size and under another model name. The last launches show the
2N-1 rule: the same prompts, twice, with batches that keep to it and with batches that do not.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from kvlab import prompts, storage
from kvlab.client import Question
from kvlab.disk import identity
from kvlab.disk.inventory import record_name, survey
from kvlab.errors import MeasurementError, UsageError
from kvlab.profile import Profile
from kvlab.stack import Deployment, Launch
from kvlab.workloads import Recorder
from kvlab.workloads.arm import Arm, visit

STOPS = ("sigterm", "sigkill")
CONTROLS = ("other-chunk", "other-model")
COARSE = "coarse-batches"
ARMS = (*(f"{stop}{part}" for stop in STOPS for part in ("", "-restarted")), *CONTROLS, COARSE)
TRIAL_BYTES = 1 << 20
RULE_ROUNDS = ("rule-first", "rule-again")


def restarted(stop: str) -> str:
    """The label of the launch that starts on the records of a variant."""
    return f"{stop}-restarted"


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """(repeat, launch) pairs: the variants take turns in coming first."""
    return [
        (repeat, arm)
        for repeat in range(1, profile.experiments.restart.repeats + 1)
        for arm in _launches(repeat)
        if arm in arms and (arm != COARSE or _has_rule(profile))
    ]


def _stops(repeat: int) -> tuple[str, ...]:
    return STOPS if repeat % 2 else STOPS[::-1]


def _launches(repeat: int) -> list[str]:
    pairs = [label for stop in _stops(repeat) for label in (stop, restarted(stop))]
    return [*pairs, *CONTROLS, COARSE]


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts, by kind and launch."""
    setup, contexts = profile.experiments.restart, profile.workload.contexts
    repeats = setup.repeats if repeats is None else repeats
    warm = profile.experiments.two_round.warmup_requests
    count: Counter[str] = Counter()
    for arm in arms:
        if arm == COARSE and not _has_rule(profile):
            continue
        asked = {"control": setup.control_contexts}
        if arm in STOPS:
            asked = {"warmup": warm, "fill": contexts}
        elif arm.endswith("-restarted"):
            asked = {"first": 1, "warmup": warm, "measure": contexts}
        elif arm == COARSE:
            asked = dict.fromkeys(RULE_ROUNDS, setup.rule_contexts)
        if arm == restarted(STOPS[-1]) and _has_rule(profile):
            asked |= dict.fromkeys(RULE_ROUNDS, setup.rule_contexts)
        count[f"launch:{arm}"] += repeats
        for name, number in asked.items():
            count[f"request:{arm}:{name}"] += repeats * number
        count[f"drain:{arm}"] += repeats * len(asked)
        count[f"stop:{arm}"] += repeats
    return count


async def restart(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = ARMS,
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every repeat that is not done: both variants, the controls, the 2N-1 rule.

    A repeat is done as a whole, since its launches start on each other's records. Raises
    MeasurementError when the fill left nothing on the disk, or records of another configuration.
    """
    if profile.cache.l2 is None:
        raise UsageError(
            "restart needs a disk tier, and cache.l2 is null",
            hint='--set cache.l2=\'{"adapter": {"type": "fs"}}\'',
        )
    if profile.workload.shape != "identical":
        raise UsageError(
            "restart sends the same prompts again, to compare their answers with the cold ones; "
            f"workload.shape is {profile.workload.shape}",
            hint="--set workload.shape=identical",
        )
    for repeat in range(1, profile.experiments.restart.repeats + 1):
        if (repeat, arms[0]) not in done:
            await Repeat(profile, launch, record, nonce, repeat).run()


@dataclass(frozen=True, slots=True)
class Kept:
    """The records that a fill left behind, as they were just before its servers were stopped."""

    profile: Profile
    folder: Path
    records: dict[str, int]
    """Size by file name."""


class Repeat:
    """One repeat: its launches share L2 folders, so it is measured as a whole or not at all."""

    def __init__(self, profile: Profile, launch: Launch, record: Recorder, nonce: str, repeat: int):
        self.profile = profile
        self.launch = launch
        self.record = record
        self.nonce = nonce
        self.repeat = repeat
        self.setup = profile.experiments.restart
        self.visited: list[Arm] = []
        self.kept: dict[str, Kept] = {}
        self.folders: list[Path] = []

    async def run(self) -> None:
        """Every launch of the repeat, recorded; no L2 folder is left."""
        try:
            for stop in _stops(self.repeat):
                await self._fill(stop)
                await self._start_again(stop)
            first = self.kept[_stops(self.repeat)[0]]
            for name, other in _others(first.profile).items():
                await self._control(name, first, other)
            if _has_rule(self.profile):
                await self._coarse()
        finally:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)
        for arm in self.visited:
            arm.event("arm_finished")

    async def _fill(self, stop: str) -> None:
        """Fill an empty L2 and stop the servers, in order or by force."""
        chosen = self._own_l2(stop)
        hard = stop == "sigkill"
        async with (
            self.launch(
                "lmcache", self.repeat, variant=chosen, label=stop, keep_l2=True, hard_stop=hard
            ) as stack,
            visit(chosen, stack, self.record, self.nonce) as arm,
        ):
            assert stack.l2_path is not None
            self.visited.append(arm)
            self.folders.append(stack.l2_path)
            self._try_disk(stack.l2_path)
            whose = {**identity.of(chosen), **identity.learnt(stack.facts)}
            identity.refuse_unstable(whose)
            identity.write(stack.l2_path, whose)
            arm.event("identity", fields=whose)
            await self._warmed_up(arm)
            beside = [one.folder.name for one in self.kept.values()]
            await arm.round("fill")
            if beside:
                arm.event("control", kind_of="other-folder", folders=beside)
            self._refuse_empty(stack)
            self.kept[stop] = Kept(chosen, stack.l2_path, _records(stack.l2_path))
        self._survey(arm, "stopped", self.kept[stop])

    def _try_disk(self, folder: Path) -> None:
        """A disk tier that refuses every write would only show when nothing is found again."""
        l2 = self.profile.cache.l2
        assert l2 is not None
        storage.refuse_unwritable(
            folder,
            record_name(self.profile.model.name),
            TRIAL_BYTES,
            direct=l2.adapter.get("use_odirect") is True,
        )

    async def _warmed_up(self, arm: Arm) -> None:
        await arm.warm_up()
        await arm.drain("warmup")

    def _refuse_empty(self, stack: Deployment) -> None:
        """There is no use in a restart when nothing is on the disk."""
        assert stack.l2_path is not None
        if not survey(stack.l2_path).files:
            raise MeasurementError(
                f"disk tier empty: after the fill of {stack.scenario} no record is in "
                f"{stack.l2_path}",
                hint="see LMCache's log in the run folder for stores that failed",
            )

    async def _start_again(self, stop: str) -> None:
        """Start on the records, from cold pages, and send the same workload."""
        kept = self.kept[stop]
        identity.refuse_foreign(kept.folder, identity.of(kept.profile))
        storage.drop_pages(kept.folder)
        label = restarted(stop)
        async with (
            self.launch(
                "lmcache", self.repeat, variant=kept.profile, label=label, l2_path=kept.folder
            ) as stack,
            visit(kept.profile, stack, self.record, self.nonce) as arm,
        ):
            self.visited.append(arm)
            whose = {**identity.of(kept.profile), **identity.learnt(stack.facts)}
            identity.refuse_foreign(kept.folder, whose)
            arm.event("identity", fields=whose)
            self._survey(arm, "started", kept)
            # The fill's own warm-up is on the disk: asked first, it is the first hit from there.
            await arm.round("first", [next(prompts.warmup(kept.profile, self.nonce))])
            arm.nonce = f"{self.nonce}:{label}"  # the warm-up itself must be computed
            await self._warmed_up(arm)
            arm.nonce = self.nonce
            self._pages(arm, "pages_dropped", storage.drop_pages(kept.folder), kept.folder)
            await arm.round("measure")
            self._pages(arm, "pages_read", storage.residency(kept.folder), kept.folder)
            if stop == STOPS[-1] and _has_rule(self.profile):
                await self._rule(arm)

    async def _control(self, name: str, kept: Kept, other: Profile) -> None:
        """Start a configuration on records that are not its own: it must find none of them."""
        held = identity.read(kept.folder)
        async with (
            self.launch(
                "lmcache", self.repeat, variant=other, label=name, l2_path=kept.folder
            ) as stack,
            visit(other, stack, self.record, self.nonce) as arm,
        ):
            self.visited.append(arm)
            refused = identity.complaint(held, identity.of(other))
            arm.event("control", kind_of=name, refused=refused)
            await arm.round("control", self._contexts(self.setup.control_contexts))

    async def _coarse(self) -> None:
        """The same prompts with batches of 2N tokens or more."""
        tokens = self.setup.coarse_batched_tokens or 2 * self.profile.engine.block_tokens
        engine = self.profile.engine.model_copy(update={"max_num_batched_tokens": tokens})
        chosen = self._own_l2(COARSE).model_copy(update={"engine": engine})
        # The probe would wait for chunks that such batches do not store.
        async with (
            self.launch("lmcache", self.repeat, variant=chosen, label=COARSE, probe=False) as stack,
            visit(chosen, stack, self.record, self.nonce) as arm,
        ):
            self.visited.append(arm)
            assert stack.l2_path is not None
            self.folders.append(stack.l2_path)
            await self._rule(arm)

    async def _rule(self, arm: Arm) -> None:
        """Ask new prompts, empty L0, and let their first blocks return with another end."""
        count = range(self.setup.rule_contexts)
        asked = [prompts.question(self.profile, f"{self.nonce}:rule", "rule", n) for n in count]
        shared = _odd_blocks(self.profile)
        returning = [
            replace(one, token_ids=one.token_ids[:shared] + other.token_ids[shared:])
            for one, other in zip(
                asked,
                (prompts.question(self.profile, f"{self.nonce}:end", "rule", n) for n in count),
                strict=True,
            )
        ]
        first, again = RULE_ROUNDS
        await arm.round(first, asked)
        reset = await arm.stack.reset_local_cache()
        tokens = arm.profile.engine.max_num_batched_tokens
        arm.event("rule", batched_tokens=tokens, shared_tokens=shared, local_reset=reset)
        await arm.round(again, returning)

    def _contexts(self, count: int) -> list[Question]:
        count = min(count, self.profile.workload.contexts)
        return [prompts.question(self.profile, self.nonce, "fill", index) for index in range(count)]

    def _own_l2(self, name: str) -> Profile:
        """The profile with an L2 folder of this launch's own where the profile names one."""
        cache = self.profile.cache
        assert cache.l2 is not None
        if cache.l2.base_path is None:
            return self.profile
        own = PurePath(cache.l2.base_path) / f"kvlab-{self.nonce}-{self.repeat}-{name}"
        l2 = cache.l2.model_copy(update={"base_path": str(own)})
        return self.profile.model_copy(update={"cache": cache.model_copy(update={"l2": l2})})

    def _survey(self, arm: Arm, when: str, kept: Kept) -> None:
        """Write down what is in the L2 folder, and how many of the fill's records are whole."""
        found, now = survey(kept.folder), _records(kept.folder)
        arm.event(
            "l2_survey",
            when=when,
            files=found.files,
            bytes=found.bytes,
            groups=found.groups,
            empty=found.empty,
            short=found.short,
            temporary=found.temporary,
            foreign=found.foreign,
            odd_files=found.odd,
            kept=len(kept.records),
            surviving=sum(now.get(name) == size for name, size in kept.records.items()),
        )

    def _pages(self, arm: Arm, kind: str, found: storage.Residency, folder: Path) -> None:
        detail: dict[str, Any] = {
            "files": found.files,
            "bytes": found.bytes,
            "resident_bytes": found.resident_bytes,
            "device": storage.device(folder),
            "device_read_bytes": storage.device_read_bytes(folder),
        }
        arm.event(kind, "measure", **detail)


def _records(folder: Path) -> dict[str, int]:
    """Size by name of every record; kvlab's own file and temporary ones are none."""
    return {path.name: path.stat().st_size for path in storage.files(folder) if _is_record(path)}


def _is_record(path: Path) -> bool:
    return path.suffix == ".data" and not path.parent.name.startswith(".")


def _has_rule(profile: Profile) -> bool:
    """The 2N-1 rule is one of recurrent layers; it shows where chunks are as fine as blocks."""
    return profile.model.hybrid and profile.cache.chunk_tokens == profile.engine.block_tokens


def _odd_blocks(profile: Profile) -> int:
    """Tokens of the longest odd number of blocks that leaves one more block to the context.

    vLLM saves a state at the end of a context in any case; batches of 2N tokens end only after
    even numbers of blocks, so a prefix of an odd number is where they leave a gap.
    """
    block = profile.engine.block_tokens
    blocks = (profile.workload.context_tokens - 1) // block - 1
    return max(1, blocks if blocks % 2 else blocks - 1) * block


def _others(profile: Profile) -> dict[str, Profile]:
    """The configurations that must not find this one's records, by the name of the control."""
    cache = profile.cache.model_copy(update={"chunk_tokens": 2 * profile.cache.chunk_tokens})
    # The same weights under another path: LMCache names records by the path that vLLM is given.
    model = profile.model.model_copy(update={"name": f"./{profile.model.name}"})
    return {
        CONTROLS[0]: profile.model_copy(update={"cache": cache}),
        CONTROLS[1]: profile.model_copy(update={"model": model}),
    }
