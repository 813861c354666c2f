"""The ablation is defined before anything starts: both flags said, no folder shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.errors import UsageError
from kvlab.stack.plan import Place, Plan, plan
from kvlab.workloads import object_groups
from tests import fake_stack

OFF, ON = object_groups.ARMS


def plans(**overrides: Any) -> dict[str, Plan]:
    """What the two settings would start."""
    chosen = fake_stack.profile(overrides)
    return {
        arm: plan(one, "lmcache", Place(l2=f"/l2/{arm}"))
        for arm, one in object_groups.variants(chosen).items()
    }


def changed(steps: Plan, *argv: str) -> Plan:
    """The same plan with another command for LMCache's server."""
    services = [
        replace(service, argv=argv) if service.role == "lmcache" else service
        for service in steps.services
    ]
    return replace(steps, services=tuple(services))


def argv_of(steps: Plan) -> list[str]:
    return list(next(s.argv for s in steps.services if s.role == "lmcache"))


def test_both_settings_pass_their_flag_and_differ_in_nothing_else() -> None:
    made = plans()
    assert "--no-separate-object-groups" in argv_of(made[OFF])
    assert "--separate-object-groups" in argv_of(made[ON])
    same = [
        [word for word in argv_of(made[arm]) if arm not in word and "object-groups" not in word]
        for arm in (OFF, ON)
    ]
    assert same[0] == same[1]
    vllm = [[s for s in made[arm].services if s.role == "vllm"] for arm in (OFF, ON)]
    assert vllm[0] == vllm[1]


@pytest.mark.parametrize("default", [True, False, None])
def test_what_the_profile_says_of_the_flag_does_not_matter(default: bool | None) -> None:
    made = plans(**{"cache.separate_object_groups": default})
    assert [object_groups.stated(made[arm])["flag"] for arm in (OFF, ON)] == [
        "--no-separate-object-groups",
        "--separate-object-groups",
    ]


@pytest.mark.parametrize("arm", [OFF, ON])
def test_args_without_the_flag_are_refused(arm: str) -> None:
    """P-25: "ablation not defined"."""
    made = plans()
    words = [word for word in argv_of(made[arm]) if "object-groups" not in word]
    made[arm] = changed(made[arm], *words)
    with pytest.raises(UsageError, match=f"ablation not defined: {arm} does not pass"):
        object_groups.refuse_undefined(made)


def test_a_raw_flag_that_takes_the_setting_back_is_refused() -> None:
    for value, complaint in ((None, "does not pass"), (True, "both pass"), (False, "both pass")):
        with pytest.raises(UsageError, match=f"ablation not defined: .*{complaint}"):
            plans(**{"cache.flags": {"separate-object-groups": value}})


def test_two_arms_with_the_same_base_path_are_refused() -> None:
    """P-25: layouts are not interchangeable."""
    made = plans()
    on = [word.replace(f"/l2/{ON}", f"/l2/{OFF}") for word in argv_of(made[ON])]
    made[ON] = changed(made[ON], *on)
    with pytest.raises(UsageError, match=f"share the L2 folder /l2/{OFF}"):
        object_groups.refuse_undefined(made)


def test_a_base_path_of_the_profile_becomes_one_folder_per_setting() -> None:
    made = plans(**{"cache.l2": {"adapter": {"type": "fs"}, "base_path": "/big/l2"}})
    folders = [object_groups.stated(made[arm])["base_path"] for arm in (OFF, ON)]
    assert folders == [f"/big/l2/{OFF}", f"/big/l2/{ON}"]


def test_a_base_path_inside_the_adapter_would_be_shared_and_is_refused() -> None:
    with pytest.raises(UsageError, match="share the L2 folder /big/l2"):
        plans(**{"cache.l2": {"adapter": {"type": "fs", "base_path": "/big/l2"}}})


def test_without_an_l2_there_is_no_folder_to_share() -> None:
    made = plans(**{"cache.l2": None})
    assert object_groups.stated(made[ON])["base_path"] is None
    object_groups.refuse_undefined(made)


def test_prompts_that_do_not_return_whole_are_refused() -> None:
    with pytest.raises(UsageError, match=r"workload\.shape is prefix_suffix"):
        plans(**{"workload.shape": "prefix_suffix", "workload.breaker_tokens": 8})


def test_repeats_are_interleaved() -> None:
    chosen = fake_stack.profile(experiments__object_groups={"repeats": 2})
    assert object_groups.order(chosen, object_groups.ARMS) == [(1, OFF), (1, ON), (2, ON), (2, OFF)]


def test_steps_count_every_request() -> None:
    chosen = fake_stack.profile(experiments__object_groups={"repeats": 2}, workload__contexts=6)
    steps = object_groups.steps(chosen, object_groups.ARMS)
    assert steps[f"request:{OFF}:fill"] == steps[f"request:{ON}:measure"] == 12
    assert object_groups.steps(chosen, [ON], 1)[f"launch:{ON}"] == 1
