"""Order of streams, graphs and the host: each wrong program is reported, and each right one runs."""

from __future__ import annotations

import re

import index_programs
import order_programs
import pytest

from cuda_on_cpu import EmulationError

pytestmark = pytest.mark.usefixtures("cuda")
PROGRAMS = (*order_programs.PROGRAMS, *index_programs.PROGRAMS)
PARAMS = [pytest.param(each, id=each.name.replace(" ", "-")) for each in PROGRAMS]


@pytest.mark.parametrize("program", PARAMS)
def test_a_right_program_is_quiet(program):
    program.run(True)


@pytest.mark.parametrize("program", PARAMS)
def test_a_wrong_program_is_reported(program):
    with pytest.raises(EmulationError) as raised:
        program.run(False)
    assert re.search(program.says, str(raised.value)), raised.value
