"""The house does not grow back: what a reader has before them is no more than it was counted last, with a little slack."""

import count_house
import pytest

pytestmark = pytest.mark.timeout(200)


def grown(counts: dict[str, int]) -> list[str]:
    return [
        f"{row}: {count_house.LAST[row]} when counted last, {count} now"
        for row, count in counts.items()
        if count > count_house.SLACK * count_house.LAST[row]
    ]


def test_lines_files_interfaces_and_settings_have_not_grown():
    assert not grown(count_house.count_files())


def test_a_step_and_a_checkpoint_pass_no_more_files():
    assert not grown(count_house.count_walks())


def test_every_row_has_an_aim_and_a_last_count_above_which_it_is_named():
    assert set(count_house.AIMS) == set(count_house.LAST)
    one_more_interface = count_house.LAST["interfaces (ABC, Protocol)"] + 2
    assert grown({"interfaces (ABC, Protocol)": one_more_interface}) and not grown(count_house.LAST)
