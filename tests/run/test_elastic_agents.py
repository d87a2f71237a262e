"""torchrun's own agents, one of them killed: the other restarts its worker, and training goes on with no hand laid on."""

import elastic
import pytest

PLAIN = {"max_steps": 12, "save_steps": 3, "logging_steps": 3, "disable_tqdm": True, "report_to": "none", "step_s": 0.1}
SHAPE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def assert_went_on(outcome: elastic.Outcome, ranks: int) -> None:
    assert outcome.ended, outcome.statuses
    assert outcome.ranks_after == ranks and outcome.resumed_at > 0
    assert elastic.is_each_row_once(elastic.rows_trained(outcome.starts), 480)
    assert outcome.starts[-1].whole_steps(4 * 2 * (ranks + 1) // ranks // 4)[-1] == PLAIN["max_steps"] - 1


@pytest.mark.slow
@pytest.mark.timeout(elastic.LIMIT_S + 60)
def test_one_of_two_agents_is_killed_and_the_other_ends_the_run(tmp_path):
    outcome = elastic.killed_run(
        tmp_path / "run",
        elastic.Network([elastic.Node(), elastic.Node()]),
        PLAIN | SHAPE | {"zero": "stage=2,checkpoint.resume=auto"},
        killed=1,
        after_step=7,
        pause_s=0.0,
    )
    assert_went_on(outcome, ranks=1)


@pytest.mark.slow
@pytest.mark.timeout(2 * elastic.LIMIT_S + 60)
@pytest.mark.parametrize("killed", [0, 2])
def test_one_of_three_nodes_is_lost_and_the_others_go_on_as_by_hand(killed, tmp_path):
    with elastic.own_network(3) as network:
        outcome = elastic.killed_run(
            tmp_path / "run",
            network,
            PLAIN | SHAPE | {"save_steps": 2, "zero": "stage=2,checkpoint.resume=auto"},
            killed=killed,
            after_step=7,
            pause_s=0.0,
        )
    assert_went_on(outcome, ranks=2)
    assert outcome.at_step - outcome.resumed_at <= 4
    assert elastic.compared(tmp_path / "run", outcome, PLAIN | {"save_steps": 2}, 3) == "bit for bit"
