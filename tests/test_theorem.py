"""The first property of the project: the same program gives the same results under every layout."""

import hypothesis
import jax
import pytest
from drawing import cases
from theorem import check

SHARDS, EXAMPLES = 10, 25


def holds(case):
    hypothesis.note(str(case))
    check(case)
    jax.clear_caches()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_layouts_never_change_results(shard):
    test = hypothesis.given(cases())(holds)
    test = hypothesis.settings(max_examples=EXAMPLES, database=None)(test)
    hypothesis.seed(-1 - shard)(test)()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak(soak):
    soak(holds, cases())
