"""The step of the A/B that asks what stores cost an answer while it is being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvlab import prompts
from kvlab.client import Question
from kvlab.profile import Profile
from kvlab.workloads.arm import Arm

ROUND = "decode"


async def decode(arm: Arm) -> None:
    """A few long answers to cold contexts, whose chunks LMCache stores meanwhile.

    It comes after the measured rounds and is recorded as a round of its own, so that nothing of it
    enters their accounts.
    """
    if arm.profile.experiments.bill.decode_requests:
        arm.deadline_s = arm.profile.timeouts.request_s  # for whole answers, not first tokens
        await arm.round(ROUND, list(questions(arm.profile, arm.nonce)))


def questions(profile: Profile, nonce: str) -> Iterator[Question]:
    """Contexts that no other round asks, with the output length of the profile."""
    setup, first = profile.experiments.bill, profile.workload.contexts
    for index in range(first, first + setup.decode_requests):
        context = prompts.question(profile, nonce, ROUND, index)
        yield replace(context, max_tokens=setup.decode_tokens)
