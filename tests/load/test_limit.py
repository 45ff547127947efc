"""Whether a ramp finds the true limit of simulated engines, in virtual time; 30 seeds are `make bench-ramp`."""

import ramp

EQUAL, MIXED = ramp.CASES[:2]


def test_the_ninth_client_of_eight_places_is_found() -> None:
    """It waits for as long as it is served, so P99 doubles with it."""
    for seed in range(1, 6):
        found = ramp.search(EQUAL, seed)
        assert (found.good, found.bad.concurrency if found.bad else None) == (8, 9)


def test_the_limit_of_mixed_lengths_is_found_within_one_step_of_refinement() -> None:
    outcomes = [ramp.outcome(MIXED, seed) for seed in range(1, 4)]
    assert all(outcome.right for outcome in outcomes), (ramp.truth(MIXED), outcomes)
    assert not any(outcome.false_stop for outcome in outcomes)
